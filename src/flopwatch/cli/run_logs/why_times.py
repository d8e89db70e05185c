"""`flopwatch why` for a run whose MFU is unknown: where its time went, and what is missing for the MFU."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from flopwatch.cli import print_json, text_width
from flopwatch.errors import InputError
from flopwatch.numbers import duration, percent
from flopwatch.text import one_line, plural

if TYPE_CHECKING:
    from flopwatch.records.trace_split import TraceSplit
    from flopwatch.runs.reading import RunLog
    from flopwatch.runs.waterfall.times import Times


def show_times(log: "RunLog", traces: "Sequence[TraceSplit]", problems: Sequence[str], *, as_json: bool) -> None:
    """Print the uses of the wall time, or JSON with the keys that a run with an MFU has.

    Raises:
        InputError: The log does not have the wall time.
    """
    from flopwatch.runs.waterfall.conclusion import conclusion_of, what_is_missing
    from flopwatch.runs.waterfall.losses import exactness_of
    from flopwatch.runs.waterfall.times import times_of

    times = times_of(log, traces)
    if times is None:
        raise InputError(what_is_missing(log))
    sentence = conclusion_of(log, None).sentence
    notes = [*times.notes, *problems]
    if as_json:
        print_json(
            {
                "log": str(log.path),
                "exact": exactness_of(log)[0],
                "verdict": None,
                "no_verdict": sentence,
                "largest": [use.key for use in times.largest()],
                "mfu_percent": None,
                "step_mfu_percent": None,
                "losses": [],
                **times.to_json(),
                "traces": [trace.to_json() for trace in traces],
                "notes": notes,
            }
        )
    else:
        _print(log, times, sentence, notes)


def _print(log: "RunLog", times: "Times", sentence: str, notes: Sequence[str]) -> None:
    ended = "" if log.summary is not None else ", the run has not ended"
    click.secho(f"\nWhere the time of {one_line(str(log.path.parent))} went", bold=True)
    rates = f": {times.rates()}" if times.rates() else ""
    done = "the first step has begun after" if not log.rows else f"{plural(times.steps or 0, 'step')} in"
    _print_paragraph(f"{done} {duration(times.wall_seconds)}{_on_what(log)}{ended}{rates}", dim=True)
    _print_table(times)
    for number, use in enumerate(times.largest(), 1):
        click.secho(f"{number}. {use.name}: {percent(use.share)} of the wall time", bold=True)
        _print_paragraph(use.evidence)
        _print_paragraph(f"Next: {use.advice}" if use.advice else "")
        click.echo()
    _print_paragraph(sentence)
    click.echo()
    for note in notes:
        _print_paragraph(f"Note: {note}", dim=True)
    if notes:
        click.echo()


def _on_what(log: "RunLog") -> str:
    environment = log.starts[-1].environment if log.starts else {}
    device = environment.get("device_name") or environment.get("device")
    dtypes = log.provenances[-1].dtypes if log.provenances else ()
    return " on " + one_line(f"{device}{', ' if dtypes else ''}{', '.join(dtypes)}") if device else ""


def _print_table(times: "Times") -> None:
    heads = ("", "time", "of wall time", "per step")
    rows = times.rows()
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    click.echo()
    for row in (heads, *rows):
        cells = "".join(f"   {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        click.secho(f"  {row[0]:<{widths[0]}}{cells}".rstrip(), dim=row is heads)
    click.echo()


def _print_paragraph(text: str, *, dim: bool = False) -> None:
    from flopwatch.text import plain

    lines = textwrap.wrap(plain(text), text_width(), break_on_hyphens=False, break_long_words=False)
    click.secho("\n".join(lines), dim=dim)
