"""`flopwatch peak`: what a device or a product can do at best."""

import shutil
import textwrap
from typing import Annotated

import typer

from flopwatch.number_format import percent
from flopwatch.records.flops import Peak


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
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if it was measured before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """The peak FLOP/s of a device: from the datasheet, or measured with --measure."""
    from flopwatch.hardware import explain_unknown, product_notes

    peaks = [_measure(name, device, dtype, seconds, refresh)] if measure else _look_up(name, device, dtype)
    if as_json:
        _print_json(peaks)
    elif peaks:
        print_peaks(peaks, product_notes(device, name=name))
    if not peaks:
        from flopwatch.cli.output import print_error

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


# Peaks as a table for people. Not with rich: loading its console takes as long as all the rest of the command.


_WIDEST = 100
_LABEL_WIDTH = 12
_SMALLEST_IN_TFLOPS = 1e13


def print_peaks(peaks: list[Peak], notes: str = "") -> None:
    """Print the peaks of one device: a row for each figure, then where the figures come from."""
    typer.secho(f"\n{peaks[0].device}\n", bold=True)
    _print_figures(peaks)
    typer.echo()
    for label, text in _explanations(peaks, notes):
        _print_labelled(label, text)
    typer.echo()


def _print_figures(peaks: list[Peak]) -> None:
    in_tflops = max(peak.flops_per_s for peak in peaks) >= _SMALLEST_IN_TFLOPS
    unit, heading = (1e12, "dense TFLOP/s") if in_tflops else (1e9, "dense GFLOP/s")
    width = max(len("dtype"), *(len(peak.dtype) for peak in peaks))
    typer.secho(f"  {'dtype':<{width}}  {heading}", dim=True)
    for peak in peaks:
        typer.echo(f"  {peak.dtype:<{width}}  {_rounded(peak.flops_per_s / unit):>{len(heading)}}")


def _rounded(figure: float) -> str:
    return f"{figure:,.1f}" if figure >= 10 else f"{figure:.3f}"


def _explanations(peaks: list[Peak], notes: str) -> list[tuple[str, str]]:
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
