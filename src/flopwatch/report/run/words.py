"""Words and numbers of a run's report that all of its forms share."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from flopwatch.numbers import UNKNOWN, count, duration, energy, flop_rate, flops, number, percent, step_time
from flopwatch.records.metrics import find_metric
from flopwatch.records.run import Provenance
from flopwatch.report.run.contents import Moment, RunReport
from flopwatch.runs.counters import energy_per_work
from flopwatch.runs.explain import what_ran
from flopwatch.text import one_line, plural

NAMES = {
    "perf/mfu_percent": "MFU",
    "perf/hfu_percent": "HFU",
    "training/loss": "loss",
    "perf/tokens_per_second": "tokens/s",
    "perf/samples_per_second": "samples/s",
    "perf/step_time": "step time",
    "perf/input_wait_percent": "input wait",
    "perf/memory_allocated_gib": "allocated",
    "perf/memory_reserved_gib": "reserved",
    "perf/hardware_flops_per_second_per_device": "counted",
    "counters/flops_per_second_per_device": "by hardware counters",
    "counters/tensor_active": "tensor cores busy",
    "perf/joules_per_token": "energy per token",
    "training/lr": "learning rate",
    "training/grad_norm": "gradient norm",
}
_WRITTEN: Mapping[str, Callable[[float], str]] = {"FLOP": flops, "FLOP/s": flop_rate, "J": energy}
_STATES = {
    "ended": "The run ended.",
    "stopped": "The run was stopped from the keyboard.",
    "failed": "The run has failed.",
    "running": "The run is still going on.",
    "killed": "The process is gone and its log has no end: it was killed, or the end could not be written.",
    "running or killed": "The log has no end: the run is still going on, or it was killed.",
}
_QUICKEST = "the quickest matmul that was measured on this device"
_LONGEST = 300


def metric_name(key: str) -> str:
    return NAMES.get(key, one_line(key, 80))


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
    if unit in ("tokens", "samples", "steps", "tokens/s", "samples/s"):
        return f"{count(value, 4)} {unit}"
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
    cause = f" {one_line(report.ended_by, _LONGEST).rstrip('.')}." if report.ended_by else ""
    planned = report.start.total_steps if report.start else None
    of_planned = f" of {planned:,} planned" if isinstance(planned, int) else ""
    done = f"{report.steps:,}{of_planned} steps" if report.steps != 1 or of_planned else "1 step"
    wall = f" in {duration(report.wall_seconds)}" if report.wall_seconds else ""
    sessions = f", {plural(len(report.starts), 'session')}" if len(report.starts) > 1 else ""
    return f"{_STATES[report.state]}{cause} {done}{wall}{sessions}."


def tiles(report: RunReport) -> Iterator[tuple[str, str]]:
    """The main numbers, each with the words that say what it is; `~` marks those of FLOPs that are not exact."""
    about = "~" if report.exactness.inexact_windows else ""
    whole = report.waterfall.mfu_percent if report.waterfall else None
    of_wall = f"; {about}{percent(whole / 100)} of the whole wall time" if whole is not None else ""
    rate = report.times.flops_per_second if report.times is not None else None
    if rate is not None and "perf/mfu_percent" not in report.curves:
        yield f"{about}{flop_rate(rate)}", "model FLOP/s of one device"
    else:
        for key, words in (("mfu", f"MFU of the training steps{of_wall}"), ("hfu", "HFU of the training steps")):
            mean = report.mean(f"perf/{key}_percent")
            yield f"{about if mean is not None else ''}{metric_text(f'perf/{key}_percent', mean)}", words
    of = next((name for name in ("tokens", "samples") if f"perf/{name}_per_second" in report.curves), None)
    if of is not None:
        yield count(report.mean(f"perf/{of}_per_second")), f"{of} per second"
    yield metric_text("perf/step_time", report.mean("perf/step_time")), "mean step time"
    if "training/loss" in report.curves:  # `flopwatch run` does not know it in a loop of the user's own
        yield metric_text("training/loss", report.last("training/loss")), "newest loss"
    if report.counters is not None and report.counters.energy_joules is not None:
        what = ["measured energy of the devices", *energy_per_work(report.counters)[:1]]
        yield energy(report.counters.energy_joules), ", ".join(what)
    if report.goodput is not None:
        productive, known = duration(report.goodput.productive_seconds), duration(report.goodput.known_seconds)
        yield percent(report.goodput.share), f"goodput: {productive} of {known} productive"


def warnings(report: RunReport) -> list[str]:
    found = []
    if report.torn_lines:
        found.append(f"{plural(report.torn_lines, 'line')} of the log could not be read; the report does without them.")
    for curve in report.curves.values():
        if curve.broken_windows:
            windows = plural(curve.broken_windows, "logging window")
            where = f"in {windows}, first in the one that begins with step {curve.broken_at_step:,}"
            found.append(f"The metric {metric_name(curve.key)} is nan or infinite {where}.")
    if report.exactness.inexact_windows:
        found.append(f"{exact_sentence(report)} The reasons are under Provenance.")
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
    return setting_texts({name: value for name, value in facts.items() if value is not None})


def setting_texts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(one_line(str(name), 60), setting_text(value)) for name, value in values.items()]


def setting_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return one_line(", ".join(f"{name} {setting_text(item)}" for name, item in value.items()), _LONGEST) or UNKNOWN
    return UNKNOWN if value is None else one_line(str(value), _LONGEST)


def exact_sentence(report: RunReport) -> str:
    counts = report.exactness
    known = counts.exact_windows + counts.inexact_windows
    if not known:
        return "No logging window says whether its FLOPs are exact."
    if not counts.inexact_windows:
        text = f"The FLOPs are exact in all {known:,} logging windows" if known > 1 else "The FLOPs are exact"
    else:
        text = f"The FLOPs are exact in {counts.exact_windows:,} of {plural(known, 'logging window')}"
    more = f"; {plural(counts.unknown_windows, 'more window')} without FLOPs" if counts.unknown_windows else ""
    return f"{text}{more}."


def provenance_facts(record: Provenance) -> list[tuple[str, str]]:
    quickest = record.achievable_flops_per_s
    facts = [
        ("from step", f"{record.step:,}"),
        ("FLOPs", f"method {record.method or 'not known yet'}, mode {record.mode}, attention {record.attention}"),
        ("exact", "the FLOPs of counted steps are exact" if record.exact else "no"),
        ("coverage", f"{percent(record.coverage)} of the matmul-like calls have a formula" if record.coverage else ""),
        ("peak", peak_text(record)),
        ("achievable", f"{flop_rate(quickest)}, {_QUICKEST}" if quickest else ""),
        ("notes", "; ".join(record.notes)),
    ]
    return [(name, one_line(text, 4 * _LONGEST)) for name, text in facts if text]


def peak_text(record: Provenance | None) -> str:
    if record is None or record.peak is None:
        return "not known, so there is no MFU"
    peak = record.peak
    rate = peak.get("flops_per_s")
    value = flop_rate(rate) if isinstance(rate, int | float) else UNKNOWN
    devices = f" × {record.device_count:,} devices" if record.device_count != 1 else ""
    named = ", ".join(str(peak[name]) for name in ("device", "dtype") if peak.get(name))
    source = f"; source: {peak.get('source')} ({peak.get('kind')}, confidence {peak.get('confidence')})"
    return one_line(f"{value}{devices}, {named}{source}", 2 * _LONGEST)


def moment_words(moment: Moment) -> str:
    """What a restart or a notice says, and where it was."""
    if moment.last_step is None:
        return f"{moment.kind}: {moment.words}"
    if moment.first_step is None:
        return f"{moment.kind} before step {moment.last_step:,}: {moment.words}"
    return f"{moment.kind} at step {moment.last_step:,}: {moment.words}"
