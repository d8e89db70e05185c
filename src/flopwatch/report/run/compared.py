"""The comparison of two runs as a document."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from flopwatch.language import Said, commas, sentences
from flopwatch.numbers import UNKNOWN, count, duration, energy, flops, number, percent, step_time
from flopwatch.present import document as doc
from flopwatch.runs.comparison import Comparison, RunSteps, has_other_work
from flopwatch.runs.per_step import LEAST_SHARE, PerStep
from flopwatch.runs.reading import earlier_run_note
from flopwatch.stats import NO_DIFFERENCE, TOO_FEW

_SHORT: dict[str, str] = {NO_DIFFERENCE: Said("no clear difference"), TOO_FEW: TOO_FEW}  # for a terminal of 80 columns
_TONES: dict[str, doc.Tone] = {
    **dict.fromkeys(("faster", "steadier"), "better"),
    **dict.fromkeys(("slower", "less steady"), "worse"),
    **dict.fromkeys(_SHORT, "soft"),
}
_LONGEST_FACT = 30
_ALL_ROWS = doc.Most(100, 100, 100)
_FORMATS: dict[str, Callable[[float], str]] = {
    "s": lambda value: step_time(value, digits=4),
    "%": lambda value: percent(value / 100),
    "% of peak": lambda value: percent(value / 100, decimals=2),
    "x": lambda value: f"{value:.3f}",
    "per step": lambda value: number(value) if value >= 1000 else f"{value:g}",
    "steps": lambda value: f"{value:,.0f}",
    "tokens": count,
    "FLOP": flops,
    "duration": duration,
    "J": energy,
}
_FOUR_DIGITS = partial(number, digits=4)
_DIFFERS = Said("The runs differ in these settings, so a difference in speed may have several causes:")
_DIFFERS_NOT = Said("Nothing differs in device, peak, dtype, attention, mode, method, world size or versions.")
_SAME_SIZE_PERCENT = 1.0
_RUNS = (doc.Head("A", is_number=True), doc.Head("B", is_number=True))
_LEAST_MS = 0.05
"""A part that is shorter in both runs would be printed as 0.0 ms."""


def runs_compared(comparison: Comparison) -> doc.Document:
    runs = [pair for name, run in (("A", comparison.a), ("B", comparison.b)) for pair in _run(name, run)]
    differing = [
        (one.what, _fact(one.a), _fact(one.b), Said("affects {what}", what=one.touches) if one.touches else "")
        for one in comparison.differences
    ]
    settings: list[doc.Part] = [doc.Text(_DIFFERS, "warn"), doc.Grid(("", "A", "B", ""), differing)]
    parts: list[doc.Part] = [doc.Text(comparison.headline, "strong")] if comparison.headline else []
    parts += [doc.Facts(runs), *_other_work(comparison)]
    parts.append(doc.Section("", settings if differing else [doc.Text(_DIFFERS_NOT)]))
    interval = doc.Head(Said("99 % interval"), is_number=True, is_extra=True)
    columns: list[doc.Head | str] = ["", *_RUNS, *doc.numbers("change"), interval, ""]
    rows: list[Sequence[doc.Cell | str]] = [
        (
            line.label,
            *(UNKNOWN if value is None else _FORMATS.get(line.unit, _FOUR_DIGITS)(value) for value in (line.a, line.b)),
            UNKNOWN if line.change is None else f"{_signed(line.change)} {'pt' if line.unit == '%' else '%'}",
            ""
            if line.low is None or line.high is None
            else Said("{low} to {high}", low=_signed(line.low), high=_signed(line.high)),
            doc.Cell(_SHORT.get(line.verdict or "", line.verdict or ""), _TONES.get(line.verdict or "", "")),
        )
        for line in comparison.lines
    ]
    parts.append(doc.Section("", [doc.Grid(columns, rows, most=_ALL_ROWS)]))
    if comparison.per_step is not None:
        parts += _per_step(comparison.per_step)
    parts += [doc.Text(remark, "soft") for remark in _remarks(comparison)]
    return doc.Document(Said("Two runs"), parts)


def _run(name: str, run: RunSteps) -> Iterator[tuple[str, str]]:
    steps = [
        Said("{steps:,} steps compared", steps=run.compared),
        Said("{steps:,} left out (warm-up, or no time)", steps=run.left_out) if run.left_out else "",
        "" if run.has_ended else Said("the run has not ended"),
    ]
    yield name, run.log
    yield "", commas(steps)
    if note := earlier_run_note(run.earlier_step):
        yield "", note


def _other_work(comparison: Comparison) -> Iterator[doc.Part]:
    """A warning before all figures if the steps of the two runs do not do the same work."""
    line, tokens = comparison.line("model_flops_per_step"), comparison.line("tokens_per_step")
    if line.a is None or line.b is None or line.change is None or not has_other_work(comparison):
        return
    has_same_tokens = tokens.change is not None and abs(tokens.change - line.change) <= _SAME_SIZE_PERCENT
    said = Said("These runs do not do the same work: a step has {a} in A and {b} in B ({change} %).")
    what = Said("Compare MFU; step times and rates are those of different work.")
    if has_same_tokens:
        what = Said("Compare MFU and rates, not step times.")
    work = said.filled(a=flops(line.a), b=flops(line.b), change=_signed(line.change))
    yield doc.Section("", [doc.Text(sentences([work, what]), "warn")])


def _fact(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return Said("yes") if value else Said("no")
    text = f"{value:,.6g}" if isinstance(value, float) else str(value)
    return textwrap.shorten(text, _LONGEST_FACT, placeholder=" ...") if len(text) > _LONGEST_FACT else text


def _per_step(per_step: PerStep) -> Iterator[doc.Part]:
    rows = []
    for part in per_step.parts:
        if max(part.a_ms, part.b_ms) >= _LEAST_MS:
            is_told = abs(part.change_ms) >= LEAST_SHARE * per_step.a_ms
            tone: doc.Tone = "" if not is_told else "better" if part.change_ms < 0 else "worse"
            rows.append(_part(part.name, part.a_ms, part.b_ms, tone))
    together = _part(Said("together"), per_step.a_ms, per_step.b_ms)
    rows.append([doc.as_cell(cell)._replace(tone="best") for cell in together])
    columns: list[doc.Head | str] = [Said("ms per step, whole run"), *_RUNS, *doc.numbers("change")]
    yield doc.Text(per_step.sentence)
    yield doc.Section("", [doc.Grid(columns, rows, most=_ALL_ROWS)])


def _part(name: str, a_ms: float, b_ms: float, tone: doc.Tone = "") -> list[doc.Cell | str]:
    return [name, f"{a_ms:,.1f}", f"{b_ms:,.1f}", doc.Cell(_signed(b_ms - a_ms), tone)]


def _signed(change: float) -> str:
    """The change with its sign and one decimal; a change that rounds to zero has no sign.

    >>> _signed(-4.56), _signed(0.01)
    ('-4.6', '0.0')
    """
    text = f"{change:+.1f}"
    return "0.0" if float(text) == 0 else text


def _remarks(comparison: Comparison) -> Iterator[str]:
    if max(comparison.a.world_size, comparison.b.world_size) > 1:
        yield Said("With several ranks, rates and shares are those of the rank that writes the log.")
    wait, goodput = comparison.line("input_wait_percent"), comparison.line("perf/goodput_percent")
    if None not in (goodput.a, goodput.b) and goodput.change is None:
        yield Said(
            "Goodput leaves out the time between the passes, where a slow loader may wait, so it is not compared "
            "here; the table of milliseconds per step has this time."
        )
    elif None in (wait.a, wait.b) and (goodput.a, goodput.b) != (None, None):
        yield Said("The input wait (–) is unknown, and counts as productive in goodput.")
    if comparison.whole_run:
        yield comparison.whole_run
    if comparison.per_step is not None:
        yield from comparison.per_step.notes
    per_step = comparison.line("tokens_per_step")
    knows_flops = comparison.line("model_flops_per_step").change is not None  # and has said so before all figures
    if per_step.change is not None and abs(per_step.change) > _SAME_SIZE_PERCENT and not knows_flops:
        yield Said("The steps of the two runs differ in size: compare rates and MFU, not step times.")
    yield Said(
        "The verdicts compare the difference with the spread of step times within each run, in blocks of consecutive "
        "steps; about one verdict in twenty is wrong by chance. They do not cover slow drift or differences between "
        "runs, such as another node, other clock rates or other jobs on the machine: repeat both runs before you rely "
        "on a small difference."
    )
