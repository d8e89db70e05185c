"""`flopwatch flops`: what a training step costs. `flopwatch peak`: what a device can do at best."""

import re
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopwatch.number_format import flop_prefix, flop_rate, percent
from flopwatch.number_format import flops as flop_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import nn

    from flopwatch.records.flops import FlopCount, Peak


_METHODS = {
    "trace": "traced, nothing was run",
    "step": "counted on one real step",
    "estimate": "estimated from the modules' shapes",
}
_ROWS = 14


def flops(
    model: Annotated[
        str, typer.Option(help="tiny, small, medium, 1b; a Hugging Face config.json; or module:function.")
    ],
    batch_size: Annotated[int, typer.Option(help="Samples per step.")] = 1,
    seq_len: Annotated[int, typer.Option(help="Positions of each sample.")] = 1024,
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="With gradient checkpointing.")] = False,
    attention: Annotated[
        str, typer.Option(help="full counts every pair of positions, causal those not masked.")
    ] = "full",
    method: Annotated[str, typer.Option(help="auto, trace, step or estimate.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help='A product for the MFU of a step, such as "NVIDIA H100 80GB HBM3".')
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Compute type on that product. Default: bf16.")] = None,
    step_time: Annotated[float | None, typer.Option(help="Seconds of such a step, for its MFU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """The FLOPs of one training step: forward, backward, recomputation, by module."""
    from flopwatch.flops.count import count_flops
    from flopwatch.models.load import dummy_batch

    peak = _peak(device, dtype, step_time)
    _quiet_transformers()
    built = _built(model, checkpoint=checkpoint, with_weights=method == "step")
    count = count_flops(built, dummy_batch(built, batch_size, seq_len), method=method, attention=attention)  # type: ignore[arg-type]
    facts = _facts(model, built, count, batch_size, seq_len)
    if peak is not None and step_time is not None:
        facts["step"] = _step(count, peak, step_time)
    if as_json:
        import json

        typer.echo(json.dumps(facts, indent=2))
    else:
        print_flops(facts, count, peak)


def _quiet_transformers() -> None:
    """Hide advice on training options, which does not apply here. transformers reads this when it is imported."""
    import os

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _built(model: str, *, checkpoint: bool, with_weights: bool) -> "nn.Module":
    from flopwatch.errors import InputError
    from flopwatch.models.load import load_model

    built = load_model(model, device="cpu" if with_weights else "meta")
    if checkpoint:
        enable = getattr(built, "gradient_checkpointing_enable", None)
        if enable is None:
            raise InputError(f"{type(built).__name__} has no gradient_checkpointing_enable; leave out --checkpoint")
        enable()
    return built


def _peak(device: str | None, dtype: str | None, step_time: float | None) -> "Peak | None":
    from flopwatch.errors import InputError
    from flopwatch.hardware import explain_unknown, peak_flops

    if (device is None) != (step_time is None):
        raise InputError("the MFU of a step needs both --device and --step-time")
    if device is None:
        return None
    peak = peak_flops(dtype=dtype, name=device)
    if peak is None:
        raise InputError(explain_unknown(dtype=dtype, name=device))
    return peak


def _facts(spec: str, model: "nn.Module", count: "FlopCount", batch_size: int, seq_len: int) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "model": spec,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "batch_size": batch_size,
        "seq_len": seq_len,
        "flops": count.to_json(),
    }


def _step(count: "FlopCount", peak: "Peak", seconds: float) -> dict[str, Any]:
    from flopwatch.compat import calculate_mfu

    return {
        "seconds": seconds,
        "mfu": calculate_mfu(count.model_flops, seconds, peak.flops_per_s),
        "hfu": calculate_mfu(count.hardware_flops, seconds, peak.flops_per_s),
        "peak": peak.to_json(),
    }


def print_flops(facts: Mapping[str, Any], count: "FlopCount", peak: "Peak | None") -> None:
    """Print the totals, the modules and, with a step time, MFU and HFU."""
    from rich.console import Console

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


def _totals(count: "FlopCount", tokens: int) -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("model FLOPs", flop_text(count.model_flops), f"{_how_sure(count)} {count.model_flops:,}")
    table.add_row("hardware FLOPs", flop_text(count.hardware_flops), _share(count.hardware_flops, count.model_flops))
    table.add_row(
        "per token",
        flop_text(count.model_flops / tokens),
        f"attention counted {count.attention}, {_METHODS[count.method]}",
    )
    return table


def _how_sure(count: "FlopCount") -> str:
    if count.method == "estimate":
        return "about"
    return "at least" if count.is_lower_bound else "exactly"


def _modules(count: "FlopCount") -> "Table":
    """One row per kind of module: layers that differ only in their number are added up."""
    from rich.table import Table
    from rich.text import Text

    from flopwatch.records.flops import PhaseFlops

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
    factor, prefix = flop_prefix(ranked[0][1].total)
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
        table.add_row(kind, times, *parts, percent(share), Text("█" * round(share * 24), style="cyan"))
    return table


def _kind(path: str) -> str:
    """The path without the number of its layer and expert: `model.layers.3.mlp.0` becomes `model.layers.*.mlp.0`."""
    without_layer = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path, count=1)
    return re.sub(r"\bexperts\.\d+", "experts.*", without_layer) or "(the model itself)"


def _print_step(console: "Console", step: Mapping[str, Any], peak: "Peak") -> None:
    console.print(
        f"\nA step of {step['seconds']:g} s on one {peak.device}, "
        f"{flop_rate(peak.flops_per_s)} in {peak.dtype} by its {peak.kind}:\n"
        f"[bold green]MFU {percent(step['mfu'])}[/]  HFU {percent(step['hfu'])}"
    )
    if step["hfu"] > 1:
        console.print(f"[yellow]More than the peak: no {peak.device} can be this fast; check the step time.[/]")


def _print_doubts(console: "Console", count: "FlopCount") -> None:
    for note in count.notes:
        console.print(f"[yellow]Note: {note}[/]")
    for op in count.uncounted:
        console.print(f"[yellow]Not counted: {op.op} in {op.module or 'the model'}, {op.calls} calls, {op.shapes}[/]")
    if count.is_lower_bound:
        console.print("[yellow]The true number is higher; add a formula with flopwatch.register_formula.[/]")


def _share(flops: int, whole: int) -> str:
    return f"{flops / whole:.3f} x model FLOPs: recomputation" if flops != whole else "the same: nothing is recomputed"


def peak(
    name: Annotated[
        str | None, typer.Option(help='A product to look up without having it, such as "NVIDIA H100 80GB HBM3".')
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="A device here, such as cuda:1 or cpu. Default: the accelerator, else the CPU.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Compute type, such as bf16. Default: all the table has.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run matmuls on the device and keep the best.")] = False,
    seconds: Annotated[float, typer.Option(help="How long to measure.")] = 3.0,
    measure_again: Annotated[
        bool, typer.Option("--measure-again", help="Measure, even if it was measured before.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """The peak FLOP/s of a device: from the datasheet, or measured with --measure."""
    from flopwatch.hardware import explain_unknown, product_notes

    peaks = [_measure(name, device, dtype, seconds, measure_again)] if measure else _look_up(name, device, dtype)
    if as_json:
        _print_json(peaks)
    elif peaks:
        print_peaks(peaks, product_notes(device, name=name))
    if not peaks:
        from flopwatch.cli import print_error

        print_error(explain_unknown(device, dtype, name=name))
        raise typer.Exit(1)


def _look_up(name: str | None, device: str | None, dtype: str | None) -> "list[Peak]":
    from flopwatch.hardware import list_peaks, peak_flops

    if dtype is None:
        return list_peaks(device, name=name)
    found = peak_flops(device, dtype, name=name)
    return [] if found is None else [found]


def _measure(name: str | None, device: str | None, dtype: str | None, seconds: float, refresh: bool) -> "Peak":
    from flopwatch.errors import InputError

    if name is not None:
        raise InputError(
            f"--measure needs the device itself, not a name ({name!r}); use --device, or leave out --measure"
        )
    from flopwatch.hardware import measure_peak

    return measure_peak(device, dtype, seconds=seconds, refresh=refresh)


def _print_json(peaks: "list[Peak]") -> None:
    import json

    typer.echo(json.dumps({"peaks": [peak.to_json() for peak in peaks]}, indent=2))


_WIDEST = 100
_LABEL_WIDTH = 12
_SMALLEST_IN_TFLOPS = 1e13


def print_peaks(peaks: "list[Peak]", notes: str = "") -> None:
    """Print the peaks of one device and their sources. Without rich: its import takes as long as the whole command."""
    typer.secho(f"\n{peaks[0].device}\n", bold=True)
    _print_figures(peaks)
    typer.echo()
    for label, text in _explanations(peaks, notes):
        _print_labelled(label, text)
    typer.echo()


def _print_figures(peaks: "list[Peak]") -> None:
    in_tflops = max(peak.flops_per_s for peak in peaks) >= _SMALLEST_IN_TFLOPS
    unit, heading = (1e12, "dense TFLOP/s") if in_tflops else (1e9, "dense GFLOP/s")
    width = max(len("dtype"), *(len(peak.dtype) for peak in peaks))
    typer.secho(f"  {'dtype':<{width}}  {heading}", dim=True)
    for peak in peaks:
        typer.echo(f"  {peak.dtype:<{width}}  {_rounded(peak.flops_per_s / unit):>{len(heading)}}")


def _rounded(figure: float) -> str:
    return f"{figure:,.1f}" if figure >= 10 else f"{figure:.3f}"


def _explanations(peaks: "list[Peak]", notes: str) -> list[tuple[str, str]]:
    first = peaks[0]
    explained: list[tuple[str, str]] = [("kind", first.kind), ("confidence", first.confidence)]
    if first.fraction < 1:
        explained.append(("visible", f"{percent(first.fraction)} of the device; the figures are scaled to that"))
    dtypes_by_source: dict[str, list[str]] = {}
    for peak in peaks:
        dtypes_by_source.setdefault(peak.source, []).append(peak.dtype)
    for source, dtypes in dtypes_by_source.items():
        is_shared = len(dtypes_by_source) == 1
        explained.append(("source", source if is_shared else f"{', '.join(dtypes)}: {source}"))
    return [*explained, ("note", notes)] if notes else explained


def _print_labelled(label: str, text: str) -> None:
    indent = 2 + _LABEL_WIDTH
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    lines = textwrap.wrap(text, max(width - indent, 20), break_on_hyphens=False)
    typer.secho(f"  {label:<{_LABEL_WIDTH}}", dim=True, nl=False)
    typer.echo(("\n" + " " * indent).join(lines))
