"""`flopwatch flops` counts the FLOPs of a training step; `flopwatch peak` prints the peak FLOP/s of a device."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopwatch.cli import flag, print_error, print_json, print_section
from flopwatch.cli.trials.trial import MODEL_HELP
from flopwatch.errors import InputError
from flopwatch.numbers import flop_prefix, flop_rate, percent
from flopwatch.numbers import flops as flop_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import nn

    from flopwatch.records.flops import FlopCount, Peak


_METHODS = {
    "trace": "counted by a trace that runs nothing",
    "step": "counted while a real step ran",
    "estimate": "estimated from the shapes of the modules",
}
_ROWS = 14


def flops(
    model: Annotated[str, flag(MODEL_HELP)],
    batch_size: Annotated[int, flag("Samples per step.")] = 1,
    seq_len: Annotated[int, flag("Sequence length: tokens of each sample.")] = 1024,
    checkpoint: Annotated[bool, flag("Use gradient checkpointing.", "--checkpoint")] = False,
    attention: Annotated[str, flag("full counts all token pairs in attention, causal only unmasked ones.")] = "full",
    method: Annotated[str, flag("How to count FLOPs: auto, trace, step or estimate.")] = "auto",
    device: Annotated[str | None, flag('Device for the MFU, such as "NVIDIA H100 80GB HBM3"; see --step-time.')] = None,
    dtype: Annotated[str | None, flag("Compute type for the peak of --device. Default: bf16.")] = None,
    step_time: Annotated[float | None, flag("Seconds per step, to print MFU and HFU; needs --device.")] = None,
    as_json: Annotated[bool, flag("Print JSON instead of tables.", "--json")] = False,
) -> None:
    """Count the FLOPs of one training step, by module: forward, backward and recomputation."""
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
        print_json(facts)
    else:
        print_flops(facts, count, peak)


def _quiet_transformers() -> None:
    """Hide advice of transformers about training options; call this before transformers is imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _built(model: str, *, checkpoint: bool, with_weights: bool) -> "nn.Module":
    from flopwatch.models.load import load_model

    built = load_model(model, device="cpu" if with_weights else "meta")
    if checkpoint:
        enable = getattr(built, "gradient_checkpointing_enable", None)
        if enable is None:
            raise InputError(
                f"{type(built).__name__} has no method gradient_checkpointing_enable; leave out --checkpoint"
            )
        enable()
    return built


def _peak(device: str | None, dtype: str | None, step_time: float | None) -> "Peak | None":
    from flopwatch.hardware import explain_unknown, peak_flops

    if (device is None) != (step_time is None):
        raise InputError("to print the MFU of a step, pass both --device and --step-time")
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
    from flopwatch.mfu import calculate_mfu

    return {
        "seconds": seconds,
        "mfu": calculate_mfu(count.model_flops, seconds, peak.flops_per_s),
        "hfu": calculate_mfu(count.hardware_flops, seconds, peak.flops_per_s),
        "peak": peak.to_json(),
    }


def print_flops(facts: Mapping[str, Any], count: "FlopCount", peak: "Peak | None") -> None:
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
    _print_warnings(console, count)


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
        f"{_METHODS[count.method]}, attention {count.attention}",
    )
    return table


def _how_sure(count: "FlopCount") -> str:
    if count.method == "estimate":
        return "about"
    return "at least" if count.is_lower_bound else "exactly"


def _modules(count: "FlopCount") -> "Table":
    """A table with the FLOPs of each module. Layers whose names differ only in their number share a row."""
    from rich.table import Table
    from rich.text import Text

    from flopwatch.records.flops import PhaseFlops

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


def _print_step(console: "Console", step: Mapping[str, Any], peak: "Peak") -> None:
    console.print(
        f"\nA step of {step['seconds']:g} s on one {peak.device}, "
        f"peak {flop_rate(peak.flops_per_s)} in {peak.dtype} ({peak.kind}):\n"
        f"[bold green]MFU {percent(step['mfu'])}[/]  HFU {percent(step['hfu'])}"
    )
    if step["hfu"] > 1:
        console.print(f"[yellow]This is more than the peak of one {peak.device}; check the step time.[/]")


def _print_warnings(console: "Console", count: "FlopCount") -> None:
    for note in count.notes:
        console.print(f"[yellow]Note: {note}[/]")
    for op in count.uncounted:
        console.print(f"[yellow]Not counted: {op.calls} calls of {op.op} in {op.module or 'the model'}, {op.shapes}[/]")
    if count.is_lower_bound:
        console.print("[yellow]The true FLOPs are higher; add a formula for the op with flopwatch.register_formula.[/]")


def _share(flops: int, whole: int) -> str:
    return f"{flops / whole:.3f} x the model FLOPs, with recomputation" if flops != whole else "nothing is recomputed"


