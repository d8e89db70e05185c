"""The short form of a run's log that a notebook shows."""

from collections.abc import Iterator

from flopwatch.numbers import count, number, percent, step_time
from flopwatch.records.html_table import html_table
from flopwatch.runs.reading import RunLog
from flopwatch.runs.waterfall.losses import waterfall_of
from flopwatch.text import one_line

_LONGEST = 200


def log_table(log: RunLog) -> str:
    """A small HTML table: the state of the run, its newest figures, and where the rest of the peak went."""
    folder = str(log.starts[-1].output_dir) if log.starts else str(log.path)
    return html_table(f"Run {one_line(folder, _LONGEST)}", list(_lines(log)))


def _lines(log: RunLog) -> Iterator[tuple[str, str]]:
    yield "state", _state(log)
    values = {**(log.rows[-1].values if log.rows else {}), **(log.summary.values if log.summary else {})}
    shown = {
        "MFU": _percent(values.get("perf/mfu_percent")),
        "HFU": _percent(values.get("perf/hfu_percent")),
        "tokens/s": count(values.get("perf/tokens_per_second")),
        "step time": step_time(values.get("perf/step_time")),
        "loss": number(values.get("training/loss"), 4),
    }
    yield from shown.items()
    yield from waterfall_lines(log)


def waterfall_lines(log: RunLog) -> Iterator[tuple[str, str]]:
    """Each loss between the peak and the MFU of the run; nothing if the log has too little for it."""
    waterfall = waterfall_of(log)
    if waterfall is None:
        return
    yield "peak of the devices", "100 %"
    yield from (
        (one_line(loss.name), f"{'−' if loss.points >= 0 else '+'}{_percent(abs(loss.points))}")
        for loss in waterfall.losses
    )
    yield "MFU of the whole run", _percent(waterfall.mfu_percent)


def _state(log: RunLog) -> str:
    steps = f"{log.rows[-1].steps_done:,} steps" if log.rows else "no steps yet"
    if log.summary is None:
        return f"{steps}; still running, or killed"
    return f"{steps}; ended" + (f" by {one_line(log.summary.ended_by, _LONGEST)}" if log.summary.ended_by else "")


def _percent(value: float | None) -> str:
    return percent(None if value is None else value / 100)
