"""What `flopwatch why` says: where the rest of the peak went, or where the time went if MFU is unknown."""

from collections.abc import Sequence
from typing import Any, Literal

from flopwatch.errors import InputError
from flopwatch.numbers import duration, flop_rate, percent
from flopwatch.present.document import Bar, Bars, Cell, Column, Document, Items, Part, Section, Table, Text, numbers
from flopwatch.records.time_uses import USES
from flopwatch.records.trace_split import TraceSplit
from flopwatch.report.run_page import words
from flopwatch.runs.reading import RunLog
from flopwatch.runs.waterfall.conclusion import LEAST_DRAWN_POINTS, conclusion_of, what_is_missing
from flopwatch.runs.waterfall.losses import Loss, Waterfall, exactness_of, waterfall_of
from flopwatch.runs.waterfall.times import times_of
from flopwatch.runs.waterfall.verdicts import facts_of
from flopwatch.text import one_line, plural

_LARGEST = 3


def waterfall_bars(waterfall: Waterfall) -> Bars:
    """The way from 100 % of the peak down to the MFU: a bar for each loss, at its place.

    Losses that would be written as 0.0 share one bar, above that of MFU.
    """
    large, mfu = waterfall.largest(_LARGEST), waterfall.mfu_percent
    small = [loss for loss in waterfall.losses if abs(loss.points) < LEAST_DRAWN_POINTS]
    shown = [loss for loss in waterfall.losses if loss not in small]
    if small:
        name = f"{len(small)} smaller loss{'es' if len(small) > 1 else ''}"
        shown.append(Loss("", name, sum(loss.points for loss in small), sum(loss.seconds for loss in small)))
    level = 100.0
    bars = [Bar("peak", 0.0, level, "100 %", "whole")]
    for loss in shown:
        above, level = level, level - loss.points
        tip = "\n".join(filter(None, (loss.evidence, loss.advice)))
        tone: Literal["loss", "large loss"] = "large loss" if loss in large else "loss"
        bars.append(Bar(loss.name, min(above, level), max(above, level), _signed(-loss.points), tone, tip))
    bars.append(Bar(words.WHOLE_MFU, 0.0, mfu, percent(mfu / 100), "rest"))
    whole = max(bar.high for bar in bars)
    rows = [
        (loss.name, words.lost_text(loss.points), duration(loss.seconds), loss.evidence, loss.advice)
        for loss in waterfall.losses
    ]
    rows.append((words.WHOLE_MFU, percent(mfu / 100), "", "", ""))
    columns: list[Column | str] = ["loss", *numbers("points of MFU", "time"), "evidence", "what to try"]
    return Bars([bar._replace(low=bar.low / whole, high=bar.high / whole) for bar in bars], behind=Table(columns, rows))


def _signed(points: float) -> str:
    return f"{points:+.1f}" if abs(points) >= LEAST_DRAWN_POINTS else f"{points:+.2g}" if points else "0"


_LEAST_PERCENT_OUTSIDE = 3.0
"""If less of the wall time is outside of training steps, their MFU is about that of the run."""


def why(log: RunLog, traces: Sequence[TraceSplit], problems: Sequence[str]) -> tuple[dict[str, Any], Document]:
    """Where the rest of the peak went, what that means, and what to try next: as JSON, and as a document.

    Raises:
        InputError: The log has neither an MFU nor the wall time.
    """
    waterfall = waterfall_of(log, traces)
    if waterfall is None:
        return where_the_time_went(log, traces, problems)
    facts, conclusion = facts_of(log), conclusion_of(log, waterfall)
    content = waterfall.to_json()
    content = {
        "log": str(log.path),
        "steps": facts.steps,
        "exact": facts.exact,
        "verdict": None if conclusion.verdict is None else conclusion.verdict.to_json(),
        "no_verdict": conclusion.sentence if conclusion.verdict is None else None,
        "largest": [loss.key for loss in waterfall.largest()],
        **content,
        "notes": [*content["notes"], *problems],
    }
    verdict = [Text(conclusion.sentence, "strong" if conclusion.verdict else "")]
    verdict += [Text(conclusion.reservation)] if conclusion.reservation else []
    losses = [
        Cell(f"{loss.name}: {loss.points:.1f} points", detail=_evidence(loss.evidence, loss.advice))
        for loss in conclusion.losses
    ]
    document = Document(
        f"Why the MFU of {one_line(str(log.path.parent))} is {percent(waterfall.mfu_percent / 100)}",
        [
            Text(f"{plural(facts.steps, 'step')} in {duration(waterfall.wall_seconds)}{_on_what(log)}", "soft"),
            Text(_difference(log, waterfall)),
            Section("", [waterfall_bars(waterfall)]),
            Section("", verdict),
            Section("", [Items(losses, is_numbered=True)]),
            *_notes([*conclusion.notes, *problems]),
        ],
    )
    return content, document