def peak(
    name: Annotated[str | None, flag('Look up a device by its name, such as "NVIDIA H100 80GB HBM3".')] = None,
    device: Annotated[str | None, flag("A device of this machine. Default: its accelerator; without one, cpu.")] = None,
    dtype: Annotated[
        str | None, flag("Compute type, such as bf16. Default: all with a known peak, or those of the newest run.")
    ] = None,
    measure: Annotated[
        bool, flag("Run matmuls on the device, print and keep the highest FLOP/s.", "--measure")
    ] = False,
    seconds: Annotated[float, flag("Seconds that --measure takes for a type.")] = 3.0,
    measure_again: Annotated[bool, flag("With --measure: ignore the stored result.", "--measure-again")] = False,
    as_json: Annotated[bool, flag("Print JSON instead of a table.", "--json")] = False,
) -> None:
    """Print the peak FLOP/s of a device from its datasheet, or measure it with --measure.

    A measured peak is used for MFU where no other is known. Without --dtype, --measure takes the compute types of the
    newest run in flopwatch-runs, or the type in which matmuls run by default.
    """
    from flopwatch.hardware import explain_unknown, product_notes

    peaks = _measure(name, device, dtype, seconds, measure_again) if measure else _look_up(name, device, dtype)
    if as_json:
        print_json({"peaks": [peak.to_json() for peak in peaks]})
    elif peaks:
        print_peaks(peaks, product_notes(device, name=name))
    if not peaks:
        print_error(explain_unknown(device, dtype, name=name))
        raise typer.Exit(1)


def _look_up(name: str | None, device: str | None, dtype: str | None) -> "list[Peak]":
    from flopwatch.hardware import list_peaks, peak_flops

    if dtype is None:
        return list_peaks(device, name=name)
    found = peak_flops(device, dtype, name=name)
    return [] if found is None else [found]


def _measure(name: str | None, device: str | None, dtype: str | None, seconds: float, refresh: bool) -> "list[Peak]":
    if name is not None:
        raise InputError(
            f"--measure needs a device of this machine, not --name {name!r}; use --device, or leave out --measure"
        )
    from flopwatch.hardware import measure_peak

    wanted = [dtype] if dtype is not None else _types_to_measure()
    return [measure_peak(device, each, seconds=seconds, refresh=refresh) for each in wanted]


def _types_to_measure() -> list[str | None]:
    """The types of the newest run that can be measured; None is the type in which a matmul would run now."""
    from flopwatch.cli.run_logs.run_argument import types_of_newest_run
    from flopwatch.hardware.measured import MEASURABLE

    dtypes, run = types_of_newest_run()
    if run is None:
        return [None]
    left_out = [dtype for dtype in dtypes if dtype not in MEASURABLE]
    not_measured = f"; {', '.join(left_out)} cannot be measured" if left_out else ""
    typer.secho(f"For the compute types of {run}: {', '.join(dtypes)}{not_measured}", dim=True, err=True)
    return [dtype for dtype in dtypes if dtype in MEASURABLE] or [None]


_LABEL_WIDTH = 12
_SMALLEST_IN_TFLOPS = 1e13


def print_peaks(peaks: "list[Peak]", notes: str = "") -> None:
    """Print the peaks of one device and their sources. Rich is not used, because its import is slow."""
    typer.secho(f"\n{peaks[0].device}\n", bold=True)
    _print_figures(peaks)
    typer.echo()
    for label, text in _explanations(peaks, notes):
        print_section(label, _LABEL_WIDTH, [text])
    typer.echo()


def _print_figures(peaks: "list[Peak]") -> None:
    in_tflops = max(peak.flops_per_s for peak in peaks) >= _SMALLEST_IN_TFLOPS
    unit, heading = (1e12, "dense TFLOP/s") if in_tflops else (1e9, "dense GFLOP/s")
    width = max(len("dtype"), *(len(peak.dtype) for peak in peaks))
    typer.secho(f"  {'dtype':<{width}}  {heading}", dim=True)
    for peak in peaks:
        rate = peak.flops_per_s / unit
        typer.echo(f"  {peak.dtype:<{width}}  {rate:>{len(heading)},.{1 if rate >= 10 else 3}f}")


def _explanations(peaks: "list[Peak]", notes: str) -> list[tuple[str, str]]:
    first = peaks[0]
    explained: list[tuple[str, str]] = [("kind", first.kind), ("confidence", first.confidence)]
    if first.fraction < 1:
        explained.append(("visible", f"{percent(first.fraction)} of the device; the peaks are scaled to that share"))
    dtypes_by_source: dict[str, list[str]] = {}
    for peak in peaks:
        dtypes_by_source.setdefault(peak.source, []).append(peak.dtype)
    for source, dtypes in dtypes_by_source.items():
        is_shared = len(dtypes_by_source) == 1
        explained.append(("source", source if is_shared else f"{', '.join(dtypes)}: {source}"))
    return [*explained, ("note", notes)] if notes else explained
