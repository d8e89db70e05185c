"""What `flopwatch flops` counts and prints: the FLOPs of one training step, by module."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from flopwatch.cli import print_json
from flopwatch.errors import InputError
from flopwatch.flops.conventions import flops_by_convention
from flopwatch.flops.count import count_flops
from flopwatch.hardware import explain_unknown, peak_flops
from flopwatch.mfu import calculate_mfu
from flopwatch.models.load import dummy_batch, load_model
from flopwatch.numbers import flop_prefix, flop_rate, percent
from flopwatch.numbers import flops as flop_text
from flopwatch.present import document as doc
from flopwatch.present.terminal import print_document
from flopwatch.records.flops import ConventionFlops, FlopCount, Peak, PhaseFlops

_METHODS = {
    "trace": "counted by a trace that runs nothing",
    "step": "counted while a real step ran",
    "estimate": "estimated from the shapes of the modules",
}
_ROWS = 14


def count_and_print(
    model: str, batch_size: int, seq_len: int, checkpoint: bool, step_time: float | None, as_json: bool, **given: Any
) -> None:
    method, peak = given["method"], _peak(given["device"], given["dtype"], step_time)
    # Hides advice of transformers about training options, which is imported with a model of it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    built = load_model(model, device="cpu" if method == "step" else "meta")
    if checkpoint:
        enable = getattr(built, "gradient_checkpointing_enable", None)
        if enable is None:
            raise InputError(
                f"{type(built).__name__} has no method gradient_checkpointing_enable; leave out --checkpoint"
            )
        enable()
    batch = dummy_batch(built, batch_size, seq_len)
    published = given["convention"] and flops_by_convention(built, batch, given["convention"], method=method)
    count = count_flops(built, batch, method=method, attention=given["attention"])
    parameters = list(built.parameters())
    facts: dict[str, Any] = {
        "model": model,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "batch_size": batch_size,
        "seq_len": seq_len,
        "flops": count.to_json(),
    }
    if peak is not None and step_time is not None:
        facts["step"] = {
            "seconds": step_time,
            "mfu": calculate_mfu(count.model_flops, step_time, peak.flops_per_s),
            "hfu": calculate_mfu(count.hardware_flops, step_time, peak.flops_per_s),
            "peak": peak.to_json(),
        }
    if published:
        facts["convention"] = published.to_json()
        if peak is not None and step_time is not None and published.flops is not None:
            facts["step"]["mfu_by_convention"] = calculate_mfu(published.flops, step_time, peak.flops_per_s)
    if as_json:
        print_json(facts)
    else:
        print_document(_document(facts, count, peak, published))


def _peak(device: str | None, dtype: str | None, step_time: float | None) -> Peak | None:
    if (device is None) != (step_time is None):
        raise InputError("to print the MFU of a step, pass both --device and --step-time")
    if device is None:
        return None
    peak = peak_flops(dtype=dtype, name=device)
    if peak is None:
        raise InputError(explain_unknown(dtype=dtype, name=device))
    return peak


def _document(
    facts: Mapping[str, Any], count: FlopCount, peak: Peak | None, published: ConventionFlops | None
) -> doc.Document:
    tokens = facts["batch_size"] * facts["seq_len"]
    size = f"{facts['batch_size']} x {facts['seq_len']:,} = {tokens:,} tokens"
    sure = "about" if count.method == "estimate" else "at least" if count.is_lower_bound else "exactly"
    recomputed = "nothing is recomputed"
    if count.hardware_flops != count.model_flops:
        recomputed = f"{count.hardware_flops / count.model_flops:.3f} x the model FLOPs, with recomputation"
    totals = {
        "model FLOPs": (count.model_flops, f"{sure} {count.model_flops:,}"),
        "hardware FLOPs": (count.hardware_flops, recomputed),
        "per token": (count.model_flops / tokens, f"{_METHODS[count.method]}, attention {count.attention}"),
    }
    if published is not None and published.flops is not None:
        ratio = f"{published.flops / count.model_flops:.4f} x the model FLOPs"
        totals["by convention"] = published.flops, f"{published.convention}: {ratio}, attention {published.attention}"
    rows = [
        (doc.Cell(name, "strong"), flop_text(flops), doc.Cell(detail, "soft"))
        for name, (flops, detail) in totals.items()
    ]
    remarks = [] if peak is None else _about_step(facts["step"], peak)
    notes = [f"Note: {note}" for note in count.notes]
    notes += [
        f"Not counted: {op.calls} calls of {op.op} in {op.module or 'the model'}, {op.shapes}" for op in count.uncounted
    ]
    if count.is_lower_bound:
        notes.append("The true FLOPs are higher; add a formula for the op with flopwatch.register_formula.")
    return doc.Document(
        facts["model"],
        [
            doc.Grid(("", *doc.numbers(""), ""), rows),
            _modules(count),
            *remarks,
            *_about_convention(published),
            *(doc.Text(note, "warn") for note in notes),
        ],
        lead=[f"{facts['parameters']:,} parameters, {size}"],
    )


def _about_convention(published: ConventionFlops | None) -> list[doc.Text]:
    if published is None:
        return []
    if published.why_not is not None:
        said = f"The convention {published.convention} has no FLOPs for this model, because {published.why_not}."
        return [doc.Text(said, "warn")]
    return [doc.Text(f"The convention {published.convention} is stated by {published.source}.", "soft")]


def _modules(count: FlopCount) -> doc.Grid:
    """A table with the FLOPs of each module. Layers whose names differ only in their number share a row."""
    groups: dict[str, PhaseFlops] = defaultdict(PhaseFlops)
    members: dict[str, int] = defaultdict(int)
    for path, flops in count.by_module.items():
        # `h.3.mlp.0` becomes `h.*.mlp.0`.
        without_layer = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path, count=1)
        name = re.sub(r"\bexperts\.\d+", "experts.*", without_layer) or "(the model itself)"
        groups[name] += flops
        members[name] += 1
    ranked = sorted(groups.items(), key=lambda item: -item[1].total)
    shown = [(name, str(members[name]), flops) for name, flops in ranked[:_ROWS]]
    if len(ranked) > _ROWS:
        rest = sum((flops for _, flops in ranked[_ROWS:]), PhaseFlops())
        shown.append((f"{len(ranked) - _ROWS} more", "", rest))
    factor, prefix = flop_prefix(ranked[0][1].total)
    rows: list[tuple[doc.Cell | str, ...]] = []
    for name, times, flops in shown:
        parts = [f"{part / factor:,.1f}" if part else "" for part in (flops.forward, flops.backward, flops.recompute)]
        share = flops.total / count.hardware_flops
        rows.append((name, times, *parts, percent(share), doc.Cell("█" * round(share * 24), "ok")))
    numbers = doc.english_numbers("times", "forward", "backward", "rerun", "share")
    return doc.Grid(["module", *numbers, ""], rows, note=f"in {prefix}FLOP")


def _about_step(step: Mapping[str, Any], peak: Peak) -> list[doc.Text]:
    rate = f"peak {flop_rate(peak.flops_per_s)} in {peak.dtype} ({peak.kind})"
    said = [
        doc.Text(f"A step of {step['seconds']:g} s on one {peak.device}, {rate}:"),
        doc.Text(f"MFU {percent(step['mfu'])}, HFU {percent(step['hfu'])}", "better"),
    ]
    if "mfu_by_convention" in step:
        said.append(doc.Text(f"MFU by the convention {percent(step['mfu_by_convention'])}", "better"))
    if step["hfu"] > 1:
        said.append(doc.Text(f"This is more than the peak of one {peak.device}; check the step time.", "warn"))
    return said
