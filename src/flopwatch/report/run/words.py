"""Words and numbers of a run's report that all of its forms share."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from flopwatch.language import Said, Templates, commas, counted, in_words, semicolons, sentences
from flopwatch.numbers import UNKNOWN, count, duration, energy, flop_rate, flops, number, percent, step_time
from flopwatch.records.flops import PEAK_WORDS
from flopwatch.records.metrics import find_metric
from flopwatch.records.run import Provenance
from flopwatch.report.run.contents import RunReport
from flopwatch.runs.counters import energy_per_work
from flopwatch.runs.explain import WHAT_RAN, what_ran
from flopwatch.text import one_line

NAMES: Templates = {
    "perf/mfu_percent": "MFU",
    "perf/hfu_percent": "HFU",
    "training/loss": "loss",
    "perf/tokens_per_second": "tokens/s",
    "perf/samples_per_second": "samples/s",
    "perf/step_time": "step time",
    "training/lr": "learning rate",
    "training/grad_norm": "gradient norm",
}
_WRITTEN: Mapping[str, Callable[[float], str]] = {"FLOP": flops, "FLOP/s": flop_rate, "J": energy}
_STATES: Templates = {
    "ended": "The run ended.",
    "stopped": "The run was stopped from the keyboard.",
    "failed": "The run has failed.",
    "running": "The run is still going on.",
    "killed": "The process is gone and its log has no end: it was killed, or the end could not be written.",
    "running or killed": "The log has no end: the run is still going on, or it was killed.",
}
_AMOUNTS: Templates = {
    "tokens": "{n} tokens",
    "samples": "{n} samples",
    "steps": "{n} steps",
    "tokens/s": "{n} tokens/s",
    "samples/s": "{n} samples/s",
}
_PLACES: Templates = {
    **WHAT_RAN,
    "folder": "folder",
    "host": "host",
    "device": "device",
    "world size": "world size",
    "rank that logs": "rank that logs",
}
_LONGEST = 300


def metric_name(key: str) -> str:
    return Said(NAMES[key]) if key in NAMES else one_line(key, 80)


def metric_text(key: str, value: float | None) -> str:
    """A value of a metric with its unit.

    >>> metric_text("perf/mfu_percent", 38.25), metric_text("perf/step_time", 0.8215), metric_text("a/b", 2.5)
    ('38.2 %', '822 ms', '2.500')
    """
    unit = find_metric(key).unit
    if value is None:
        return UNKNOWN
    if not isinstance(value, int | float):
        return one_line(str(value), 80)
    if unit == "%":
        return percent(value / 100)
    if unit == "s":
        return step_time(value) if key.startswith(("perf/", "ranks/")) else duration(value)
    if unit in _WRITTEN:
        return _WRITTEN[unit](value)
    if unit in _AMOUNTS:
        return Said(_AMOUNTS[unit], n=count(value, 4))
    if unit in ("GiB", "epochs", "W", "MHz"):
        return f"{number(value, 4)} {unit}"
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**15 else number(value, 4)


def utc(unix_time: float | None) -> str:
    """A date and time, or a dash if it is unknown or no date at all.

    >>> utc(1_790_000_000.0), utc(1e30)
    ('2026-09-21 14:13:20', '–')
    """
    try:
        return UNKNOWN if unix_time is None else f"{datetime.fromtimestamp(unix_time, timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError, TypeError):
        return UNKNOWN


def state_sentence(report: RunReport) -> str:
    cause = f"{one_line(report.ended_by, _LONGEST).rstrip('.')}." if report.ended_by else ""
    planned = report.start.total_steps if report.start else None
    done: str = counted(report.steps, "{n} step", "{n} steps")
    if isinstance(planned, int):
        done = Said("{steps:,} of {planned:,} planned steps", steps=report.steps, planned=planned)
    if report.wall_seconds:
        done = Said("{steps} in {time}", steps=done, time=duration(report.wall_seconds))
    if len(report.starts) > 1:
        done = commas([done, counted(len(report.starts), "{n} session", "{n} sessions")])
    return sentences([Said(_STATES[report.state]), cause, Said("{sentence}.", sentence=done)])


def tiles(report: RunReport) -> Iterator[tuple[str, str]]:
    """The main numbers, each with the words that say what it is; `~` marks those of FLOPs that are not exact."""
    about = "~" if report.exact is False else ""
    whole = report.waterfall.mfu_percent if report.waterfall else None
    of_wall = Said("{share} of the whole wall time", share=f"{about}{percent((whole or 0) / 100)}")
    rate = report.times.flops_per_second if report.times is not None else None
    if rate is not None and "perf/mfu_percent" not in report.curves:
        yield f"{about}{flop_rate(rate)}", Said("model FLOP/s of one device")
    else:
        mfu = semicolons([Said("MFU of the training steps"), None if whole is None else of_wall])
        for key, words in (("mfu", mfu), ("hfu", Said("HFU of the training steps"))):
            mean = report.mean(f"perf/{key}_percent")
            yield f"{about if mean is not None else ''}{metric_text(f'perf/{key}_percent', mean)}", words
    rates = {
        "perf/tokens_per_second": Said("tokens per second"),
        "perf/samples_per_second": Said("samples per second"),
    }
    rate_key = next((key for key in rates if key in report.curves), None)
    if rate_key is not None:
        yield count(report.mean(rate_key)), rates[rate_key]
    yield metric_text("perf/step_time", report.mean("perf/step_time")), Said("mean step time")
    if "training/loss" in report.curves:  # `flopwatch run` does not know it in a loop of the user's own
        yield metric_text("training/loss", report.last("training/loss")), Said("newest loss")
    if report.counters is not None and report.counters.energy_joules is not None:
        what = [Said("measured energy of the devices"), *energy_per_work(report.counters)[:1]]
        yield energy(report.counters.energy_joules), commas(what)
    if report.goodput is not None:
        productive, known = duration(report.goodput.productive_seconds), duration(report.goodput.known_seconds)
        goodput = Said("goodput: {productive} of {known} productive", productive=productive, known=known)
        yield percent(report.goodput.share), goodput


def warnings(report: RunReport) -> list[str]:
    found: list[str] = []
    if report.torn_lines:
        lines = counted(report.torn_lines, "{n} line", "{n} lines")
        found.append(Said("{lines} of the log could not be read; the report does without them.", lines=lines))
    for curve in report.curves.values():
        if curve.broken_windows:
            broken = Said(
                "The metric {metric} is nan or infinite in {windows}, first in the one that begins with step {step:,}.",
                metric=metric_name(curve.key),
                windows=counted(curve.broken_windows, "{n} logging window", "{n} logging windows"),
                step=curve.broken_at_step,
            )
            found.append(broken)
    return found


def places(report: RunReport) -> list[tuple[str, str]]:
    start = report.start
    if start is None:
        return []
    environment = dict(start.environment)
    environment.pop("process", None)
    facts: dict[str, Any] = {**dict(what_ran(start)), "folder": start.output_dir}
    facts |= {name: environment.pop(name, None) for name in ("host", "device", "torch", "python")}
    facts |= {"world size": start.world_size, "rank that logs": start.rank, **environment}
    known = setting_texts({name: value for name, value in facts.items() if value is not None})
    return [(in_words(_PLACES, name), text) for name, text in known]


def setting_texts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(one_line(str(name), 60), setting_text(value)) for name, value in values.items()]


def setting_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return one_line(", ".join(f"{name} {setting_text(item)}" for name, item in value.items()), _LONGEST) or UNKNOWN
    if isinstance(value, Said):
        return value
    return UNKNOWN if value is None else one_line(str(value), _LONGEST)


def exact_sentence(report: RunReport) -> str:
    if report.exact is None:
        return Said("No logging window says whether its FLOPs are exact.")
    if report.exact:
        return Said("The FLOPs are exact.")
    why = [shortened(reason, _LONGEST) for reason in report.why_not_exact]
    return Said("The FLOPs are not exact: {why}.", why=semicolons(why)) if why else Said("The FLOPs are not exact.")


def provenance_facts(record: Provenance) -> list[tuple[str, str]]:
    quickest = record.achievable_flops_per_s
    how = Said("method {method}, mode {mode}, attention {attention}")
    measured = Said("{rate}, the quickest matmul that was measured on this device")
    method = record.method or Said("not known yet")
    facts = [
        ("FLOPs", how.filled(method=method, mode=record.mode, attention=record.attention)),
        (Said("peak"), peak_text(record)),
        (Said("achievable"), measured.filled(rate=flop_rate(quickest)) if quickest else ""),
        (Said("notes"), semicolons(record.notes)),
    ]
    return [(name, shortened(text, 4 * _LONGEST)) for name, text in facts if text]


def shortened(text: str, most: int) -> str:
    """The text; a long one, as in a damaged log, is cut."""
    return text if len(text) <= most else one_line(text, most)


def peak_text(record: Provenance | None) -> str:
    if record is None or record.peak is None:
        return Said("not known, so there is no MFU")
    peak = record.peak
    rate = peak.get("flops_per_s")
    value = flop_rate(rate) if isinstance(rate, int | float) else UNKNOWN
    if record.device_count != 1:
        value = Said("{rate} × {devices:,} devices", rate=value, devices=record.device_count)
    named = ", ".join(str(peak[name]) for name in ("device", "dtype") if peak.get(name))
    source = Said(
        "source: {source} ({kind}, confidence {confidence})",
        source=str(peak.get("source")),
        kind=in_words(PEAK_WORDS, peak.get("kind")),
        confidence=in_words(PEAK_WORDS, peak.get("confidence")),
    )
    return shortened(semicolons([commas([value, named]), source]), 2 * _LONGEST)


def happened(report: RunReport) -> Iterator[str]:
    """Restarts and notices, the newest first."""
    found: list[tuple[int | None, str, str]] = []
    for start in report.starts[1:]:
        host = start.environment.get("host")
        resumed = Said("resumed on {host}", host=str(host)) if host else Said("resumed")
        found.append((start.resumed_after_step, Said("restart"), resumed))
    for notice in report.notices:
        said = Said("{code}: {notice}", code=notice.code, notice=notice.message)
        found.append((notice.step, Said("notice"), said))
    for step, kind, words in sorted(found, key=lambda one: -(one[0] or 0)):
        where = Said("{kind} at step {step:,}: {words}")
        if step is None:
            where = Said("{kind} before the first step: {words}")
        yield where.filled(kind=kind, step=step, words=words)
