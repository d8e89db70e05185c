"""`flopwatch peak` prints the peak FLOP/s of a device."""

import shutil
from typing import Annotated

import click

from flopwatch.cli import RUNS_FOLDER, flag, print_error, print_json, say
from flopwatch.errors import FlopwatchError, InputError
from flopwatch.hardware import explain_unknown, list_peaks, peak_flops, product_notes
from flopwatch.hardware.peaks import MEASURABLE
from flopwatch.numbers import percent
from flopwatch.records.flops import Peak
from flopwatch.runs.log_file import find_log, runs_below
from flopwatch.runs.reading import read_around
from flopwatch.text import cells, padded, wrapped


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
    if measure:
        peaks = _measure(name, device, dtype, seconds, measure_again)
    elif dtype is None:
        peaks = list_peaks(device, name=name)
    else:
        peaks = list(filter(None, [peak_flops(device, dtype, name=name)]))
    if as_json:
        print_json({"peaks": [peak.to_json() for peak in peaks]})
    elif peaks:
        print_peaks(peaks, product_notes(device, name=name))
    if not peaks:
        print_error(explain_unknown(device, dtype, name=name))
        raise SystemExit(1)


def _measure(name: str | None, device: str | None, dtype: str | None, seconds: float, refresh: bool) -> list[Peak]:
    if name is not None:
        raise InputError(
            f"--measure needs a device of this machine, not --name {name!r}; use --device, or leave out --measure"
        )
    from flopwatch.hardware import measure_peak  # loads torch

    wanted = [dtype] if dtype is not None else _types_to_measure()
    return [measure_peak(device, each, seconds=seconds, refresh=refresh) for each in wanted]


def _types_to_measure() -> list[str | None]:
    """The types of the newest run that can be measured; None is the type in which a matmul would run now."""
    for run in reversed(runs_below(RUNS_FOLDER)):
        try:
            log = read_around(find_log(run))
        except (FlopwatchError, OSError):
            continue
        dtypes = tuple(dict.fromkeys(name for record in reversed(log.provenances) for name in record.dtypes))
        if dtypes:
            left_out = [dtype for dtype in dtypes if dtype not in MEASURABLE]
            not_measured = f"; {', '.join(left_out)} cannot be measured" if left_out else ""
            say(f"For the compute types of {run}: {', '.join(dtypes)}{not_measured}", dim=True, err=True)
            return [dtype for dtype in dtypes if dtype in MEASURABLE] or [None]
    return [None]


_INDENT, _WIDEST_TEXT = 14, 100
_SMALLEST_IN_TFLOPS = 1e13


def print_peaks(peaks: list[Peak], notes: str = "") -> None:
    """Print the peaks of one device and their sources. Rich is not used, because its import is slow."""
    click.secho(f"\n{peaks[0].device}\n", bold=True)
    in_tflops = max(peak.flops_per_s for peak in peaks) >= _SMALLEST_IN_TFLOPS
    unit, heading = (1e12, "dense TFLOP/s") if in_tflops else (1e9, "dense GFLOP/s")
    width = max(len("dtype"), *(len(peak.dtype) for peak in peaks))
    click.secho(f"  {'dtype':<{width}}  {heading}", dim=True)
    for peak in peaks:
        rate = peak.flops_per_s / unit
        click.echo(f"  {peak.dtype:<{width}}  {rate:>{cells(heading)},.{1 if rate >= 10 else 3}f}")
    click.echo()
    room = max(min(shutil.get_terminal_size().columns, _WIDEST_TEXT) - _INDENT, 20)
    for label, text in _explanations(peaks, notes):
        click.secho("  " + padded(label, _INDENT - 2), dim=True, nl=False)
        click.echo(f"\n{'':{_INDENT}}".join(wrapped(text, room)))
    click.echo()


def _explanations(peaks: list[Peak], notes: str) -> list[tuple[str, str]]:
    first = peaks[0]
    explained: list[tuple[str, str]] = [("kind", first.kind), ("confidence", first.confidence)]
    if first.fraction < 1:
        explained.append(("visible", f"{percent(first.fraction)} of the device; the peaks are scaled to that share"))
    dtypes_by_source: dict[str, list[str]] = {}
    for peak in peaks:
        dtypes_by_source.setdefault(peak.source, []).append(peak.dtype)
    for source, dtypes in dtypes_by_source.items():
        explained.append(("source", source if len(dtypes_by_source) == 1 else f"{', '.join(dtypes)}: {source}"))
    return [*explained, ("note", notes)] if notes else explained
