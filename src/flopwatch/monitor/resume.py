"""Finds the totals of earlier sessions in the log of a run, so that this session continues them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from flopwatch import process
from flopwatch.errors import FlopwatchError
from flopwatch.monitor import notices
from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.notices import Notify
from flopwatch.monitor.totals import Ledger, RunTotals, typical_work
from flopwatch.records.metrics import OF_STEPS, typical_seconds
from flopwatch.records.run import PARTIAL_ROW
from flopwatch.records.time_uses import LOST
from flopwatch.runs import rows_from_end
from flopwatch.runs.log_file import TornLineError, lines_from_end, parse_object, row_step, to_record

_MOST_LINES_SEARCHED = 20_000
"""How many lines of a log are searched for the start of its last session, which takes 0.1 s."""
_UNREADABLE_LOG = (FlopwatchError, OSError, ValueError, KeyError, TypeError, AttributeError)
"""Exceptions that may be raised when a damaged log, or another file, is read as a log."""


class ResumePoint(NamedTuple):
    """The last logged step before the one at which a run continues, and the totals up to that step.

    In the middle of a window of several ranks they are partly an estimate: the log has the sums of whole windows.
    """

    step: int
    ledger: Ledger
    is_estimated: bool = False


def resume_from_log(
    totals: RunTotals, log: Path, first_step: int, environment: Mapping[str, Any], notify: Notify
) -> None:
    """Continue the totals of the log if it has later steps than the checkpoint that was loaded, if any.

    `first_step` is that of this session; `environment` shows whether torchelastic has restarted the job.
    """
    if totals.resumed_after is not None and totals.resumed_after + 1 >= first_step:
        return
    try:
        point = find_resume_point(log, first_step)
        if point is not None and (totals.resumed_after is None or point.step > totals.resumed_after):
            totals.continue_from(point.ledger, newest_record(log), point.step)
            if point.is_estimated:
                notify(*notices.notice("totals_estimated", first_step=first_step))
        elif totals.resumed_after is None and _is_same_job(log, environment):
            totals.continue_from(Ledger(), newest_record(log), None)
    except _UNREADABLE_LOG as error:
        notify(*notices.notice("log_not_resumed", log=log, why=error))
    if totals.resumed_after is not None and totals.resumed_after + 1 < first_step:
        notify(*notices.notice("steps_lost", last_step=totals.resumed_after, first_step=first_step))


def find_resume_point(log: Path, first_step: int) -> ResumePoint | None:
    """Find the newest logged totals before `first_step`; None when the run starts from the beginning.

    A training that goes back to a checkpoint repeats steps, which must not count twice. If the checkpoint lies inside
    a logging window, the window's steps before `first_step` are added from the columns of its log row.
    """
    if first_step <= 1 or not log.is_file():
        return None
    later: Mapping[str, Any] | None = None
    for row in rows_from_end(log):
        if row["step"] >= first_step or not row.get("ledger"):
            later = row
            continue
        ledger, window = Ledger.from_json(row["ledger"]), _steps(later)
        rest = [step for step in window if row["step"] < step.step < first_step]
        of_all_ranks = later.get("all_ranks") if later is not None and rest else None
        typical = typical_seconds([seconds for seconds in typical_work(window) if seconds])
        if of_all_ranks:
            ledger.add_amounts(_share_of_window(of_all_ranks, window, rest))
            unknown: dict[str, Any] = dict.fromkeys(of_all_ranks)
            rest = [step._replace(**unknown) for step in rest]
        ledger.add_steps(rest, typical)
        return ResumePoint(rest[-1].step if rest else row["step"], ledger, bool(of_all_ranks))
    return None


def _share_of_window(
    of_all_ranks: Mapping[str, int], window: Sequence[MeasuredStep], rest: Sequence[MeasuredStep]
) -> dict[str, int]:
    """Estimate the sums over all ranks for the steps `rest`, from their share of the window on the logging rank."""
    shares: dict[str, int] = {}
    for name, total in of_all_ranks.items():
        own, own_rest = (sum(getattr(step, name) or 0 for step in steps) for steps in (window, rest))
        if own:
            shares[name] = round(Fraction(total * own_rest, own))
    return shares


def _steps(row: Mapping[str, Any] | None) -> list[MeasuredStep]:
    if row is None:
        return []
    columns = dict(row["steps"])
    columns["is_warm_up"] = columns.pop("warm_up", [False] * len(columns.get("step", ())))
    peak = (row.get("peak") or {}).get("flops_per_s")
    for name in ("model", "hardware"):
        if peak and f"{name}_flops" in columns:
            columns[f"{name}_peak_seconds"] = [None if n is None else n / peak for n in columns[f"{name}_flops"]]
    names = [name for name in columns if name in MeasuredStep._fields]
    cells = zip(*(columns[name] for name in names), strict=True)
    return [MeasuredStep(**dict(zip(names, each, strict=True))) for each in cells]


def newest_record(log: Path) -> tuple[float, Ledger] | None:
    """Time of the newest record of earlier sessions, even of steps that this session repeats, and the totals then.

    None if there is none, or if the log cannot be read: the totals then go on without the time between the sessions.
    """
    newest: dict[str, Any] | None = None
    with suppress(*_UNREADABLE_LOG):
        for record in _timed_records(log):
            newest = newest or record
            if not record.get("ledger"):
                continue
            ledger = Ledger.from_json(record["ledger"])
            values = newest["values"] if newest["type"] == "summary" else {}
            # A summary also contains the time of phases after the last row.
            keys = {name: f"time/{name}_seconds" for name in (*OF_STEPS, "wall", *LOST)}
            ledger.seconds |= {name: values[key] for name, key in keys.items() if key in values}
            has_wall = "time/wall_seconds" in values or newest.get("ledger")
            ended = ledger.end_unix_time if has_wall else None
            return newest["unix_time"] if ended is None else ended, ledger
    return None


def _is_same_job(log: Path, environment: Mapping[str, Any]) -> bool:
    """Whether torchelastic has restarted the job that wrote the log's last session.

    A job that was killed before its first checkpoint starts at step 0 again, so its steps do not show the restart.
    """
    now = environment.get("torchelastic")
    if not now or not now["restart_count"]:
        return False
    start = next((record for record in _timed_records(log) if record["type"] == "run"), {})
    before = start.get("environment", {}).get("torchelastic")
    # torchrun's agent keeps its pid when it restarts workers. `run_id` alone is not enough: its default is "none".
    same = before and all(before[name] == now[name] for name in ("run_id", "agent_pid"))
    return bool(same and before["restart_count"] < now["restart_count"])


def process_writing(log: Path) -> int | None:
    """The process of the log's last session, if it runs and has not ended the session; None otherwise."""
    try:
        newest = islice(lines_from_end(log), _MOST_LINES_SEARCHED) if log.is_file() else ()
        records = (parse_object(line) for line in newest if row_step(line) is None)
        last = next((record for record in records if record.get("type") in ("run", "summary")), {})
    except (OSError, TornLineError):
        return None
    writer = last.get("environment", {}).get("process", {})
    return writer["pid"] if process.is_alive(writer) else None


def _timed_records(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the records that have a time (starts of sessions, rows and summaries), newest first."""
    if not log.is_file():
        return
    for line in lines_from_end(log):
        with suppress(TornLineError):
            record = parse_object(line)
            if record.get("type") in ("run", "row", PARTIAL_ROW, "summary"):
                to_record({**record, "type": "row"} if record["type"] == PARTIAL_ROW else record)
                yield record
