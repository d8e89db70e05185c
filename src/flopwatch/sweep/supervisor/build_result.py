"""From what a supervisor saw and what the worker left to the trial's result."""

import os
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flopwatch.records.reading import BrokenRecordError, clean_value, cut, first_line, read_record, tail
from flopwatch.records.trial import OUT_OF_MEMORY, Outcome, TrialResult, TrialSpec
from flopwatch.records.trial_files import log_file, read_json, trial_folder
from flopwatch.sweep.claims import Progress, read_progress
from flopwatch.sweep.host.environment import host_facts
from flopwatch.sweep.host.tree_memory import HostPeak
from flopwatch.sweep.supervisor.classify import (
    Ending,
    JobEnd,
    OwnKill,
    RankEnd,
    after_its_steps,
    classify,
    memory_hint,
    signal_name,
)
from flopwatch.sweep.supervisor.measurements import EXCEPTION, assemble, cut_short

_LONGEST_TEXT = 20_000


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
        host_peak: Most host memory of the tree: of a command in its life, of a worker in its steps.
        sure_bytes: Least that a single process of it held at its peak, without pages of files.
        oom_kills: Kills for memory by the kernel.
        memory_limit: How host memory was limited, with the peaks of its whole life: seen by us, charged by the kernel.
        would_not_die: Processes left, stuck in the kernel.
        unix_time: When it began.
        seconds: How long it lived.
        job_end: How its processes ended, where it has several.
    """

    pid: int
    status: int | None
    own_kill: OwnKill | None
    own_kill_detail: str
    stacks: str
    host_peak: HostPeak
    sure_bytes: int
    oom_kills: int
    memory_limit: dict[str, Any]
    would_not_die: list[int]
    unix_time: float
    seconds: float
    job_end: JobEnd = field(default_factory=JobEnd)


def conclude(sweep: Path, name: str, job: dict[str, Any], spec: TrialSpec, seen: Seen) -> TrialResult:
    folder = trial_folder(sweep, name)
    found = assemble(folder, spec, seen.host_peak)
    ending = Ending(
        own_kill=seen.own_kill,
        own_kill_detail=seen.own_kill_detail,
        exit_code=seen.status if seen.status is not None and seen.status >= 0 else None,
        signal_number=-seen.status if seen.status is not None and seen.status < 0 else None,
        has_finished=found.is_done,
        has_finished_steps=found.has_all_steps,
        is_command=spec.trainer == "command",
        exception=_read_exception(folder),
        reported=found.reported_outcome,
        oom_kills=seen.oom_kills,
        has_own_group=seen.memory_limit.get("by") == "cgroup",
        held_bytes=seen.sure_bytes or None,
        limit_bytes=spec.limits.memory_bytes,
        log_tail=tail(log_file(sweep, name)),
    )
    ending = with_first_cause(ending, seen.job_end)
    outcome, reason = of_job(classify(ending), seen.job_end, ending)
    is_whole = outcome == "ok" and (found.is_done or ending.is_command)
    progress = Progress("done") if is_whole else read_progress(folder)
    measured = found.measured if is_whole or outcome != "ok" else cut_short(found.measured, spec, progress, reason)
    return TrialResult(
        name=name,
        key=job.get("key", ""),
        spec=spec,
        outcome=outcome,
        reason=reason,
        evidence=_evidence(ending, seen, outcome),
        phase=progress.phase,
        step=progress.step,
        measured=measured,
        unix_time=seen.unix_time,
        seconds=seen.seconds,
        environment={**job.get("environment", {}), **host_facts(), "host": os.uname().nodename, **found.environment},
        command=f"flopwatch trial --spec {shlex.quote(str(folder / 'spec.json'))}",
        log_tail="" if is_whole else ending.log_tail,
        stacks=seen.stacks,
        earlier_attempts=tuple(job.get("earlier_attempts", ())),
    )


def with_finished_steps(result: TrialResult, folder: Path) -> TrialResult:
    """The same for a trial that was ended together with its supervisor, as Slurm does for memory or time: once its
    steps were measured they count. One that was lost or cancelled runs again anyway.
    """
    if result.outcome not in (*OUT_OF_MEMORY, "timeout") or result.measured.not_measured:
        return result
    found = assemble(folder, result.spec, HostPeak())
    if not found.has_all_steps:
        return result
    _, reason = after_its_steps(result.reason)
    progress = read_progress(folder)
    return replace(
        result,
        outcome="ok",
        reason=reason,
        phase=progress.phase,
        step=progress.step,
        measured=cut_short(found.measured, result.spec, progress, reason),
        environment={**result.environment, **found.environment},
    )


def _read_exception(folder: Path) -> dict[str, Any] | None:
    content = read_json(folder / EXCEPTION)
    try:
        read_record(_Raised, content)
        found: dict[str, Any] = clean_value(content)
    except BrokenRecordError:
        return None
    # The worker cuts its own; any other process of the trial may have written this file.
    return {name: cut(value, _LONGEST_TEXT) if isinstance(value, str) else value for name, value in found.items()}


def _evidence(ending: Ending, seen: Seen, outcome: Outcome) -> dict[str, Any]:
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
    if hint := memory_hint(ending, outcome):
        found["hint"] = hint
    found |= job_evidence(seen.job_end)
    if seen.would_not_die:
        found["would_not_die"] = seen.would_not_die
    return found


# How a trial of several processes ended: as the process that ended first, and said of which one it was. Pure.


def with_first_cause(ending: Ending, job: JobEnd) -> Ending:
    """The facts of the process that ended the others, in place of those of torchrun, which only reports them."""
    if job.first is None:
        return replace(ending, oom_kills=ending.oom_kills + job.oom_kills)
    status = job.first.status
    return replace(
        ending,
        exit_code=status if status is not None and status >= 0 else None,
        signal_number=-status if status is not None and status < 0 else None,
        exception=ending.exception if job.first.exception is not None else None,
        oom_kills=ending.oom_kills + job.oom_kills,
        has_finished=False,
    )


def of_job(ended: tuple[Outcome, str], job: JobEnd, ending: Ending) -> tuple[Outcome, str]:
    """The outcome with what only the nodes know."""
    outcome, reason = ended
    if ending.own_kill is not None:
        return ended
    if outcome == "ok":
        return outcome, f"{reason} ({_who(job.first)})" if job.first is not None else reason
    if job.first is not None:
        return outcome, f"{_who(job.first)}: {reason}"
    if job.is_mute:
        return outcome, f"torchrun on the first node: {reason}"
    if job.lost:
        return "lost", job.lost
    return (
        ("error", f"its processes could not be brought together: {first_line(job.error, 300)}") if job.error else ended
    )


def job_evidence(job: JobEnd) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if job.first is not None:
        found |= {"rank": job.first.rank, "rank_host": job.first.host}
    if job.lost_host:
        found["host"] = job.lost_host
    if job.error:
        found["torchrun"] = job.error
    return found


def _who(end: RankEnd) -> str:
    return f"rank {end.rank} on {end.host}"
