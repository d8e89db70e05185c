"""The screens of `flopwatch flops`."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flopwatch.records.flops import FlopCount, Peak, PhaseFlops

_METHODS = {
    "trace": "traced, nothing was run",
    "step": "counted on one real step",
    "estimate": "estimated from the modules' shapes",
}
_ROWS = 14


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
    _print_doubts(console, count)


def _totals(count: FlopCount, tokens: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("model FLOPs", scaled(count.model_flops), f"{_how_sure(count)} {count.model_flops:,}")
    table.add_row("hardware FLOPs", scaled(count.hardware_flops), _share(count.hardware_flops, count.model_flops))
    table.add_row(
        "per token",
        scaled(count.model_flops / tokens),
        f"attention counted {count.attention}, {_METHODS[count.method]}",
    )
    return table


def _how_sure(count: FlopCount) -> str:
    if count.method == "estimate":
        return "about"
    return "at least" if count.is_lower_bound else "exactly"


def _modules(count: FlopCount) -> Table:
    """One row per kind of module: layers that differ by their number only are added up."""
    groups: dict[str, PhaseFlops] = defaultdict(PhaseFlops)
    members: dict[str, int] = defaultdict(int)
    for path, flops in count.by_module.items():
        kind = _kind(path)
        groups[kind] += flops
        members[kind] += 1
    ranked = sorted(groups.items(), key=lambda item: -item[1].total)
    shown = [(kind, str(members[kind]), flops) for kind, flops in ranked[:_ROWS]]
    if len(ranked) > _ROWS:
        rest = sum((flops for _, flops in ranked[_ROWS:]), PhaseFlops())
        shown.append((f"{len(ranked) - _ROWS} more", "", rest))
    factor, prefix = _scale(ranked[0][1].total)
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="bold", caption=f"in {prefix}FLOP", caption_justify="left"
    )
    table.add_column("module")
    for heading in ("times", "forward", "backward", "again", "share"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for kind, times, flops in shown:
        parts = [f"{part / factor:,.1f}" if part else "" for part in (flops.forward, flops.backward, flops.recompute)]
        share = flops.total / count.hardware_flops
        table.add_row(kind, times, *parts, f"{share:.1%}", Text("█" * round(share * 24), style="cyan"))
    return table


def _kind(path: str) -> str:
    """`model.layers.3.mlp.0` to `model.layers.*.mlp.0`: the layer's number goes, and an expert's."""
    without_layer = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path, count=1)
    return re.sub(r"\bexperts\.\d+", "experts.*", without_layer) or "(the model itself)"


def _print_step(console: Console, step: Mapping[str, Any], peak: Peak) -> None:
    console.print(
        f"\nA step of {step['seconds']:g} s on one {peak.device}, "
        f"{scaled(peak.flops_per_s)}/s in {peak.dtype} by its {peak.kind}:\n"
        f"[bold green]MFU {_percent(step['mfu'])}[/]  HFU {_percent(step['hfu'])}"
    )
    if step["hfu"] > 1:
        console.print(f"[yellow]More than the peak: no {peak.device} can be this fast. Check the step time.[/]")


def _print_doubts(console: Console, count: FlopCount) -> None:
    for note in count.notes:
        console.print(f"[yellow]Note: {note}[/]")
    for op in count.uncounted:
        console.print(f"[yellow]Not counted: {op.op} in {op.module or 'the model'}, {op.calls} calls, {op.shapes}[/]")
    if count.is_lower_bound:
        console.print("[yellow]The true number is higher. Add a formula with flopwatch.register_formula.[/]")


def _share(flops: int, whole: int) -> str:
    return f"{flops / whole:.3f} x model FLOPs: recomputation" if flops != whole else "the same: nothing runs twice"


def scaled(flops: float) -> str:
    """FLOPs with a prefix.

    >>> scaled(989.4e12)
    '989.4 TFLOP'
    """
    factor, prefix = _scale(flops)
    return f"{flops / factor:.1f} {prefix}FLOP"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.01 else f"{100 * share:.2g}%"


def _scale(flops: float) -> tuple[float, str]:
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if flops >= factor:
            return factor, prefix
    return 1.0, ""
