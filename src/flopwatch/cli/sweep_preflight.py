"""What the preflight found, in a few lines."""

from collections.abc import Mapping
from typing import Any

import typer

from flopwatch.cli.quantities import count_text, flop_rate, percent
from flopwatch.plain_text import one_line
from flopwatch.sweep.preflight import PreflightResult

_LONGEST = 1000


def print_preflight(found: Mapping[Any, PreflightResult]) -> None:
    """One line for each pair: can it run, and which way do its layers go."""
    for result in found.values():
        mark = "ok  " if result.supported and result.tried else "?   " if result.supported else "no  "
        typer.echo(f"preflight {mark}{one_line(f'{result.trainer} on {result.model}{_detail(result)}', _LONGEST)}")


def _detail(result: PreflightResult) -> str:
    if result.reason:
        return f": {result.reason}"
    parts = [f"{count_text(result.parameters)} parameters"] if result.parameters else []
    if result.model_flops is not None:
        parts.append(
            f"{flop_rate(result.model_flops).removesuffix('/s')} a step of {result.batch_size} x {result.seq_len}"
        )
    parts += [f"{percent(100 * share)} {way}" for way, share in result.shares.items()]
    return f" ({', '.join(parts)})" if parts else ""
