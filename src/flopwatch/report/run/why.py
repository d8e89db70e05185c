"""What `flopwatch why` and `flopwatch explain` say, as documents, and the short form that a notebook shows for a log.

`why` says where the rest of the peak went, or where the time went if MFU is unknown; `explain` how an MFU was computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from flopwatch.decode import is_amount
from flopwatch.errors import InputError
from flopwatch.language import _
from flopwatch.numbers import count, duration, flop_rate, number, percent, step_time
from flopwatch.present.document import Cell, Document, Facts, Grid, Items, Part, Section, Text, Verbatim, numbers
from flopwatch.present.notebook import html_table
from flopwatch.records import metrics
from flopwatch.records.metrics import Goodput
from flopwatch.records.time_uses import USES
from flopwatch.runs import advice
from flopwatch.runs.counters import counter_sentences, counters_of
from flopwatch.runs.explain import Explanation, Quotient
from flopwatch.runs.reading import RunLog, earlier_run_note
from flopwatch.runs.state import standing
from flopwatch.runs.traces import TraceSplit
from flopwatch.runs.waterfall import Loss, Waterfall, exactness_of, waterfall_of
from flopwatch.text import one_line, plural

_LONGEST_NAME = 200
_STATES = {
    "running": "still running",
    "running or killed": "still running, or killed",
    "killed": "killed, or its log is cut",
}
_LEAST_PERCENT_OUTSIDE = 3.0
"""If less of the wall time is outside of training steps, their MFU is about that of the run."""


def why(log: RunLog, traces: Sequence[TraceSplit], problems: Sequence[str]) -> tuple[dict[str, Any], Document]:
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
        **_counters_json(log),
        "notes": [*waterfall.notes, *problems],
    }
    losses = [_item(f"{loss.name}: {loss.points:.1f} points", loss, said.next_step) for loss in said.losses]
    next_step = [Text(f"Next: {said.next_step}")] if said.next_step else []
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
        Section("", [Text(said.sentence, "strong" if said.verdict else ""), *next_step, *reservation]),
        Section("", [Items(losses, is_numbered=True)]),
        *_counters(log),
        *_notes([*said.notes, *problems]),
    ]
    of_what = f"the MFU of {one_line(str(log.path.parent))} is {percent(waterfall.mfu_percent / 100)}"
    return content, Document(f"Why {of_what}", parts)


def _item(name: str, of: Loss | advice.TimeUse, told: str = "") -> Cell:
    has_more = of.advice and of.advice not in told
    return Cell(name, detail=f"{of.evidence}\nNext: {of.advice}" if has_more else of.evidence)


def _notes(notes: Sequence[str]) -> list[Part]:
    return [Section("", [Text(f"Note: {note}", "soft") for note in notes])] if notes else []


def _counters(log: RunLog) -> list[Part]:
    found = counters_of(log)
    return [Section("", [Text(text) for text in counter_sentences(found)])] if found is not None else []


def _counters_json(log: RunLog) -> dict[str, Any]:
    found = counters_of(log)
    return {} if found is None else {"counters": asdict(found)}


def _unless_ended(log: RunLog) -> str:
    return "" if log.summary is not None else ", the run has not ended"


def _difference(log: RunLog, waterfall: Waterfall) -> str:
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
        **_counters_json(log),
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
        Section("", [Grid(("", *numbers("time", "of wall time", "per step")), rows)]),
        Items(largest, is_numbered=True),
        Section("", [Text(sentence)]),
        *_counters(log),
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
    lines = [
        ("state", f"{steps}; {_STATES.get(state, 'ended')}{cause}"),
        *((name, percent(None if share is None else share / 100)) for name, share in shares.items()),
        ("tokens/s", count(values.get("perf/tokens_per_second"))),
        ("step time", step_time(values.get("perf/step_time"))),
        ("loss", number(values.get("training/loss"), 4)),
        *advice.losses_in_pairs(log),
    ]
    return html_table(f"Run {one_line(folder, _LONGEST_NAME)}", lines)


# How a logged MFU was calculated

_METHODS = {
    "trace": "counted by a trace that runs nothing",
    "step": "counted while steps of the training ran",
    "estimate": "estimated from the modules' shapes",
    "flops_fn": "returned by the user's flops_fn",
}
_ROUNDING_SECONDS = 1e-9
"""The log rounds seconds to this precision."""


def explanation_document(explanation: Explanation) -> Document:
    """The FLOPs, the seconds, the peak and the division, so that a person can check it by hand."""
    sections = {
        "model FLOPs": _flops(explanation, "model"),
        "hardware FLOPs": _flops(explanation, "hardware"),
        "seconds": _seconds(explanation),
        "peak": _peak(explanation),
        "tokens": _tokens(explanation),
        "counting": _counting(explanation),
        "what ran": (f"{label}: {text}" for label, text in explanation.what_ran.items()),
        "goodput": _goodput(explanation.goodput) if explanation.goodput is not None else (),
    }
    facts = [
        (label if place == 0 else "", text)
        for label, paragraphs in sections.items()
        for place, text in enumerate(paragraphs)
    ]
    parts: list[Part] = [Text(f"MFU {_percent(explanation.mfu)}, HFU {_percent(explanation.hfu)}", "strong")]
    if note := earlier_run_note(explanation.earlier_step):
        parts.append(Text(note, "warn"))
    if explanation.world_size > 1:
        of_all = explanation.all_ranks_mfu
        together = "" if of_all is None else f": MFU {percent(of_all, decimals=2)}"
        also = f"the log also has all {explanation.world_size} ranks together{together}"
        parts.append(Text(f"for the rank that writes the log; {also}"))
    parts.append(Section("", [Facts(facts)]))
    for name, numerator, division in (("MFU", "model", explanation.mfu), ("HFU", "hardware", explanation.hfu)):
        parts.append(Section("", _division(name, f"{numerator} FLOPs", division, explanation)))
    return Document(_title(explanation), parts, source=explanation.log)


def _percent(division: Quotient | None) -> str:
    return "unknown" if division is None else percent(division.share, decimals=2)


def _title(explanation: Explanation) -> str:
    first, last = explanation.window
    session = f", session {explanation.session} of {explanation.sessions}" if explanation.sessions > 1 else ""
    if not explanation.is_window:
        return f"Step {explanation.step:,} (in the logging window of steps {first:,} to {last:,}{session})"
    counted, in_all = len(explanation.steps), len(explanation.steps) + len(explanation.left_out)
    which = f"all {in_all}" if counted == in_all else f"{counted} of {in_all}"
    return f"Steps {first:,} to {last:,} ({which} are used{session})"


def _flops(explanation: Explanation, which: str) -> Iterator[str]:
    flops: int | None = getattr(explanation, f"{which}_flops")
    if flops is None:
        yield "unknown: " + explanation.unknown.get("model_flops", "the executed FLOPs were not counted")
        return
    yield f"{flops:,}"
    if which == "hardware" and explanation.model_flops is not None and flops != explanation.model_flops:
        yield f"{flops / explanation.model_flops:.4f} x the model FLOPs: {_why_more(explanation, flops)}"


def _why_more(explanation: Explanation, hardware_flops: int) -> str:
    needed, again = explanation.model_flops or 0, explanation.recompute_flops
    is_padded = explanation.real_tokens is None or explanation.real_tokens != explanation.tokens
    of_documents = "pairs of positions in different documents"
    if again is None:
        return f"recomputation{', padding' if is_padded else ''} or {of_documents}"
    rest = hardware_flops - needed - again
    why_rest = f"padding, and for {of_documents} if rows are packed" if is_padded else of_documents
    parts = [
        f"{again:,} recomputed ({again / needed:.4f} x)" if again else "",
        f"{rest:,} for {why_rest} ({rest / needed:.4f} x)" if rest else "",
    ]
    return ", ".join(filter(None, parts))


def _seconds(explanation: Explanation) -> Iterator[str]:
    if explanation.seconds is None:
        yield f"unknown: {explanation.unknown['seconds']}"
    else:
        yield f"{explanation.seconds!r}"
    if explanation.seconds is not None and explanation.input_wait_seconds is not None:
        yield f"of which {explanation.input_wait_seconds:.6g} s were spent waiting for the batch"
        share = explanation.input_wait_seconds / explanation.seconds if explanation.seconds else 0.0
        if (sentence := metrics.advice({"perf/input_wait_percent": 100 * share})) is not None:
            yield f"{sentence}."
    if explanation.is_warm_up:
        yield "This is a warm-up step, or it was counted as it ran, so no MFU in the log includes it."
    for reason in sorted(set(explanation.left_out.values())):
        steps = [f"{step:,}" for step, why in explanation.left_out.items() if why == reason]
        yield f"Left out: {'steps' if len(steps) > 1 else 'step'} {', '.join(steps)} ({reason})"
    spent = [f"{USES[name].name} {seconds:,.1f} s" for name, seconds in explanation.other_seconds.items()]
    so_far = f" The run has spent so far: {', '.join(spent)}." if spent else ""
    yield f"Time for pauses, evaluation, checkpoints and counting FLOPs is not included.{so_far}"


def _peak(explanation: Explanation) -> Iterator[str]:
    provenance = explanation.provenance
    if provenance is None or provenance.peak is None:
        yield f"unknown: {explanation.unknown['peak']}"
        return
    peak = provenance.peak
    names = ("device", "dtype", "kind", "confidence", "source")
    device, dtype, kind, how_sure, source = (peak.get(name, "unknown") for name in names)  # a damaged log may lack them
    yield f"{peak['flops_per_s']:,.0f} FLOP/s, {device}, {dtype}"
    yield f"{kind}, confidence {how_sure}: {source}"
    if is_amount(peak.get("fraction")) and peak["fraction"] < 1:
        yield f"scaled to the {percent(peak['fraction'])} of the device that this process can use"
    devices = provenance.device_count
    yield "1 device" if devices == 1 else f"{devices} devices, {devices * peak['flops_per_s']:,.0f} FLOP/s in all"


def _tokens(explanation: Explanation) -> Iterator[str]:
    if explanation.tokens is None:
        yield "unknown: " + explanation.unknown.get("tokens", "no step of this window is used")
        return
    parts = [f"{explanation.tokens:,} positions"]
    for name, what in (("real_tokens", "not padding"), ("trainable_tokens", "with a label")):
        amount = getattr(explanation, name)
        parts.append(f"{what}: unknown" if amount is None else f"{amount:,} {what}")
    if explanation.samples is not None:
        parts.append(f"in {explanation.samples:,} samples")
    yield ", ".join(parts)
    if explanation.real_tokens is not None and explanation.tokens:
        yield f"padding {percent(1 - explanation.real_tokens / explanation.tokens, decimals=2)}"
    if explanation.seconds:
        yield f"{explanation.tokens / explanation.seconds:,.1f} positions per second"


def _counting(explanation: Explanation) -> Iterator[str]:
    provenance = explanation.provenance
    if provenance is None:
        yield "unknown: the log does not contain how FLOPs were counted"
        return
    method = _METHODS.get(provenance.method or "", "no FLOPs counted yet")
    exact = provenance.exact if explanation.exact is None else explanation.exact
    yield f"mode {provenance.mode}; {method}; {'exact' if exact else 'not exact'}"
    yield from (f"Not exact: {note}." for note in explanation.notes)
    yield {
        "full": "attention full: all pairs of positions are counted, masked or not",
        "causal": "attention causal: only pairs of positions that are not masked are counted",
    }.get(provenance.attention, provenance.attention)
    if provenance.coverage is None:
        yield "coverage unknown: no operation was traced"
    elif provenance.coverage < 1:
        missing = "some matmul-like ops have no formula, the true number is higher"
        yield f"coverage {percent(provenance.coverage, decimals=2)}: {missing}"
    else:
        yield "coverage 100 %: every matmul-like op has a formula"
    yield from (f"Note: {note}" for note in provenance.notes)
    if explanation.torn_lines:
        yield f"{explanation.torn_lines} incomplete lines of the log were skipped"


def _goodput(goodput: Goodput) -> Iterator[str]:
    since = f"{goodput.wall_seconds:,.1f} s since the first process started"
    if goodput.caveat is not None and "between" in goodput.lost_seconds:
        since = f"{goodput.known_seconds:,.1f} s (of {since})"
    yield f"{percent(goodput.share, decimals=2)} of {since}"
    losses = [f"{USES[name].name} {seconds:,.1f} s" for name, seconds in goodput.largest_losses()]
    if losses:
        yield f"Largest losses: {', '.join(losses)}."
    if goodput.caveat is not None:
        yield goodput.caveat


def _division(name: str, numerator: str, division: Quotient | None, explanation: Explanation) -> list[Part]:
    if division is None:
        missing = [what for what in ("model_flops", "seconds", "peak") if what in explanation.unknown]
        reason = " and ".join(missing).replace("_flops", " FLOPs") or numerator
        parts: list[Part] = [Text(f"{name} is unknown: it cannot be calculated without {reason}", "warn")]
        flops = getattr(explanation, numerator.replace(" FLOPs", "_flops"), None)
        if missing == ["peak"] and flops is not None and explanation.seconds:
            parts.append(Text(f"{numerator} / seconds = {flop_rate(flops / explanation.seconds)}"))
        return parts
    devices = "" if division.device_count == 1 else f" x {division.device_count}"
    unit, prefix = (1e12, "T") if division.peak_flops_per_s >= 1e12 else (1e9, "G")
    short = f"{division.flops / unit:.9g} / ({division.seconds:.9g} x {division.peak_flops_per_s / unit:.9g}{devices})"
    written = (
        _(f"{name} = {numerator} / (seconds x peak{' x devices' if devices else ''})"),
        f"    = {division.flops:,} / ({division.seconds!r} x {division.peak_flops_per_s:,.0f}{devices})",
        f"    = {short} {_(f'in {prefix}FLOP')}",
        f"    = {division.share:.6g}",
    )
    parts = [Verbatim("\n".join(written))]
    if (how := _how_logged(name, division, explanation)) is not None:
        parts.append(Text(f"The log has {how}.", "soft"))
    if division.share > 1:
        parts.append(Text("This is more than the peak, so the peak, the FLOPs or the time is wrong.", "warn"))
    return parts


def _how_logged(name: str, division: Quotient, explanation: Explanation) -> str | None:
    if not explanation.peak_was_logged:
        without = f"no {name}, because the run did not know this peak"
        return without if division.logged is None else f"{division.logged:.6g}, at the peak that the run knew"
    if division.logged is None:
        return None
    difference = division.logged / division.share - 1 if division.share else 0.0
    is_same = abs(difference) <= _ROUNDING_SECONDS * (1 + len(explanation.steps) / division.seconds)
    what = f"{division.logged:.6g}"
    return f"the same value: {what}" if is_same else f"{what}, which differs by {difference:+.2%}"
