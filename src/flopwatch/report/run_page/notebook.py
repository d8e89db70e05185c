"""The short form of a run's log that a notebook shows."""

from flopwatch.numbers import count, number, percent, step_time
from flopwatch.present.notebook import html_table
from flopwatch.runs.reading import RunLog
from flopwatch.runs.state import standing
from flopwatch.runs.waterfall import waterfall_of
from flopwatch.text import one_line

_LONGEST = 200
_STATES = {"running": "still running", "running or killed": "still running, or killed", "killed": "killed"}


def log_table(log: RunLog) -> str:
    """A small HTML table: the state of the run, its newest figures, and where the rest of the peak went."""
    folder = str(log.starts[-1].output_dir) if log.starts else str(log.path)
    values = {**(log.rows[-1].values if log.rows else {}), **(log.summary.values if log.summary else {})}
    steps = f"{log.rows[-1].steps_done:,} steps" if log.rows else "no steps yet"
    state = standing(log.starts[-1] if log.starts else None, log.summary)
    cause = f" by {one_line(log.summary.ended_by, _LONGEST)}" if log.summary and log.summary.ended_by else ""
    shares = {name: values.get(f"perf/{name.lower()}_percent") for name in ("MFU", "HFU")}
    waterfall = waterfall_of(log)
    lines = [
        ("state", f"{steps}; {_STATES.get(state, 'ended')}{cause}"),
        *((name, percent(None if share is None else share / 100)) for name, share in shares.items()),
        ("tokens/s", count(values.get("perf/tokens_per_second"))),
        ("step time", step_time(values.get("perf/step_time"))),
        ("loss", number(values.get("training/loss"), 4)),
        *([] if waterfall is None else waterfall.pairs()),
    ]
    return html_table(f"Run {one_line(folder, _LONGEST)}", lines)
