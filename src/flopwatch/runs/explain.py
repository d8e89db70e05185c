"""One MFU taken apart: numerator, denominator, seconds, tokens, and the division. Pure arithmetic on a log.

A step's numbers are its own cells. A window's are sums over those of its steps that its MFU is made of: timed, not
warm-up, FLOPs known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isclose
from typing import Any

from flopwatch.records.metrics import APART, Goodput, goodput_of
from flopwatch.records.run import Number, Provenance, Row
from flopwatch.runs import RunLog, provenance_at, step_cells
from flopwatch.runs.explain_law import LawSum, add_up, apply_law


@dataclass(frozen=True, slots=True)
class Division:
    """FLOPs over seconds over peak.

    Attributes:
        flops: The numerator.
        seconds: How long that took.
        peak_flops_per_s: Of one device.
        device_count: Devices whose peaks are summed.
        share: The result.
        logged: The same number as the run logged it; None where it logged none.
    """

    flops: int
    seconds: float
    peak_flops_per_s: float
    device_count: int
    share: float
    logged: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything behind one MFU. What is not known is None, and `unknown` says why.

    Attributes:
        log: The file.
        step: The step, or the window's last one.
        window: First and last step of its logging window.
        is_window: True when the numbers are sums over the window.
        session: Which session of the run, counted from 1.
        sessions: How many there are.
        steps: The steps that are summed.
        left_out: The window's other steps, each with the reason.
        model_flops: The numerator of MFU.
        hardware_flops: The numerator of HFU.
        recompute_flops: The part of it that ran a second time; None for a log that does not tell.
        model_law: How the model FLOPs come about, where the log tells.
        hardware_law: The same for the hardware FLOPs.
        seconds: Step time, input wait included.
        input_wait_seconds: The part of it before the batch was there.
        is_warm_up: True for a single step that is left out of its window's MFU.
        other_seconds: Time since the first start that is in no step: `eval`, `checkpoint`, `pause`, `count`.
        goodput: Of the whole run up to here; None for a log that does not tell.
        samples: Rows of the batches.
        tokens: Positions of the batches, padding included.
        real_tokens: Positions that are not padding.
        trainable_tokens: Positions whose label is not -100.
        provenance: Where the numbers come from.
        exact: Whether the window's FLOPs are exact; None for a log that does not tell.
        notes: Why they are not.
        mfu: The division of the model FLOPs.
        hfu: The division of the hardware FLOPs.
        unknown: What is not known, and why.
        torn_lines: Lines of the log that could not be read.
        world_size: Ranks of the training. Single steps are those of the logging rank: of all ranks the log has windows.
        all_ranks_mfu: MFU of the window over all ranks, where there are several.
    """

    log: str
    step: int
    window: tuple[int, int]
    is_window: bool
    session: int
    sessions: int
    steps: tuple[int, ...]
    left_out: Mapping[int, str]
    model_flops: int | None
    hardware_flops: int | None
    recompute_flops: int | None
    model_law: LawSum | None
    hardware_law: LawSum | None
    seconds: float | None
    input_wait_seconds: float | None
    is_warm_up: bool
    other_seconds: Mapping[str, Number]
    goodput: Goodput | None
    samples: int | None
    tokens: int | None
    real_tokens: int | None
    trainable_tokens: int | None
    provenance: Provenance | None
    mfu: Division | None
    hfu: Division | None
    unknown: Mapping[str, str]
    torn_lines: int
    world_size: int = 1
    all_ranks_mfu: float | None = None
    exact: bool | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Cells = Mapping[str, Any]


def explain_step(log: RunLog, step: int) -> Explanation:
    """Take one step's MFU apart.

    Raises:
        InputError: The step is not in the log.
    """
    found = step_cells(log, step)
    return _explained(log, found.row, [found.cells], {}, is_window=False)


def explain_window(log: RunLog, row: Row) -> Explanation:
    """Take a window's MFU apart, as logged in `perf/mfu`."""
    numbers = row.steps.get("step", ())
    cells = [step_cells(log, number).cells for number in numbers]
    needs_flops = any("model_flops" in cell for cell in cells)
    left_out = {cell["step"]: reason for cell in cells if (reason := _why_left_out(cell, needs_flops=needs_flops))}
    counted = [cell for cell in cells if cell["step"] not in left_out]
    return _explained(log, row, counted, left_out, is_window=True)


def _why_left_out(cells: Cells, *, needs_flops: bool) -> str | None:
    if cells.get("seconds") is None:
        return "not timed"
    if cells.get("warm_up"):
        return "warm-up"
    return "FLOPs not known" if needs_flops and "model_flops" not in cells else None