def _evidence(evidence: str, advice: str) -> str:
    return f"{evidence}\nNext: {advice}" if advice else evidence


def _notes(notes: Sequence[str]) -> list[Part]:
    return [Section("", [Text(f"Note: {note}", "soft") for note in notes])] if notes else []


def _on_what(log: RunLog) -> str:
    peak = log.provenances[-1].peak if log.provenances else None
    if peak is None:
        return _unless_ended(log)
    world_size = log.starts[-1].world_size if log.starts else 1
    ranks = f"{world_size} ranks, " if world_size > 1 else ""
    rate = f"{peak.get('dtype')} peak {flop_rate(peak.get('flops_per_s'))} ({peak.get('kind')})"
    device = one_line(f"{ranks}{peak.get('device')}, {rate}")
    return f" on {device}{_unless_ended(log)}"


def _unless_ended(log: RunLog) -> str:
    return "" if log.summary is not None else ", the run has not ended"


def _difference(log: RunLog, waterfall: Waterfall) -> str:
    """Why the MFU of the run and that of its steps differ."""
    outside = [loss for loss in waterfall.losses if not USES[loss.key].in_steps]
    lost = sum(loss.points for loss in outside)
    if waterfall.step_mfu_percent is None or lost < _LEAST_PERCENT_OUTSIDE:
        return "Nearly all of its time is in training steps, so they reach about the same MFU."
    most = max(outside, key=lambda loss: loss.points)
    return (
        f"Its training steps reach {percent(waterfall.step_mfu_percent / 100)} without stalls and warm-up"
        f"{_logged_mfu(log, waterfall.step_mfu_percent)}. The run as a whole is lower, because "
        f"{percent(lost / 100)} of its time is spent otherwise, most of it on {most.name}."
    )


def _logged_mfu(log: RunLog, step_mfu_percent: float) -> str:
    """The MFU that the log ends with, if it looks different: it has stalls, but not the steps that were counted."""
    summary = log.summary
    logged = None if summary is None or len(log.starts) > 1 else summary.values.get("perf/mfu_percent")
    if logged is None or percent(logged / 100) == percent(step_mfu_percent / 100):
        return ""
    return f" ({percent(logged / 100)} in the log, which counts stalls, but leaves out the steps that flopwatch slowed)"


def where_the_time_went(
    log: RunLog, traces: Sequence[TraceSplit], problems: Sequence[str]
) -> tuple[dict[str, Any], Document]:
    """Where the time of a run went whose MFU is unknown, and what is missing for the MFU.

    Raises:
        InputError: The log does not have the wall time.
    """
    times = times_of(log, traces)
    if times is None:
        raise InputError(what_is_missing(log))
    sentence, notes = conclusion_of(log, None).sentence, [*times.notes, *problems]
    content = {
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
    environment = log.starts[-1].environment if log.starts else {}
    device = environment.get("device_name") or environment.get("device")
    dtypes = log.provenances[-1].dtypes if log.provenances else ()
    on_what = " on " + one_line(", ".join([str(device), *dtypes])) if device else ""
    on_what += _unless_ended(log)
    rates = f": {times.rates()}" if times.rates() else ""
    done = "the first step has begun after" if not log.rows else f"{plural(times.steps or 0, 'step')} in"
    largest = [
        Cell(f"{use.name}: {percent(use.share)} of the wall time", detail=_evidence(use.evidence, use.advice))
        for use in times.largest()
    ]
    document = Document(
        f"Where the time of {one_line(str(log.path.parent))} went",
        [
            Text(f"{done} {duration(times.wall_seconds)}{on_what}{rates}", "soft"),
            Section("", [Table(("", *numbers("time", "of wall time", "per step")), times.rows())]),
            Items(largest, is_numbered=True),
            Section("", [Text(sentence)]),
            *_notes(notes),
        ],
    )
    return content, document
