"""Asks flopwatch about one architecture and compares every answer with real steps."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import flopwatch
from zoo.padding import padded_cases
from zoo.specimen import Shape, Specimen, Verdict
from zoo.truth import SEED, step_loss, true_flops


def examine(specimen: Specimen) -> dict[str, Verdict]:
    """The three cells of a row. An exception that is not flopwatch's own counts as wrong: it would end a training."""
    columns: dict[str, Callable[[Specimen], Verdict]] = {"count": _count, "law": _law, "padding": _padding}
    return {name: _verdict_or_error(column, specimen) for name, column in columns.items()}


def _verdict_or_error(column: Callable[[Specimen], Verdict], specimen: Specimen) -> Verdict:
    try:
        return column(specimen)
    except flopwatch.FlopwatchError as error:
        return Verdict("told", reason=_first_line(error))
    except TruthError as error:
        return Verdict("not asked", reason=str(error))
    except Exception as error:
        return Verdict("wrong", reason=f"raised {type(error).__name__}: {_first_line(error)}")


class TruthError(Exception):
    """The real step failed, so there is nothing to compare with."""


def _truth(model: nn.Module, batch: Any, *, as_it_runs: bool = False) -> int:
    try:
        return true_flops(model, batch, as_it_runs=as_it_runs)
    except Exception as error:
        raise TruthError(f"the real step failed: {type(error).__name__}: {_first_line(error)}") from error


def _count(specimen: Specimen) -> Verdict:
    """The executed FLOPs of the eager model, and the needed ones of the model as a user builds it."""
    batch = specimen.batch(specimen.example)
    executed = _truth(specimen.build(True), batch, as_it_runs=True)
    eager = _counted(specimen.build(True), batch)
    verdict = judge(eager.hardware_flops, executed, count_doubts(eager), "executed FLOPs")
    if verdict.status != "equal":
        return verdict
    truth = _truth(specimen.build(True), batch)
    default = _counted(specimen.build(False), batch)
    if default.model_flops != truth:  # the default may compute something else; then that is what must be counted
        truth = _truth(specimen.build(False), batch)
    return judge(default.model_flops, truth, count_doubts(default), "default attention")


def _counted(model: nn.Module, batch: Any) -> flopwatch.FlopCount:
    torch.manual_seed(SEED)
    return flopwatch.count_flops(model, batch, loss_fn=step_loss)


def count_doubts(count: flopwatch.FlopCount) -> tuple[str, ...]:
    """Whatever a user would read beside the number."""
    missing = tuple(f"{op.op} in {op.module} has no formula" for op in count.uncounted)
    return (*count.notes, *missing)


def judge(got: int, truth: int, doubts: tuple[str, ...], what: str = "") -> Verdict:
    if got == truth:
        return Verdict("equal", got, truth)
    reason = "; ".join(filter(None, (what, *doubts)))
    return Verdict("told" if doubts else "wrong", got, truth, reason)


def _law(specimen: Specimen) -> Verdict:
    """A law made of one batch, asked for other batch sizes and for lengths of both parities, one beyond the example."""
    model = specimen.build(False)
    torch.manual_seed(SEED)
    law = flopwatch.fit_flops_law(model, specimen.batch(specimen.example), loss_fn=step_loss)
    verdict = Verdict("not asked", reason="no other shape")
    for shape in other_shapes(specimen, has_length=law.seq_lens is not None):
        length = getattr(shape, specimen.law_length) if law.seq_lens is not None else None
        truth = _truth(specimen.build(True), specimen.batch(shape))
        what = f"at {shape.batch_size} x {length}" if length else f"at batch size {shape.batch_size}"
        got = law.model_flops(shape.batch_size, length)
        verdict = judge(got, truth, law_doubts(law, shape.batch_size, length), what)
        if verdict.status != "equal":
            return verdict
    return verdict


def law_doubts(law: flopwatch.FlopLaw, batch_size: int, length: int | None) -> tuple[str, ...]:
    """Why this answer of the law may be wrong, as far as the law says so itself."""
    exact_for = getattr(law, "exact_for", None)  # older laws answer for all of their range at once
    says_exact = exact_for(batch_size, length) if exact_for else law.exact and law.covers(length)
    return () if says_exact else (*law.notes, f"the law says it is not exact there (lengths {law.seq_lens})")


def other_shapes(specimen: Specimen, *, has_length: bool) -> list[Shape]:
    """Two shapes around the example and one beyond it."""
    example = specimen.example
    if not has_length:
        return [replace(example, batch_size=size) for size in (3, 5)]
    if specimen.law_length == "target_length":
        lengths = (example.target_length - 2, example.target_length - 1, example.target_length + 3)
    else:
        unit = max(1, example.length // 24)  # raw audio is longer than text by a factor
        lengths = (example.length - 7 * unit, example.length - 2 * unit - (unit > 1), example.length + 13 * unit)
    pairs = zip((3, 1, 2), lengths, strict=True)
    return [replace(example, **{"batch_size": size, specimen.law_length: length}) for size, length in pairs]


def _padding(specimen: Specimen) -> Verdict:
    if not (specimen.has_length and specimen.takes_mask):
        return Verdict("not asked", reason="the model takes no attention mask over a sequence")
    verdict = Verdict("not asked")
    for case in padded_cases(specimen):
        truth = case.truth(partial(_truth, specimen.build(True)))
        count = _counted(specimen.build(False), case.batch)
        verdict = judge(count.model_flops, truth, count_doubts(count), case.what)
        if verdict.status != "equal":
            return verdict
    return verdict


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else ""
