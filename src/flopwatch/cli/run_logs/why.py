"""`flopwatch why`: shows where the rest of the peak went, from 100 % down to the MFU of a run."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from flopwatch.cli import flag, print_json, text_width
from flopwatch.cli.run_logs.peak_option import PEAK_TFLOPS, peak_to_use
from flopwatch.cli.run_logs.run_argument import RunDir, chosen_run
from flopwatch.errors import InputError
from flopwatch.numbers import duration, flop_rate, percent
from flopwatch.text import plural

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from flopwatch.records.trace_split import TraceSplit
    from flopwatch.runs.reading import RunLog
    from flopwatch.runs.waterfall.conclusion import Conclusion
    from flopwatch.runs.waterfall.losses import Loss, Waterfall
    from flopwatch.runs.waterfall.verdicts import RunFacts


def why(
    run_dir: RunDir = None,
    as_json: Annotated[bool, flag("Print JSON instead of text.", "--json")] = False,
    trace: Annotated[
        list[str] | None,
        flag("A trace of this run; may be given for several ranks. Default: the newest in RUN_DIR.", metavar="FILE"),
    ] = None,
    peak_tflops: Annotated[float | None, PEAK_TFLOPS] = None,
) -> None:
    """Show where the rest of the peak went: every loss between 100 % and the MFU of a run, and what to try next.

    Where MFU is unknown, show where the time went.
    """
    from flopwatch.runs import find_log, read_around
    from flopwatch.runs.given_peak import with_peak
    from flopwatch.runs.waterfall.conclusion import conclusion_of
    from flopwatch.runs.waterfall.losses import waterfall_of
    from flopwatch.runs.waterfall.verdicts import facts_of

    run = chosen_run(run_dir)
    log = with_peak(read_around(find_log(run)), peak_to_use(peak_tflops))
    traces, problems = traces_of_run(run, trace or ())
    waterfall = waterfall_of(log, traces)
    if waterfall is None:
        from flopwatch.cli.run_logs.why_times import show_times

        show_times(log, traces, problems, as_json=as_json)
        return
    facts = facts_of(log)
    conclusion = conclusion_of(log, waterfall)
    if as_json:
        print_json(_as_json(log, waterfall, facts, conclusion, problems))
    else:
        _print(log, waterfall, facts, conclusion, problems)


def traces_of_run(run_dir: str, files: Sequence[str] = ()) -> "tuple[tuple[TraceSplit, ...], list[str]]":
    """The traces in the files, or else the newest of the run, and what is wrong with those of the run.

    Raises:
        InputError: One of the files is not a trace that can be read.
    """
    from flopwatch.runs.traces.splits import newest_traces, read_trace

    if files:
        return tuple(read_trace(file) for file in files), []
    try:
        return newest_traces(run_dir), []
    except InputError as error:  # the waterfall is worth showing without the trace
        return (), [f"The trace of this run is not used: {error}."]


def _as_json(
    log: "RunLog", waterfall: "Waterfall", facts: "RunFacts", conclusion: "Conclusion", problems: list[str]
) -> dict[str, Any]:
    verdict = conclusion.verdict
    content = waterfall.to_json()
    return {
        "log": str(log.path),
        "steps": facts.steps,
        "exact": facts.exact,
        "verdict": None if verdict is None else verdict.to_json(),
        "no_verdict": conclusion.sentence if verdict is None else None,
        "largest": [loss.key for loss in waterfall.largest()],
        **content,
        "notes": [*content["notes"], *problems],
    }


def _print(
    log: "RunLog", waterfall: "Waterfall", facts: "RunFacts", conclusion: "Conclusion", problems: list[str]
) -> None:
    from rich.console import Console

    from flopwatch.cli.run_logs.watch_panels import line
    from flopwatch.cli.run_logs.waterfall_bars import floating_bars

    console = Console(highlight=False)
    rows = [line(), *_header(log, waterfall, facts), line()]
    rows += floating_bars(waterfall, console.width, ascii_only=console.options.ascii_only)
    rows += [line(), *_verdict_lines(conclusion), line()]
    for number, loss in enumerate(conclusion.losses, 1):
        rows += [*_loss_lines(number, loss), line()]
    notes = [*conclusion.notes, *problems]
    rows += [row for note in notes for row in _paragraph(f"Note: {note}", style="dim", indent="      ")]
    _print_lines(console, [*rows, *([line()] if notes else [])])


def _print_lines(console: "Console", rows: "Sequence[Text]") -> None:
    for row in rows:
        # A line is never cut: a path that is longer than the terminal is wide must stay complete.
        console.print(row, soft_wrap=True)


def _header(log: "RunLog", waterfall: "Waterfall", facts: "RunFacts") -> "Iterator[Text]":
    from flopwatch.text import one_line

    mfu = percent(waterfall.mfu_percent / 100)
    yield from _paragraph(f"Why the MFU of {one_line(str(log.path.parent))} is {mfu}", style="bold")
    ended = "" if log.summary is not None else ", the run has not ended"
    yield from _paragraph(
        f"{plural(facts.steps, 'step')} in {duration(waterfall.wall_seconds)}{_on_what(log)}{ended}", style="dim"
    )
    yield from _paragraph(_difference(log, waterfall))


def _on_what(log: "RunLog") -> str:
    from flopwatch.text import one_line

    provenance = log.provenances[-1] if log.provenances else None
    if provenance is None or provenance.peak is None:
        return ""
    peak = provenance.peak
    world_size = log.starts[-1].world_size if log.starts else 1
    ranks = f"{world_size} ranks, " if world_size > 1 else ""
    rate = f"{peak.get('dtype')} peak {flop_rate(peak.get('flops_per_s'))} ({peak.get('kind')})"
    return " on " + one_line(f"{ranks}{peak.get('device')}, {rate}")


_LEAST_PERCENT_OUTSIDE = 3.0
"""If less of the wall time is outside of training steps, their MFU is about that of the run."""


def _difference(log: "RunLog", waterfall: "Waterfall") -> str:
    """Why the MFU of the run and that of its steps differ."""
    from flopwatch.records.time_uses import IN_STEPS

    outside = [loss for loss in waterfall.losses if loss.key not in IN_STEPS]
    lost = sum(loss.points for loss in outside)
    if waterfall.step_mfu_percent is None or lost < _LEAST_PERCENT_OUTSIDE:
        return "Nearly all of its time is in training steps, so they reach about the same MFU."
    most = max(outside, key=lambda loss: loss.points)
    return (
        f"Its training steps reach {percent(waterfall.step_mfu_percent / 100)} without stalls and warm-up"
        f"{_logged_mfu(log, waterfall.step_mfu_percent)}. The run as a whole is lower, because "
        f"{percent(lost / 100)} of its time is spent otherwise, most of it on {most.name}."
    )


def _logged_mfu(log: "RunLog", step_mfu_percent: float) -> str:
    """The MFU that the log ends with, if it looks different: it has stalls, but not the steps that were counted."""
    summary = log.summary
    logged = None if summary is None or len(log.starts) > 1 else summary.values.get("perf/mfu_percent")
    if logged is None or percent(logged / 100) == percent(step_mfu_percent / 100):
        return ""
    return f" ({percent(logged / 100)} in the log, which counts stalls, but leaves out the steps that flopwatch slowed)"


def _verdict_lines(conclusion: "Conclusion") -> "Iterator[Text]":
    yield from _paragraph(conclusion.sentence, style="italic" if conclusion.verdict is None else "bold")
    if conclusion.reservation:
        yield from _paragraph(conclusion.reservation)


def _loss_lines(number: int, loss: "Loss") -> "Iterator[Text]":
    yield from _paragraph(f"{number}. {loss.name}: {loss.points:.1f} points", style="bold", indent="   ")
    yield from _paragraph(f"   {loss.evidence}", indent="   ")
    if loss.advice:
        yield from _paragraph(f"   Next: {loss.advice}", indent="   ")


def _paragraph(text: str, *, style: str = "", indent: str = "") -> "Iterator[Text]":
    from flopwatch.cli.run_logs.watch_panels import line
    from flopwatch.text import plain

    wrapped = textwrap.wrap(
        plain(text), text_width(), subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return (line((piece, style)) for piece in wrapped)
