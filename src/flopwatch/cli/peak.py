"""`flopwatch peak`: what a device or a product can do at best."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flopwatch.records import Peak


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
        from flopwatch.cli.peak_table import print_peaks

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
