"""A comparison as text. Not with rich: it would take longer to load than all the rest of the command."""

import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import typer

from flopwatch.cli.quantities import count_text, duration, flop_rate, percent, short_number, step_seconds
from flopwatch.run_comparison import Comparison, Difference, Line, RunSteps

_UNKNOWN = "-"
_WIDEST = 100
_WIDTH_FOR_INTERVALS = 98
_GOOD = ("faster", "steadier")
_BAD = ("slower", "less steady")
_NOT_TOLD = {"no difference that can be told": "no clear difference", "too few steps to tell": "too few steps"}
_LABEL_WIDTH = 20
_VALUE_WIDTH = 12
_FACT_WIDTH = 30
_FORMATS: dict[str, Callable[[float], str]] = {
    "s": step_seconds,
    "%": percent,
    "% of peak": lambda value: f"{value:.2f} %",
    "x": lambda value: f"{value:.3f}",
    "per step": lambda value: short_number(value) if value >= 1000 else f"{value:g}",
    "steps": lambda value: f"{value:,.0f}",
    "tokens": count_text,
    "FLOP": lambda value: flop_rate(value).removesuffix("/s"),
    "duration": duration,
}


def print_comparison(comparison: Comparison) -> None:
    """Print what differs, the table, and how far it can be trusted."""
    typer.echo()
    for name, run in (("A", comparison.a), ("B", comparison.b)):
        typer.secho(f"{name}  {run.log}", bold=True)
        typer.secho(f"   {_which_steps(run)}", dim=True)
    _print_differences(comparison.differences)
    _print_table(comparison.lines)
    _print_remarks(comparison)
    typer.echo()


def _which_steps(run: RunSteps) -> str:
    left_out = f", {run.left_out:,} left out (warm-up, or no time)" if run.left_out else ""
    return f"{run.compared:,} steps compared{left_out}{'' if run.has_ended else ', the run has not ended'}"


def _print_differences(differences: Sequence[Difference]) -> None:
    typer.echo()
    if not differences:
        typer.echo(_wrapped("Nothing differs in device, peak, dtype, attention, mode, method, world size or versions."))
        return
    typer.secho("Not the same in both, so compare with care:", fg="yellow")
    rows = [(entry.what, _fact(entry.a), _fact(entry.b), entry.touches) for entry in differences]
    what_width, a_width, b_width = (max(len(row[column]) for row in rows) for column in range(3))
    for what, a, b, touches in rows:
        typer.echo(f"  {what:<{what_width}}  {a:<{a_width}}  {b:<{b_width}}  ", nl=False)
        typer.secho(f"touches {touches}", dim=True)


def _fact(value: Any) -> str:
    if value is None:
        return _UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:,.6g}" if isinstance(value, float) else str(value)
    return textwrap.shorten(text, _FACT_WIDTH, placeholder=" ...") if len(text) > _FACT_WIDTH else text


def _print_table(lines: Sequence[Line]) -> None:
    has_intervals = shutil.get_terminal_size().columns >= _WIDTH_FOR_INTERVALS
    heading = f"  {'':<{_LABEL_WIDTH}}{'A':>{_VALUE_WIDTH}}{'B':>{_VALUE_WIDTH}}{'change':>10}"
    typer.secho(f"\n{heading}{'99 % of draws':>20}" if has_intervals else f"\n{heading}", dim=True)
    for line in lines:
        values = f"{_value(line.a, line.unit):>{_VALUE_WIDTH}}{_value(line.b, line.unit):>{_VALUE_WIDTH}}"
        interval = f"{_interval(line):>18}" if has_intervals else ""
        text = f"  {line.label:<{_LABEL_WIDTH}}{values}{_change(line):>12}{interval}"
        typer.echo(text if line.verdict else text.rstrip(), nl=not line.verdict)
        if line.verdict:
            _print_verdict(line.verdict)


def _print_verdict(verdict: str) -> None:
    colour = "green" if verdict in _GOOD else "red" if verdict in _BAD else None
    typer.secho(f"  {_NOT_TOLD.get(verdict, verdict)}", fg=colour, dim=verdict in _NOT_TOLD)


def _value(value: float | None, unit: str) -> str:
    return _UNKNOWN if value is None else _FORMATS.get(unit, short_number)(value)


def _change(line: Line) -> str:
    if line.change is None:
        return f"{_UNKNOWN}   "
    return f"{_signed(line.change)} {'pt' if line.unit == '%' else '% '}"


def _interval(line: Line) -> str:
    return "" if line.low is None or line.high is None else f"{_signed(line.low)} to {_signed(line.high)}"


def _signed(change: float) -> str:
    """Without the sign of a rounded zero.

    >>> _signed(-4.56), _signed(0.01)
    ('-4.6', '0.0')
    """
    text = f"{change:+.1f}"
    return "0.0" if float(text) == 0 else text


def _print_remarks(comparison: Comparison) -> None:
    remarks = [
        "Verdicts come from the spread within each run, block by block of consecutive steps; about one in twenty is "
        "chance. What drifts over a whole run or changes from run to run, such as another node, clocks or neighbours, "
        "is not in it: repeat both runs before you believe a small difference."
    ]
    per_step = comparison.line("tokens_per_step")
    if per_step.change is not None and abs(per_step.change) > 1:
        remarks.insert(0, "The runs' steps differ in size: compare rates and MFU, not step times.")
    if max(comparison.a.world_size, comparison.b.world_size) > 1:
        remarks.insert(0, "Of several ranks, rates and shares are those of the logging rank's own steps.")
    typer.echo()
    for remark in remarks:
        typer.secho(_wrapped(remark), dim=True)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, min(shutil.get_terminal_size().columns, _WIDEST))