def _explained(
    log: RunLog, row: Row, steps: Sequence[Cells], left_out: Mapping[int, str], *, is_window: bool
) -> Explanation:
    numbers = row.steps.get("step") or [row.step]
    step = row.step if is_window else steps[0]["step"]
    provenance = _with_peak_of(row, provenance_at(log, step))
    sums = {name: _sum(steps, name) for name in _SUMMED}
    world_size = max((start.world_size for start in log.starts), default=1)
    # With several ranks the logged shares are theirs together, and the steps are one rank's own.
    comparable = row.values if is_window and world_size == 1 else {}
    return Explanation(
        log=str(log.path),
        step=step,
        window=(numbers[0], numbers[-1]),
        is_window=is_window,
        session=_session_of(step, log),
        sessions=max(len(log.starts), 1),
        steps=tuple(cells["step"] for cells in steps),
        left_out=left_out,
        **sums,
        model_law=_law(steps, provenance, "model"),
        hardware_law=_law(steps, provenance, "hardware"),
        is_warm_up=not is_window and bool(steps[0].get("warm_up")),
        other_seconds=_other_seconds(row),
        goodput=goodput_of(row.ledger.get("seconds", {})),
        provenance=provenance,
        mfu=_division(steps, "model_flops", provenance, comparable.get("perf/mfu")),
        hfu=_division(steps, "hardware_flops", provenance, comparable.get("perf/hfu")),
        unknown=_unknown(sums, provenance, left_out, log),
        torn_lines=log.torn_lines,
        world_size=world_size,
        all_ranks_mfu=row.values.get("perf/mfu") if world_size > 1 else None,
        exact=row.exact,
        notes=tuple(row.notes),
    )


def _with_peak_of(row: Row, provenance: Provenance | None) -> Provenance | None:
    """The row's own denominator, which follows the types that its steps ran in; old logs have one for the run."""
    if provenance is None or row.exact is None:
        return provenance
    if row.peak is None or provenance.peak is None:
        return replace(provenance, peak=None)
    if isclose(row.peak["flops_per_s"], provenance.peak["flops_per_s"], rel_tol=1e-9):
        return provenance
    source = f"the mean over the compute types of these steps, by their FLOPs; {provenance.peak['source']}"
    return replace(provenance, peak={**provenance.peak, **row.peak, "source": source})


def _session_of(step: int, log: RunLog) -> int:
    """The last one that began before the step: later ones have run it again."""
    began = [start.resumed_after_step is None or start.resumed_after_step < step for start in log.starts]
    return max((number for number, is_before in enumerate(began, 1) if is_before), default=1)


_SUMMED = (
    "model_flops",
    "hardware_flops",
    "recompute_flops",
    "seconds",
    "input_wait_seconds",
    "samples",
    "tokens",
    "real_tokens",
    "trainable_tokens",
)


def _sum(steps: Sequence[Cells], name: str) -> Any:
    """None when any of the steps does not know it: a part of a sum is a wrong sum."""
    cells = [step.get(name) for step in steps]
    return sum(cells) if cells and None not in cells else None


def _law(steps: Sequence[Cells], provenance: Provenance | None, which: str) -> LawSum | None:
    if provenance is None or not provenance.law:
        return None
    return add_up([apply_law(provenance.law, step, which) for step in steps])


def _other_seconds(row: Row) -> dict[str, Number]:
    ledger = row.ledger.get("seconds", {})
    spent = {name: row.values.get(f"time/{name}_seconds", ledger.get(name)) for name in APART}
    return {name: seconds for name, seconds in spent.items() if seconds is not None}


def _division(
    steps: Sequence[Cells], name: str, provenance: Provenance | None, logged: Number | None
) -> Division | None:
    if provenance is None or provenance.peak is None:
        return None
    known = [step for step in steps if step.get(name) is not None and step.get("seconds") is not None]
    flops, seconds = sum(step[name] for step in known), sum(step["seconds"] for step in known)
    if not known or seconds <= 0:
        return None
    peak, devices = float(provenance.peak["flops_per_s"]), provenance.device_count
    return Division(flops, seconds, peak, devices, flops / (seconds * peak * devices), logged)


def _unknown(sums: Cells, provenance: Provenance | None, left_out: Mapping[int, str], log: RunLog) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if sums["model_flops"] is None:
        reasons["model_flops"] = _why_no_flops(provenance, left_out)
    if sums["seconds"] is None:
        reasons["seconds"] = (
            "no step of the window was timed outside warm-up"
            if left_out
            else "the step has no beginning in the log; the first step of a session is timed only inside monitor.step()"
        )
    if provenance is None or provenance.peak is None:
        device = next((start.environment.get("device") for start in reversed(log.starts)), None)
        reasons["peak"] = (
            f"nobody knows the peak of {device or 'this device'}; pass peak_flops_per_s= to TrainingMonitor, "
            "or set FLOPWATCH_PEAK_TFLOPS"
        )
    if sums["tokens"] is None and sums["seconds"] is not None:
        reasons["tokens"] = "the batch's shape was not given; pass batch= or attention_mask= to log_step"
    return reasons


def _why_no_flops(provenance: Provenance | None, left_out: Mapping[int, str]) -> str:
    if provenance is None or provenance.method is None:
        return "FLOPs had not been found by then" + _notes(provenance)
    if left_out and "FLOPs not known" not in left_out.values():
        return "no step of the window counts: " + ", ".join(sorted(set(left_out.values())))
    return "the shape of the batch was not given, or could not be counted" + _notes(provenance)


def _notes(provenance: Provenance | None) -> str:
    return f" ({'; '.join(provenance.notes)})" if provenance is not None and provenance.notes else ""
