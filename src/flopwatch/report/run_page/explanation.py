"""How a logged MFU was calculated, as a document."""

from collections.abc import Iterator

from flopwatch.decode import is_amount
from flopwatch.numbers import flop_rate, percent
from flopwatch.present.document import Block, Document, Facts, Part, Section, Text
from flopwatch.records.metrics import Goodput, advice
from flopwatch.records.time_uses import USES
from flopwatch.runs.explain import Division, Explanation

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
    if explanation.world_size > 1:
        of_all = explanation.all_ranks_mfu
        together = "" if of_all is None else f": MFU {percent(of_all, decimals=2)}"
        also = f"the log also has all {explanation.world_size} ranks together{together}"
        parts.append(Text(f"for the rank that writes the log; {also}"))
    parts.append(Section("", [Facts(facts)]))
    for name, numerator, division in (("MFU", "model", explanation.mfu), ("HFU", "hardware", explanation.hfu)):
        parts.append(Section("", _division(name, f"{numerator} FLOPs", division, explanation)))
    return Document(_title(explanation), parts, source=explanation.log)


def _percent(division: Division | None) -> str:
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
    """Why the hardware executed more than the model FLOPs: recomputation, padding or attention across documents."""
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
        if (sentence := advice({"perf/input_wait_percent": 100 * share})) is not None:
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
        since = f"{goodput.known_seconds:,.1f} s, which are {since} without those between passes"
    yield f"{percent(goodput.share, decimals=2)} of {since}"
    losses = [f"{USES[name].name} {seconds:,.1f} s" for name, seconds in goodput.largest_losses()]
    if losses:
        yield f"Largest losses: {', '.join(losses)}."
    if goodput.caveat is not None:
        yield goodput.caveat


def _division(name: str, numerator: str, division: Division | None, explanation: Explanation) -> list[Part]:
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
        f"{name} = {numerator} / (seconds x peak{' x devices' if devices else ''})",
        f"    = {division.flops:,} / ({division.seconds!r} x {division.peak_flops_per_s:,.0f}{devices})",
        f"    = {short} in {prefix}FLOP",
        f"    = {division.share:.6g}",
    )
    parts = [Block("\n".join(written))]
    if division.logged is not None:
        difference = division.logged / division.share - 1 if division.share else 0.0
        is_same = abs(difference) <= _ROUNDING_SECONDS * (1 + len(explanation.steps) / division.seconds)
        how = f"the same value: {division.logged:.6g}"
        how = how if is_same else f"{division.logged:.6g}, which differs by {difference:+.2%}"
        parts.append(Text(f"The log has {how}.", "soft"))
    if division.share > 1:
        parts.append(Text("This is more than the peak, so the peak, the FLOPs or the time is wrong.", "warn"))
    return parts
