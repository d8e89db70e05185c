"""Builds a trial's result from how its worker exited and from the files it left."""

import os
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flopwatch.records.reading import BrokenRecordError, clean_value, cut, first_line, read_json, read_record, tail
from flopwatch.records.trial import OUT_OF_MEMORY, Outcome, TrialJob, TrialResult, TrialSpec
from flopwatch.records.trial_files import EXCEPTION, SPEC, log_file, trial_folder
from flopwatch.sweep.claims import Progress, read_progress
from flopwatch.sweep.host.environment import host_facts
from flopwatch.sweep.host.tree_memory import HostPeak
from flopwatch.sweep.supervisor.classify import (
    ExitFacts,
    JobEnd,
    OwnKill,
    RankEnd,
    classify,
    memory_hint,
    ok_after_steps,
    signal_name,
)
from flopwatch.sweep.supervisor.measurements import Collected, collect_measurements, with_missing_phases

_LONGEST_TEXT = 20_000


@dataclass(frozen=True, slots=True)
class _ExceptionFile:
    """The fields `exception.json` must have to be used."""

    type: str
    message: str
    outcome: Literal["error", "invalid", "unsupported", "oom_device", "oom_host"]


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker's process ended, as its supervisor saw it.

    Attributes:
        pid: The worker's.
        status: Its exit code, or the negative of the signal that ended it; None if it could not be killed.
        own_kill: Why the supervisor killed it; None when it did not.
        own_kill_detail: The same in words.
        stacks: The stacks of its threads before the kill.
        host_peak: Peak host memory of the process tree: of a command over its life, of a worker until its last step.
        lower_bound_bytes: What a single process of it held at least at its peak, without pages of files.
        oom_kills: Processes killed by the kernel for memory.
        memory_limit: How host memory was limited, with the peaks sampled by us and charged by the kernel.
        unkillable_pids: Processes that survived SIGKILL, stuck in the kernel.
        unix_time: When it began.
        seconds: How long it ran.
        job_end: How its processes ended, where it has several.
    """

    pid: int
    status: int | None
    own_kill: OwnKill | None
    own_kill_detail: str
    stacks: str
    host_peak: HostPeak
    lower_bound_bytes: int
    oom_kills: int
    memory_limit: dict[str, Any]
    unkillable_pids: list[int]
    unix_time: float
    seconds: float
    job_end: JobEnd = field(default_factory=JobEnd)


def build_result(sweep: Path, name: str, job: TrialJob, worker_exit: WorkerExit) -> TrialResult:
    folder, spec = trial_folder(sweep, name), job.spec
    collected = collect_measurements(folder, spec, worker_exit.host_peak)
    facts = _exit_facts(sweep, name, spec, worker_exit, collected)
    outcome, reason = _with_node_failure(classify(facts), worker_exit.job_end, facts)
    is_complete = outcome == "ok" and (collected.is_done or facts.is_command)
    progress = Progress("done") if is_complete else read_progress(folder)
    measured = collected.measured
    if outcome == "ok" and not is_complete:
        measured = with_missing_phases(measured, spec, progress, reason)
    return TrialResult(
        name=name,
        key=job.key,
        spec=spec,
        outcome=outcome,
        reason=reason,
        evidence=_evidence(facts, worker_exit, outcome),
        phase=progress.phase,
        step=progress.step,
        measured=measured,
        unix_time=worker_exit.unix_time,
        seconds=worker_exit.seconds,
        environment={**job.environment, **host_facts(), "host": os.uname().nodename, **collected.environment},
        command=f"flopwatch trial --spec {shlex.quote(str(folder / SPEC))}",
        log_tail="" if is_complete else facts.log_tail,
        stacks=worker_exit.stacks,
        earlier_attempts=job.earlier_attempts,
    )


def with_finished_steps(result: TrialResult, folder: Path) -> TrialResult:
    """Turn a failure into `ok` when the trial's steps were measured before its supervisor was killed with it.

    Slurm kills supervisor and worker together for memory or time, so the supervisor could not write this itself. A
    trial that was lost or cancelled stays so: it runs again.
    """
    if result.outcome not in (*OUT_OF_MEMORY, "timeout") or result.measured.not_measured:
        return result
    collected = collect_measurements(folder, result.spec, HostPeak())
    if not collected.has_all_steps:
        return result
    _, reason = ok_after_steps(result.reason)
    progress = read_progress(folder)
    return replace(
        result,
        outcome="ok",
        reason=reason,
        phase=progress.phase,
        step=progress.step,
        measured=with_missing_phases(collected.measured, result.spec, progress, reason),
        environment={**result.environment, **collected.environment},
    )


def _exit_facts(sweep: Path, name: str, spec: TrialSpec, worker_exit: WorkerExit, collected: Collected) -> ExitFacts:
    status = worker_exit.status
    facts = ExitFacts(
        own_kill=worker_exit.own_kill,
        own_kill_detail=worker_exit.own_kill_detail,
        exit_code=status if status is not None and status >= 0 else None,
        signal_number=-status if status is not None and status < 0 else None,
        has_finished=collected.is_done,
        has_finished_steps=collected.has_all_steps,
        is_command=spec.trainer == "command",
        exception=_read_exception(trial_folder(sweep, name)),
        reported=collected.reported_outcome,
        oom_kills=worker_exit.oom_kills,
        has_own_group=worker_exit.memory_limit.get("by") == "cgroup",
        held_bytes=worker_exit.lower_bound_bytes or None,
        limit_bytes=spec.limits.memory_bytes,
        log_tail=tail(log_file(sweep, name)),
    )
    return _of_first_failure(facts, worker_exit.job_end)


def _of_first_failure(facts: ExitFacts, job: JobEnd) -> ExitFacts:
    """The facts of the rank that failed first, in place of those of torchrun, which only reports its failure."""
    oom_kills = facts.oom_kills + job.oom_kills
    if job.first is None:
        return replace(facts, oom_kills=oom_kills)
    status = job.first.status
    return replace(
        facts,
        exit_code=status if status is not None and status >= 0 else None,
        signal_number=-status if status is not None and status < 0 else None,
        exception=facts.exception if job.first.exception is not None else None,
        oom_kills=oom_kills,
        has_finished=False,
    )


def _with_node_failure(ended: tuple[Outcome, str], job: JobEnd, facts: ExitFacts) -> tuple[Outcome, str]:
    """The outcome with what only the nodes know: which rank failed, or that a node was lost."""
    outcome, reason = ended
    if facts.own_kill is not None:
        return ended
    if outcome == "ok":
        return outcome, f"{reason} ({_rank_text(job.first)})" if job.first is not None else reason
    if job.first is not None:
        return outcome, f"{_rank_text(job.first)}: {reason}"
    if job.is_mute:
        return outcome, f"torchrun on the first node: {reason}"
    if job.lost:
        return "lost", job.lost
    if job.error:
        return "error", f"its processes could not be connected: {first_line(job.error, 300)}"
    return ended


def _rank_text(end: RankEnd) -> str:
    return f"rank {end.rank} on {end.host}"


def _read_exception(folder: Path) -> dict[str, Any] | None:
    content = read_json(folder / EXCEPTION)
    try:
        read_record(_ExceptionFile, content)
        found: dict[str, Any] = clean_value(content)
    except BrokenRecordError:
        return None
    # Our worker cuts its texts, but any other process of the trial may have written this file.
    return {name: cut(value, _LONGEST_TEXT) if isinstance(value, str) else value for name, value in found.items()}


def _evidence(facts: ExitFacts, worker_exit: WorkerExit, outcome: Outcome) -> dict[str, Any]:
    job = worker_exit.job_end
    found = {
        "pid": worker_exit.pid,
        "killed_by": "flopwatch" if facts.own_kill is not None else None,
        "exit_code": facts.exit_code,
        "signal": signal_name(facts.signal_number) if facts.signal_number is not None else None,
        "exception": dict(facts.exception) if facts.exception is not None else None,
        "oom_kills": facts.oom_kills or None,
        "memory_limit": worker_exit.memory_limit or None,
        "hint": memory_hint(facts, outcome),
        "rank": job.first.rank if job.first is not None else None,
        "rank_host": job.first.host if job.first is not None else None,
        "host": job.lost_host or None,
        "torchrun": job.error or None,
        "would_not_die": worker_exit.unkillable_pids or None,
    }
    return {name: value for name, value in found.items() if value is not None}
