"""What `flopwatch why` says: where the rest of the peak went, or where the time went if MFU is unknown.

A notebook shows a short form of it for a log.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flopwatch.errors import InputError
from flopwatch.numbers import count, duration, flop_rate, number, percent, step_time
from flopwatch.present.document import Cell, Document, Items, Part, Section, Table, Text, numbers
from flopwatch.present.notebook import html_table
from flopwatch.records.time_uses import USES
from flopwatch.runs import advice
from flopwatch.runs.reading import RunLog
from flopwatch.runs.state import standing
from flopwatch.runs.traces.splits import TraceSplit
from flopwatch.runs.waterfall import Loss, Waterfall, exactness_of, waterfall_of
from flopwatch.text import one_line, plural

_LONGEST_NAME = 200
_STATES = {"running": "still running", "running or killed": "still running, or killed", "killed": "killed"}
_LEAST_PERCENT_OUTSIDE = 3.0
"""If less of the wall time is outside of training steps, their MFU is about that of the run."""


def why(log: RunLog, traces: Sequence[TraceSplit], problems: Sequence[str]) -> tuple[dict[str, Any], Document]:
    """Where the rest of the peak went, what that means, and what to try next: as JSON, and as a document."""
    waterfall = waterfall_of(log, traces)
    if waterfall is None:
        return where_the_time_went(log, traces, problems)
    steps, said = advice.steps_of(log), advice.conclusion_of(log, waterfall)
    content = {
        "log": str(log.path),
        "steps": steps,
        "exact": exactness_of(log)[0],
        "verdict": None if said.verdict is None else asdict(said.verdict),
        "no_verdict": said.sentence if said.verdict is None else None,
        "largest": [loss.key for loss in waterfall.largest()],
        **waterfall.to_json(),
        "notes": [*waterfall.notes, *problems],
    }
    losses = [_item(f"{loss.name}: {loss.points:.1f} points", loss) for loss in said.losses]
    reservation = [Text(said.reservation)] if said.reservation else []
    peak = log.provenances[-1].peak if log.provenances else None
    on_what = ""
    if peak is not None:
        world_size = log.starts[-1].world_size if log.starts else 1
        ranks = f"{world_size} ranks, " if world_size > 1 else ""
        rate = f"{peak.get('dtype')} peak {flop_rate(peak.get('flops_per_s'))} ({peak.get('kind')})"
        on_what = " on " + one_line(f"{ranks}{peak.get('device')}, {rate}")
    parts = [
        Text(f"{plural(steps, 'step')} in {duration(waterfall.wall_seconds)}{on_what}{_unless_ended(log)}", "soft"),
        Text(_difference(log, waterfall)),
        Section("", [advice.waterfall_bars(waterfall)]),
        Section("", [Text(said.sentence, "strong" if said.verdict else ""), *reservation]),
        Section("", [Items(losses, is_numbered=True)]),
        *_notes([*said.notes, *problems]),
    ]
    of_what = f"the MFU of {one_line(str(log.path.parent))} is {percent(waterfall.mfu_percent / 100)}"
    return content, Document(f"Why {of_what}", parts)


def _item(name: str, of: Loss | advice.TimeUse) -> Cell:
    return Cell(name, detail=f"{of.evidence}\nNext: {of.advice}" if of.advice else of.evidence)


def _notes(notes: Sequence[str]) -> list[Part]:
    return [Section("", [Text(f"Note: {note}", "soft") for note in notes])] if notes else []


def _unless_ended(log: RunLog) -> str:
    return "" if log.summary is not None else ", the run has not ended"


def _difference(log: RunLog, waterfall: Waterfall) -> str:
    """Why the MFU of the run and that of its steps differ."""
    outside = [loss for loss in waterfall.losses if not USES[loss.key].in_steps]
    lost = sum(loss.points for loss in outside)
    if waterfall.step_mfu_percent is None or lost < _LEAST_PERCENT_OUTSIDE:
        return "Nearly all of its time is in training steps, so they reach about the same MFU."
    steps, most = percent(waterfall.step_mfu_percent / 100), max(outside, key=lambda loss: loss.points)
    logged = None if log.summary is None or len(log.starts) > 1 else log.summary.values.get("perf/mfu_percent")
    in_log = ""
    if logged is not None and percent(logged / 100) != steps:
        other = "which counts stalls, but leaves out the steps that flopwatch slowed"
        in_log = f" ({percent(logged / 100)} in the log, {other})"
    return (
        f"Its training steps reach {steps} without stalls and warm-up{in_log}. The run as a whole is lower, because "
        f"{percent(lost / 100)} of its time is spent otherwise, most of it on {most.name}."
    )


def where_the_time_went(
    log: RunLog, traces: Sequence[TraceSplit], problems: Sequence[str]
) -> tuple[dict[str, Any], Document]:
    """Where the time of a run went whose MFU is unknown, and what is missing for the MFU."""
    times = advice.times_of(log, traces)
    if times is None:
        raise InputError(advice.what_is_missing(log))
    sentence = advice.conclusion_of(log, None).sentence
    content = {
        "log": str(log.path),
        "exact": exactness_of(log)[0],
        "verdict": None,
        "no_verdict": sentence,
        "largest": [use.key for use in times.largest()],
        "mfu_percent": None,
        "step_mfu_percent": None,
        "losses": [],
        **asdict(times),
        "traces": [trace.to_json() for trace in traces],
        "notes": [*times.notes, *problems],
    }
    environment = log.starts[-1].environment if log.starts else {}
    device = environment.get("device_name") or environment.get("device")
    dtypes = log.provenances[-1].dtypes if log.provenances else ()
    on_what = " on " + one_line(", ".join([str(device), *dtypes])) if device else ""
    rates = [
        "" if times.tokens_per_second is None else f"{count(times.tokens_per_second)} tokens/s",
        "" if times.samples_per_second is None else f"{count(times.samples_per_second)} samples/s",
        "" if times.flops_per_second is None else f"{flop_rate(times.flops_per_second)} per device",
    ]
    known = f": {', '.join(filter(None, rates))}" if any(rates) else ""
    done = "the first step has begun after" if not log.rows else f"{plural(times.steps or 0, 'step')} in"
    rows = []
    for use in times.uses:
        per_step = "" if use.seconds_per_step is None else step_time(use.seconds_per_step)
        rows.append((use.name, duration(use.seconds), percent(use.share), per_step))
    largest = [_item(f"{use.name}: {percent(use.share)} of the wall time", use) for use in times.largest()]
    parts = [
        Text(f"{done} {duration(times.wall_seconds)}{on_what}{_unless_ended(log)}{known}", "soft"),
        Section("", [Table(("", *numbers("time", "of wall time", "per step")), rows)]),
        Items(largest, is_numbered=True),
        Section("", [Text(sentence)]),
        *_notes([*times.notes, *problems]),
    ]
    return content, Document(f"Where the time of {one_line(str(log.path.parent))} went", parts)


def log_table(log: RunLog) -> str:
    """A small HTML table: the state of the run, its newest figures, and where the rest of the peak went."""
    folder = str(log.starts[-1].output_dir) if log.starts else str(log.path)
    values = {**(log.rows[-1].values if log.rows else {}), **(log.summary.values if log.summary else {})}
    steps = f"{log.rows[-1].steps_done:,} steps" if log.rows else "no steps yet"
    state = standing(log.starts[-1] if log.starts else None, log.summary)
    cause = f" by {one_line(log.summary.ended_by, _LONGEST_NAME)}" if log.summary and log.summary.ended_by else ""
    shares = {name: values.get(f"perf/{name.lower()}_percent") for name in ("MFU", "HFU")}
    waterfall = waterfall_of(log)
    lines = [
        ("state", f"{steps}; {_STATES.get(state, 'ended')}{cause}"),
        *((name, percent(None if share is None else share / 100)) for name, share in shares.items()),
        ("tokens/s", count(values.get("perf/tokens_per_second"))),
        ("step time", step_time(values.get("perf/step_time"))),
        ("loss", number(values.get("training/loss"), 4)),
        *([] if waterfall is None else advice.waterfall_pairs(waterfall)),
    ]
    return html_table(f"Run {one_line(folder, _LONGEST_NAME)}", lines)
