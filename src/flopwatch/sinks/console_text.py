"""What the console says about each record. What is not known is left out, never shown as 0."""

import math
from collections.abc import Callable, Mapping

from flopwatch.run_records import Number, Provenance, Row, RunStart, Summary

LONG_WAIT_PERCENT = 10.0
"""From here on the wait for input is worth a word on every line."""


def row_parts(row: Row, step_width: int = 0) -> list[tuple[str, str, str]]:
    """A row as label, figure and unit of each part, the most wanted first. `~` stands before a share that is not exact.

    >>> row_parts(Row(20, 0.0, {"training/loss": 2.5, "perf/step_time": 0.213}))
    [('step', '20', ''), ('loss', ' 2.5000', ''), ('', '213', ' ms/step')]
    """
    values = row.values
    parts = [("step", f"{row.step:>{step_width},}", "")]
    if "training/loss" in values:
        parts.append(("loss", f"{_loss(values['training/loss']):>7}", ""))
    for label, key in (("MFU", "perf/mfu_percent"), ("HFU", "perf/hfu_percent")):
        if key in values:
            about = "~" if row.exact is False else ""
            parts.append((label, f"{about + percent(values[key]):>5}", ""))
    if values.get("perf/input_wait_percent", 0) > LONG_WAIT_PERCENT:
        parts.append(("input wait", percent(values["perf/input_wait_percent"]), ""))
    if "perf/tokens_per_second" in values:
        parts.append(("", f"{scaled(values['perf/tokens_per_second']):>5}", " tok/s"))
    if "perf/step_time" in values:
        figure, _, unit = duration(values["perf/step_time"]).partition(" ")
        parts.append(("", f"{figure:>3}", f" {unit}/step"))
    return parts


def start_line(start: RunStart) -> str:
    parts = [f"flopwatch: logging to {start.output_dir}"]
    if start.total_steps is not None:
        parts.append(f"{start.total_steps:,} steps planned")
    if start.resumed_after_step is not None:
        parts.append(f"resumed after step {start.resumed_after_step:,}")
    return ", ".join(parts)


def provenance_line(origin: Provenance) -> str:
    """Where the numbers come from, in one line.

    >>> provenance_line(Provenance(1, "smart", "trace", True, "full"))
    'FLOPs of model(batch) by trace, exact, attention full; no peak known, so no MFU'
    """
    if origin.method is None:
        flops = "FLOPs not known yet"
    else:
        exact = "exact" if origin.exact else "not exact"
        flops = f"FLOPs of model(batch) by {origin.method}, {exact}, attention {origin.attention}"
    if origin.coverage is not None and origin.coverage < 1:
        flops += f", {origin.coverage:.1%} of the ops counted"
    if origin.peak is None:
        return f"{flops}; no peak known, so no MFU"
    peak = f"{scaled_flops(origin.peak['flops_per_s'])}/s {origin.peak['dtype']} of {origin.peak['device']}"
    return f"{flops}; peak {'' if origin.device_count == 1 else f'{origin.device_count} x '}{peak}"


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """Label and text of each line of the table at the end."""
    values = summary.values
    steps = f"{values['total/steps']:,}" if "total/steps" in values else None
    about = "~" if summary.exact is False else ""
    lines = [
        ("steps", steps),
        ("time in steps", _of(values, "time/train_seconds", duration)),
        ("loss", _of(values, "training/loss", _loss)),
        ("MFU", _of(values, "perf/mfu_percent", lambda value: about + percent(value))),
        ("HFU", _of(values, "perf/hfu_percent", lambda value: about + percent(value))),
        ("not exact", "; ".join(summary.notes) or None),
        ("input wait", _long_wait(values)),
        ("tokens", _of(values, "total/tokens", scaled)),
        ("tokens/s", _of(values, "perf/tokens_per_second", scaled)),
        ("model FLOPs", _of(values, "total/model_flops", scaled_flops)),
        *((f"notice {code}", f"{times} x") for code, times in summary.notices.items()),
        *((f"{sink} lost", f"{rows:,} rows") for sink, rows in summary.dropped_rows.items() if rows),
        *((f"{part} failed", why) for part, why in summary.failed_parts.items()),
    ]
    return [(label, text) for label, text in lines if text is not None]


def _long_wait(values: Mapping[str, Number]) -> str | None:
    wait = values.get("perf/input_wait_percent", 0)
    return f"{percent(wait)} of the time in steps" if wait > LONG_WAIT_PERCENT else None


def _of(values: Mapping[str, Number], key: str, shown: Callable[[float], str]) -> str | None:
    return shown(values[key]) if key in values else None


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.3g}"


def percent(value: float) -> str:
    """A percentage, short but never rounded to 0.

    >>> percent(41.234), percent(0.01234), percent(0)
    ('41.2%', '0.012%', '0.0%')
    """
    return f"{value:.1f}%" if value >= 1 or value == 0 or not math.isfinite(value) else f"{value:.2g}%"


def scaled(value: float) -> str:
    """Three digits and a prefix.

    >>> scaled(182_345), scaled(9.5), scaled(1.2e21)
    ('182k', '9.5', '1.2Z')
    """
    return "".join(_with_prefix(value))


def scaled_flops(flops: float) -> str:
    """The same with its unit.

    >>> scaled_flops(989.4e12)
    '989 TFLOP'
    """
    figure, prefix = _with_prefix(flops)
    return f"{figure} {prefix}FLOP"


def _with_prefix(value: float) -> tuple[str, str]:
    for factor, prefix in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return _short(value / factor), prefix
    return _short(value), ""


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or not math.isfinite(value) else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> duration(0.213), duration(12.34), duration(200), duration(90_061)
    ('213 ms', '12.3 s', '3:20 min', '25:01:01 h')
    """
    if seconds < 1e-3:
        return f"{_short(seconds * 1e6)} µs"
    if seconds < 1:
        return f"{_short(seconds * 1e3)} ms"
    if seconds < 100 or not math.isfinite(seconds):
        return f"{_short(seconds)} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours}:{minutes_left:02}:{whole_seconds:02} h" if hours else f"{minutes}:{whole_seconds:02} min"
