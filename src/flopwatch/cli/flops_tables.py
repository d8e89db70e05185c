"""What `flopwatch flops` counts and prints: the FLOPs of one training step, by module."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from flopwatch.cli import print_json
from flopwatch.errors import InputError
from flopwatch.flops.count import count_flops
from flopwatch.hardware import explain_unknown, peak_flops
from flopwatch.mfu import calculate_mfu
from flopwatch.models.load import dummy_batch, load_model
from flopwatch.numbers import flop_prefix, flop_rate, percent
from flopwatch.numbers import flops as flop_text
from flopwatch.records.flops import FlopCount, Peak, PhaseFlops

_METHODS = {
    "trace": "counted by a trace that runs nothing",
    "step": "counted while a real step ran",
    "estimate": "estimated from the shapes of the modules",
}
_ROWS = 14


def count_and_print(
    model: str,
    batch_size: int,
    seq_len: int,
    checkpoint: bool,
    attention: str,
    method: str,
    device: str | None,
    dtype: str | None,
    step_time: float | None,
    as_json: bool,
) -> None:
    peak = _peak(device, dtype, step_time)
    # Hides advice of transformers about training options, which is imported with a model of it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    built = _built(model, checkpoint=checkpoint, with_weights=method == "step")
    count = count_flops(built, dummy_batch(built, batch_size, seq_len), method=method, attention=attention)  # type: ignore[arg-type]
    facts = _facts(model, built, count, batch_size, seq_len)
    if peak is not None and step_time is not None:
        facts["step"] = _step(count, peak, step_time)
    if as_json:
        print_json(facts)
    else:
        print_flops(facts, count, peak)


def _built(model: str, *, checkpoint: bool, with_weights: bool) -> nn.Module:
    built = load_model(model, device="cpu" if with_weights else "meta")
    if checkpoint:
        enable = getattr(built, "gradient_checkpointing_enable", None)
        if enable is None:
            raise InputError(
                f"{type(built).__name__} has no method gradient_checkpointing_enable; leave out --checkpoint"
            )
        enable()
    return built


def _peak(device: str | None, dtype: str | None, step_time: float | None) -> Peak | None:
    if (device is None) != (step_time is None):
        raise InputError("to print the MFU of a step, pass both --device and --step-time")
    if device is None:
        return None
    peak = peak_flops(dtype=dtype, name=device)
    if peak is None:
        raise InputError(explain_unknown(dtype=dtype, name=device))
    return peak


def _facts(spec: str, model: nn.Module, count: FlopCount, batch_size: int, seq_len: int) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "model": spec,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "batch_size": batch_size,
        "seq_len": seq_len,
        "flops": count.to_json(),
    }


def _step(count: FlopCount, peak: Peak, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "mfu": calculate_mfu(count.model_flops, seconds, peak.flops_per_s),
        "hfu": calculate_mfu(count.hardware_flops, seconds, peak.flops_per_s),
        "peak": peak.to_json(),
    }


def print_flops(facts: Mapping[str, Any], count: FlopCount, peak: Peak | None) -> None:
    console = Console(highlight=False)
    tokens = facts["batch_size"] * facts["seq_len"]
    console.print(
        f"[bold]{facts['model']}[/]  {facts['parameters']:,} parameters, "
        f"{facts['batch_size']} x {facts['seq_len']:,} = {tokens:,} tokens\n"
    )
    console.print(_totals(count, tokens))
    console.print()
    console.print(_modules(count))
    if peak is not None:
        _print_step(console, facts["step"], peak)
    _print_warnings(console, count)


def _totals(count: FlopCount, tokens: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("model FLOPs", flop_text(count.model_flops), f"{_how_sure(count)} {count.model_flops:,}")
    table.add_row("hardware FLOPs", flop_text(count.hardware_flops), _share(count.hardware_flops, count.model_flops))
    table.add_row(
        "per token",
        flop_text(count.model_flops / tokens),
        f"{_METHODS[count.method]}, attention {count.attention}",
    )
    return table


def _how_sure(count: FlopCount) -> str:
    if count.method == "estimate":
        return "about"
    return "at least" if count.is_lower_bound else "exactly"


def _modules(count: FlopCount) -> Table:
    """A table with the FLOPs of each module. Layers whose names differ only in their number share a row."""
    groups: dict[str, PhaseFlops] = defaultdict(PhaseFlops)
    members: dict[str, int] = defaultdict(int)
    for path, flops in count.by_module.items():
        name = _without_numbers(path)
        groups[name] += flops
        members[name] += 1
    ranked = sorted(groups.items(), key=lambda item: -item[1].total)
    shown = [(name, str(members[name]), flops) for name, flops in ranked[:_ROWS]]
    if len(ranked) > _ROWS:
        rest = sum((flops for _, flops in ranked[_ROWS:]), PhaseFlops())
        shown.append((f"{len(ranked) - _ROWS} more", "", rest))
    factor, prefix = flop_prefix(ranked[0][1].total)
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="bold", caption=f"in {prefix}FLOP", caption_justify="left"
    )
    table.add_column("module")
    for heading in ("times", "forward", "backward", "rerun", "share"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for name, times, flops in shown:
        parts = [f"{part / factor:,.1f}" if part else "" for part in (flops.forward, flops.backward, flops.recompute)]
        share = flops.total / count.hardware_flops
        table.add_row(name, times, *parts, percent(share), Text("█" * round(share * 24), style="cyan"))
    return table


def _without_numbers(path: str) -> str:
    """Replace the layer's number (the first in `path`) and the expert's by `*`: `h.3.mlp.0` becomes `h.*.mlp.0`."""
    without_layer = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path, count=1)
    return re.sub(r"\bexperts\.\d+", "experts.*", without_layer) or "(the model itself)"


def _print_step(console: Console, step: Mapping[str, Any], peak: Peak) -> None:
    console.print(
        f"\nA step of {step['seconds']:g} s on one {peak.device}, "
        f"peak {flop_rate(peak.flops_per_s)} in {peak.dtype} ({peak.kind}):\n"
        f"[bold green]MFU {percent(step['mfu'])}[/]  HFU {percent(step['hfu'])}"
    )
    if step["hfu"] > 1:
        console.print(f"[yellow]This is more than the peak of one {peak.device}; check the step time.[/]")


def _print_warnings(console: Console, count: FlopCount) -> None:
    for note in count.notes:
        console.print(f"[yellow]Note: {note}[/]")
    for op in count.uncounted:
        console.print(f"[yellow]Not counted: {op.calls} calls of {op.op} in {op.module or 'the model'}, {op.shapes}[/]")
    if count.is_lower_bound:
        console.print("[yellow]The true FLOPs are higher; add a formula for the op with flopwatch.register_formula.[/]")


def _share(flops: int, whole: int) -> str:
    return f"{flops / whole:.3f} x the model FLOPs, with recomputation" if flops != whole else "nothing is recomputed"
