"""From what a supervisor saw and what the worker left to the trial's result."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flopwatch.file_reading import UnreadableError, opened_regular
from flopwatch.record_reading import BrokenRecordError, clean_value, read_record
from flopwatch.sweep.assemble import EXCEPTION, assemble
from flopwatch.sweep.classify import Ending, OwnKill, classify, signal_name
from flopwatch.sweep.heartbeat import Progress, read_progress
from flopwatch.trial_files import log_file, read_json, trial_folder
from flopwatch.trial_records import TrialResult, TrialSpec

_TAIL_BYTES = 6000


@dataclass(frozen=True, slots=True)
class _Raised:
    """What `exception.json` must have to be believed."""

    type: str
    message: str
    outcome: Literal["error", "invalid", "unsupported", "oom_device", "oom_host"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a supervisor saw of its worker.

    Attributes:
        pid: Of the worker.
        status: Its exit code, or the negative of the signal that ended it; None if it would not die.
        own_kill: Why we killed it; None when we did not.
        own_kill_detail: In words.
        stacks: What its threads did then.
        peak_rss_bytes: Most resident memory of the tree.
        oom_kills: Kills for memory by the kernel.
        memory_limit: How host memory was limited, with the peaks of its whole life: charged, and resident.
        would_not_die: Processes left, stuck in the kernel.
        unix_time: When it began.
        seconds: How long it lived.
    """

    pid: int
    status: int | None
    own_kill: OwnKill | None
    own_kill_detail: str
    stacks: str
    peak_rss_bytes: int
    oom_kills: int
    memory_limit: dict[str, Any]
    would_not_die: list[int]
    unix_time: float
    seconds: float


def conclude(sweep: Path, name: str, job: dict[str, Any], spec: TrialSpec, seen: Seen) -> TrialResult:
    folder = trial_folder(sweep, name)
    measured, environment, is_done = assemble(folder, spec, seen.peak_rss_bytes or None)
    ending = Ending(
        own_kill=seen.own_kill,
        own_kill_detail=seen.own_kill_detail,
        exit_code=seen.status if seen.status is not None and seen.status >= 0 else None,
        signal_number=-seen.status if seen.status is not None and seen.status < 0 else None,
        has_finished=is_done,
        is_command=spec.trainer == "command",
        exception=_read_exception(folder),
        oom_kills=seen.oom_kills,
        has_own_group=seen.memory_limit.get("by") == "cgroup",
        log_tail=tail(log_file(sweep, name)),
    )
    outcome, reason = classify(ending)
    progress = Progress("done") if outcome == "ok" else read_progress(folder)
    return TrialResult(
        name=name,
        key=job.get("key", ""),
        spec=spec,
        outcome=outcome,
        reason=reason,
        evidence=_evidence(ending, seen),
        phase=progress.phase,
        step=progress.step,
        measured=measured,
        unix_time=seen.unix_time,
        seconds=seen.seconds,
        environment={**job.get("environment", {}), "host": os.uname().nodename, **environment},
        command=f"flopwatch trial --spec {shlex.quote(str(folder / 'spec.json'))}",
        log_tail=ending.log_tail if outcome != "ok" else "",
        stacks=seen.stacks,
        earlier_attempts=tuple(job.get("earlier_attempts", ())),
    )


def _read_exception(folder: Path) -> dict[str, Any] | None:
    content = read_json(folder / EXCEPTION)
    try:
        read_record(_Raised, content)
        found: dict[str, Any] = clean_value(content)
    except BrokenRecordError:
        return None
    return found


def _evidence(ending: Ending, seen: Seen) -> dict[str, Any]:
    found: dict[str, Any] = {"pid": seen.pid}
    if ending.own_kill is not None:
        found["killed_by"] = "flopwatch"
    if ending.exit_code is not None:
        found["exit_code"] = ending.exit_code
    if ending.signal_number is not None:
        found["signal"] = signal_name(ending.signal_number)
    if ending.exception is not None:
        found["exception"] = dict(ending.exception)
    if ending.oom_kills:
        found["oom_kills"] = ending.oom_kills
    if seen.memory_limit:
        found["memory_limit"] = seen.memory_limit
    if seen.would_not_die:
        found["would_not_die"] = seen.would_not_die
    return found


def tail(file: Path, size: int = _TAIL_BYTES) -> str:
    """The last lines of a text file, of a line longer than that its end; empty when there is none."""
    try:
        with opened_regular(file) as stream:
            stream.seek(0, os.SEEK_END)
            start = max(0, stream.tell() - size)
            stream.seek(start)
            text = stream.read().decode(errors="replace")
    except (FileNotFoundError, UnreadableError):
        return ""
    whole_lines = text.partition("\n")[2]
    return text if start == 0 else whole_lines if whole_lines.strip() else f"… {text}"
