"""What `flopwatch why` and `flopwatch explain` say, as documents, and the short form that a notebook shows for a log.

`why` says where the rest of the peak went, or where the time went if MFU is unknown; `explain` how an MFU was computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from flopwatch.decode import is_amount
from flopwatch.errors import InputError
from flopwatch.language import Said, Templates, _, ands, commas, counted, in_words, semicolons, sentences
from flopwatch.numbers import count, duration, flop_rate, number, percent, step_time
from flopwatch.present.document import Cell, Document, Facts, Items, Part, Section, Text, Verbatim
from flopwatch.present.notebook import html_table
from flopwatch.records.flops import PEAK_WORDS
from flopwatch.records.time_uses import USES
from flopwatch.runs import advice
from flopwatch.runs.counters import counter_sentences, counters_of
from flopwatch.runs.explain import WHAT_RAN, Explanation, Quotient
from flopwatch.runs.reading import RunLog, earlier_run_note
from flopwatch.runs.state import standing
from flopwatch.runs.traces import TraceSplit
from flopwatch.runs.waterfall import Loss, Waterfall, exactness_of, waterfall_of
from flopwatch.text import one_line

_LONGEST_NAME = 200
_STATES: Templates = {
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
    name = Said("{loss}: {points:.1f} points")
    losses = [_item(name.filled(loss=loss.name, points=loss.points), loss, said.next_step) for loss in said.losses]
    next_step = [Text(Said("Next: {step}", step=said.next_step))] if said.next_step else []
    reservation = [Text(said.reservation)] if said.reservation else []
    peak = log.provenances[-1].peak if log.provenances else None
    on_what = ""
    if peak is not None:
        world_size = log.starts[-1].world_size if log.starts else 1
        ranks = counted(world_size, "{n} rank", "{n} ranks") if world_size > 1 else ""
        rate = Said(
            "{dtype} peak {rate} ({kind})",
            dtype=str(peak.get("dtype")),
            rate=flop_rate(peak.get("flops_per_s")),
            kind=in_words(PEAK_WORDS, peak.get("kind")),
        )
        on_what = commas([ranks, one_line(str(peak.get("device"))), rate])
    parts = [
        Text(_where(counted(steps, "{n} step", "{n} steps"), waterfall.wall_seconds, on_what, log), "soft"),
        Text(_difference(log, waterfall)),
        Section("", [advice.waterfall_bars(waterfall)]),
        Section("", [Text(said.sentence, "strong" if said.verdict else ""), *next_step, *reservation]),
        Section("", [Items(losses, is_numbered=True)]),
        *_counters(log),
        *_notes([*said.notes, *problems]),
    ]
    title = Said(
        "Why the MFU of {run} is {mfu}", run=one_line(str(log.path.parent)), mfu=percent(waterfall.mfu_percent / 100)
    )
    return content, Document(title, parts)


def _where(steps: str, seconds: float, on_what: str, log: RunLog) -> str:
    said = Said("{steps} in {time} on {device}") if on_what else Said("{steps} in {time}")
    running = "" if log.summary is not None else Said("the run has not ended")
    return commas([said.filled(steps=steps, time=duration(seconds), device=on_what), running])


def _item(name: str, of: Loss | advice.TimeUse, told: str = "") -> Cell:
    has_more = of.advice and of.advice not in told
    more = Said("{evidence}\nNext: {advice}", evidence=of.evidence, advice=of.advice)
    return Cell(name, detail=more if has_more else of.evidence)


def _notes(notes: Sequence[str]) -> list[Part]:
    return [Section("", [Text(Said("Note: {note}", note=note), "soft") for note in notes])] if notes else []


def _counters(log: RunLog) -> list[Part]:
    found = counters_of(log)
    return [Section("", [Text(text) for text in counter_sentences(found)])] if found is not None else []


def _counters_json(log: RunLog) -> dict[str, Any]:
    found = counters_of(log)
    return {} if found is None else {"counters": asdict(found)}


def _difference(log: RunLog, waterfall: Waterfall) -> str:
    outside = [loss for loss in waterfall.losses if not USES[loss.key].in_steps]
    lost = sum(loss.points for loss in outside)
    if waterfall.step_mfu_percent is None or lost < _LEAST_PERCENT_OUTSIDE:
        return Said("Nearly all of its time is in training steps, so they reach about the same MFU.")
    steps, most = percent(waterfall.step_mfu_percent / 100), max(outside, key=lambda loss: loss.points)
    logged = None if log.summary is None or len(log.starts) > 1 else log.summary.values.get("perf/mfu_percent")
    said = Said("Its training steps reach {steps} without stalls and warm-up.")
    if logged is not None and percent(logged / 100) != steps:
        said = Said(
            "Its training steps reach {steps} without stalls and warm-up ({logged} in the log, which counts stalls, "
            "but leaves out the steps that flopwatch slowed)."
        )
    lower = Said(
        "The run as a whole is lower, because {lost} of its time is spent otherwise, most of it on {use}.",
        lost=percent(lost / 100),
        use=most.name,
    )
    return sentences([said.filled(steps=steps, logged=percent((logged or 0) / 100)), lower])


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
    on_what = one_line(", ".join([str(device), *dtypes])) if device else ""
    rates = [
        "" if times.tokens_per_second is None else f"{count(times.tokens_per_second)} tokens/s",
        "" if times.samples_per_second is None else f"{count(times.samples_per_second)} samples/s",
        "" if times.flops_per_second is None else Said("{rate} per device", rate=flop_rate(times.flops_per_second)),
    ]
    steps = counted(times.steps or 0, "{n} step", "{n} steps") if log.rows else Said("no steps yet")
    done = _where(steps, times.wall_seconds, on_what, log)
    if any(rates):
        done = Said("{what}: {facts}", what=done, facts=commas(rates))
    share = Said("{use}: {share} of the wall time")
    largest = [_item(share.filled(use=use.name, share=percent(use.share)), use) for use in times.largest()]
    parts = [
        Text(done, "soft"),
        Section("", [advice.uses_table(times)]),
        Items(largest, is_numbered=True),
        Section("", [Text(sentence)]),
        *_counters(log),
        *_notes([*times.notes, *problems]),
    ]
    return content, Document(Said("Where the time of {run} went", run=one_line(str(log.path.parent))), parts)


def log_table(log: RunLog) -> str:
    """A small HTML table: the state of the run, its newest figures, and where the rest of the peak went."""
    folder = str(log.starts[-1].output_dir) if log.starts else str(log.path)
    values = {**(log.rows[-1].values if log.rows else {}), **(log.summary.values if log.summary else {})}
    steps = counted(log.rows[-1].steps_done, "{n} step", "{n} steps") if log.rows else Said("no steps yet")
    state = Said(_STATES.get(standing(log.starts[-1] if log.starts else None, log.summary), "ended"))
    if log.summary and log.summary.ended_by:
        state = Said("{state} by {cause}", state=state, cause=one_line(log.summary.ended_by, _LONGEST_NAME))
    shares = {name: values.get(f"perf/{name.lower()}_percent") for name in ("MFU", "HFU")}
    lines = [
        (Said("state"), semicolons([steps, state])),
        *((name, percent(None if share is None else share / 100)) for name, share in shares.items()),
        (Said("tokens/s"), count(values.get("perf/tokens_per_second"))),
        (Said("step time"), step_time(values.get("perf/step_time"))),
        (Said("loss"), number(values.get("training/loss"), 4)),
        *advice.losses_in_pairs(log),
    ]
    return html_table(Said("Run {run}", run=one_line(folder, _LONGEST_NAME)), lines)


# How a logged MFU was calculated

_METHODS: Templates = {
    "trace": "counted by a trace that runs nothing",
    "step": "counted while steps of the training ran",
    "estimate": "estimated from the modules' shapes",
    "flops_fn": "returned by the user's flops_fn",
}
_NEEDED: Templates = {"model_flops": "model FLOPs", "seconds": "seconds", "peak": "peak"}
_ROUNDING_SECONDS = 1e-9
"""The log rounds seconds to this precision."""


def explanation_document(explanation: Explanation) -> Document:
    """The FLOPs, the seconds, the peak and the division, so that a person can check it by hand."""
    sections = {
        Said("model FLOPs"): _flops(explanation, "model"),
        Said("hardware FLOPs"): _flops(explanation, "hardware"),
        Said("seconds"): _seconds(explanation),
        Said("peak"): _peak(explanation),
        Said("counting"): _counting(explanation),
        Said("what ran"): (
            Said("{what}: {facts}", what=in_words(WHAT_RAN, name), facts=text)
            for name, text in explanation.what_ran.items()
        ),
    }
    facts = [
        (label if place == 0 else "", text)
        for label, paragraphs in sections.items()
        for place, text in enumerate(paragraphs)
    ]
    parts: list[Part] = [
        Text(Said("MFU {mfu}, HFU {hfu}", mfu=_percent(explanation.mfu), hfu=_percent(explanation.hfu)), "strong")
    ]
    if note := earlier_run_note(explanation.earlier_step):
        parts.append(Text(note, "warn"))
    if explanation.world_size > 1:
        of_all = explanation.all_ranks_mfu
        also = Said("for the rank that writes the log; the log also has all {ranks} ranks together")
        if of_all is not None:
            also = Said("for the rank that writes the log; the log also has all {ranks} ranks together: MFU {mfu}")
        parts.append(Text(also.filled(ranks=explanation.world_size, mfu=percent(of_all, decimals=2))))
    parts.append(Section("", [Facts(facts)]))
    quotients = (
        ("MFU", Said("model FLOPs"), explanation.mfu),
        ("HFU", Said("hardware FLOPs"), explanation.hfu),
    )
    for name, numerator, division in quotients:
        parts.append(Section("", _division(name, numerator, division, explanation)))
    return Document(_title(explanation), parts, source=explanation.log)


def _percent(division: Quotient | None) -> str:
    return Said("unknown") if division is None else percent(division.share, decimals=2)


def _title(explanation: Explanation) -> str:
    first, last = explanation.window
    session: str = ""
    if explanation.sessions > 1:
        session = Said("session {session} of {sessions}", session=explanation.session, sessions=explanation.sessions)
    if not explanation.is_window:
        window = Said("in the logging window of steps {first:,} to {last:,}", first=first, last=last)
        return Said("Step {step:,} ({where})", step=explanation.step, where=commas([window, session]))
    used, in_all = len(explanation.steps), len(explanation.steps) + len(explanation.left_out)
    which = Said("all {all} are used") if used == in_all else Said("{used} of {all} are used")
    where = commas([which.filled(used=used, all=in_all), session])
    return Said("Steps {first:,} to {last:,} ({where})", first=first, last=last, where=where)


def _flops(explanation: Explanation, which: str) -> Iterator[str]:
    flops: int | None = getattr(explanation, f"{which}_flops")
    if flops is None:
        yield _unknown(explanation, "model_flops", Said("the executed FLOPs were not counted"))
        return
    yield f"{flops:,}"
    if which == "hardware" and explanation.model_flops is not None and flops != explanation.model_flops:
        times = Said("{times:.4f} x the model FLOPs: {why}")
        yield times.filled(times=flops / explanation.model_flops, why=_why_more(explanation, flops))


def _why_more(explanation: Explanation, hardware_flops: int) -> str:
    needed, again = explanation.model_flops or 0, explanation.recompute_flops
    if again is None:
        return Said("recomputation, padding or pairs of positions in different documents")
    rest = hardware_flops - needed - again
    more = Said("{rest:,} for padding or pairs of positions in different documents ({times:.4f} x)")
    parts = [
        Said("{again:,} recomputed ({times:.4f} x)", again=again, times=again / needed) if again else "",
        more.filled(rest=rest, times=rest / needed) if rest else "",
    ]
    return commas(parts)


def _unknown(explanation: Explanation, name: str, otherwise: str = "") -> str:
    return Said("unknown: {why}", why=explanation.unknown.get(name, otherwise))


def _seconds(explanation: Explanation) -> Iterator[str]:
    if explanation.seconds is None:
        yield _unknown(explanation, "seconds")
    else:
        yield f"{explanation.seconds!r}"
    if explanation.seconds is not None and explanation.input_wait_seconds is not None:
        wait = Said("of which {seconds:.6g} s were spent waiting for the batch")
        yield wait.filled(seconds=explanation.input_wait_seconds)
    if explanation.is_warm_up:
        yield Said("This is a warm-up step, or it was counted as it ran, so no MFU in the log includes it.")
    for reason in sorted(set(explanation.left_out.values())):
        steps = [f"{step:,}" for step, why in explanation.left_out.items() if why == reason]
        left_out = counted(
            len(steps),
            "Left out: step {steps} ({why})",
            "Left out: steps {steps} ({why})",
            steps=", ".join(steps),
            why=reason,
        )
        yield left_out
    yield Said("Time for pauses, evaluation, checkpoints and counting FLOPs is not included.")


def _peak(explanation: Explanation) -> Iterator[str]:
    provenance = explanation.provenance
    if provenance is None or provenance.peak is None:
        yield _unknown(explanation, "peak")
        return
    peak = provenance.peak
    names = ("device", "dtype", "kind", "confidence", "source")
    device, dtype, kind, how_sure, source = (peak.get(name, "unknown") for name in names)  # a damaged log may lack them
    yield f"{peak['flops_per_s']:,.0f} FLOP/s, {device}, {dtype}"
    sure = Said("{kind}, confidence {confidence}: {source}")
    yield sure.filled(kind=in_words(PEAK_WORDS, kind), confidence=in_words(PEAK_WORDS, how_sure), source=source)
    if is_amount(peak.get("fraction")) and peak["fraction"] < 1:
        scaled = Said("scaled to the {share} of the device that this process can use")
        yield scaled.filled(share=percent(peak["fraction"]))
    devices = provenance.device_count
    all_devices = Said(
        "{devices} devices, {rate:,.0f} FLOP/s in all", devices=devices, rate=devices * peak["flops_per_s"]
    )
    yield Said("1 device") if devices == 1 else all_devices


def _counting(explanation: Explanation) -> Iterator[str]:
    provenance = explanation.provenance
    if provenance is None:
        yield Said("unknown: the log does not contain how FLOPs were counted")
        return
    method = in_words(_METHODS, provenance.method) if provenance.method else Said("no FLOPs counted yet")
    exact = provenance.exact if explanation.exact is None else explanation.exact
    mode = Said("mode {mode}", mode=provenance.mode)
    yield semicolons([mode, method, Said("exact") if exact else Said("not exact")])
    yield from (Said("Not exact: {why}.", why=note) for note in explanation.notes)
    yield {
        "full": Said("attention full: all pairs of positions are counted, masked or not"),
        "causal": Said("attention causal: only pairs of positions that are not masked are counted"),
    }.get(provenance.attention, provenance.attention)
    if provenance.coverage is None:
        yield Said("coverage unknown: no operation was traced")
    elif provenance.coverage < 1:
        missing = Said("coverage {share}: some matmul-like ops have no formula, the true number is higher")
        yield missing.filled(share=percent(provenance.coverage, decimals=2))
    else:
        yield Said("coverage 100 %: every matmul-like op has a formula")
    yield from (Said("Note: {note}", note=note) for note in provenance.notes)
    if explanation.torn_lines:
        yield Said("{lines} incomplete lines of the log were skipped", lines=explanation.torn_lines)


def _division(name: str, numerator: str, division: Quotient | None, explanation: Explanation) -> list[Part]:
    if division is None:
        missing = [what for code, what in _NEEDED.items() if code in explanation.unknown]
        unknown = Said("{name} is unknown: it cannot be calculated without {missing}")
        parts: list[Part] = [Text(unknown.filled(name=name, missing=ands(map(Said, missing)) or numerator), "warn")]
        flops = explanation.model_flops if name == "MFU" else explanation.hardware_flops
        if missing == [_NEEDED["peak"]] and flops is not None and explanation.seconds:
            rate = Said("{flops} / seconds = {rate}", flops=numerator, rate=flop_rate(flops / explanation.seconds))
            parts.append(Text(rate))
        return parts
    devices = "" if division.device_count == 1 else f" x {division.device_count}"
    unit, prefix = (1e12, "T") if division.peak_flops_per_s >= 1e12 else (1e9, "G")
    short = f"{division.flops / unit:.9g} / ({division.seconds:.9g} x {division.peak_flops_per_s / unit:.9g}{devices})"
    formula = Said("{name} = {flops} / (seconds x peak)")
    if devices:
        formula = Said("{name} = {flops} / (seconds x peak x devices)")
    written = (
        _(formula.filled(name=name, flops=numerator)),
        f"    = {division.flops:,} / ({division.seconds!r} x {division.peak_flops_per_s:,.0f}{devices})",
        f"    = {short} {_(Said('in {unit}FLOP', unit=prefix))}",
        f"    = {division.share:.6g}",
    )
    parts = [Verbatim("\n".join(written))]
    if (how := _how_logged(name, division, explanation)) is not None:
        parts.append(Text(Said("The log has {what}.", what=how), "soft"))
    if division.share > 1:
        parts.append(Text(Said("This is more than the peak, so the peak, the FLOPs or the time is wrong."), "warn"))
    return parts


def _how_logged(name: str, division: Quotient, explanation: Explanation) -> str | None:
    if not explanation.peak_was_logged:
        if division.logged is None:
            return Said("no {name}, because the run did not know this peak", name=name)
        return Said("{value:.6g}, at the peak that the run knew", value=division.logged)
    if division.logged is None:
        return None
    difference = division.logged / division.share - 1 if division.share else 0.0
    is_same = abs(difference) <= _ROUNDING_SECONDS * (1 + len(explanation.steps) / division.seconds)
    how = Said("the same value: {value:.6g}") if is_same else Said("{value:.6g}, which differs by {difference:+.2%}")
    return how.filled(value=division.logged, difference=difference)
