"""Peaks as a table for people. Not with rich: loading its console takes as long as all the rest of the command."""

import shutil
import textwrap

import typer

from flopwatch.records import Peak

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
        explained.append(("visible", f"{first.fraction:.1%} of the device; the figures are scaled to that"))
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
