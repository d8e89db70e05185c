"""Decides how a trial ended. Pure: facts in; outcome and reason out. Standard library only: supervisors use it.

Order of evidence, strongest first: a kill by the supervisor, what the trial itself reported (the worker's exception,
the outcome in a command's `metrics.json`), the kernel's count of out-of-memory kills, the memory sampled, the wait
status. An exit code alone proves little: a SIGKILL may come from us, the kernel or another user. Words in a log prove
nothing; they are shown as a hint.
"""

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flopwatch.records.reading import first_line
from flopwatch.records.trial import OUT_OF_MEMORY, Outcome
from flopwatch.sweep.host.memory import HostPeak

OwnKill = Literal["timeout", "hang", "cancelled", "oom_host"]

# What allocators print when an allocation fails. "error" or "memory" alone would match too much.
_MEMORY_WORDS = re.compile(
    r"OutOfMemoryError|out of memory|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc|Cannot allocate memory|"
    r"DefaultCPUAllocator: (?:can't|not enough) .*memory|\bMemoryError\b|exceeded memory limit",
    re.IGNORECASE,
)
_HINT_CHARACTERS = 200  # one line of a terminal or two

NEAR_LIMIT = 0.95
"""A process killed by SIGKILL or SIGABRT with this share of its limit in use is taken for out of memory."""


@dataclass(frozen=True, slots=True)
class ExitFacts:
    """What is known about the end of a trial's worker.

    Attributes:
        own_kill: Why the supervisor killed it; None when it did not.
        own_kill_detail: The same in words.
        exit_code: The worker's; None when a signal ended it.
        signal_number: The signal; None when it exited by itself.
        has_finished: True when the worker wrote that it is done.
        has_finished_steps: True when all its steps were measured, whatever happened after them.
        is_command: True for a command, which writes no such note: exit code 0 is success.
        exception: `type`, `message`, `outcome` as the worker wrote them.
        reported: The outcome a command wrote to `metrics.json`.
        oom_kills: Processes the kernel killed for memory while it ran, in the trial's own cgroup or in a shared one.
        has_own_group: False when a kill may have hit another trial.
        held_bytes: Lower bound of its peak host memory; None when unknown.
        limit_bytes: Its limit of host memory; None without one.
        log_tail: The end of its log.
    """

    own_kill: OwnKill | None = None
    own_kill_detail: str = ""
    exit_code: int | None = None
    signal_number: int | None = None
    has_finished: bool = False
    has_finished_steps: bool = False
    is_command: bool = False
    exception: Mapping[str, Any] | None = None
    reported: Outcome | None = None
    oom_kills: int = 0
    has_own_group: bool = True
    held_bytes: int | None = None
    limit_bytes: int | None = None
    log_tail: str = ""


def classify(facts: ExitFacts) -> tuple[Outcome, str]:
    """The outcome, and the reason in one line.

    A trial whose steps are measured is `ok` even if it failed afterwards: the phases after the steps are flopwatch's
    own work. Only `cancelled` stays, because the trial will run again.
    """
    outcome, reason = _ignoring_steps(facts)
    if outcome not in ("ok", "cancelled") and facts.has_finished_steps:
        return ok_after_steps(reason)
    return outcome, reason


def ok_after_steps(reason: str) -> tuple[Outcome, str]:
    """The outcome of a trial that failed for this reason after its steps were measured."""
    return "ok", f"its steps are measured; it ended after them: {reason}"


def _ignoring_steps(facts: ExitFacts) -> tuple[Outcome, str]:
    # A worker may have finished just before our kill and noted it. A command leaves no note, so the kill counts.
    if facts.exit_code == 0 and facts.has_finished:
        killed = f"; {facts.oom_kills} of its processes were killed for memory" if facts.oom_kills else ""
        return "ok", f"ran to its end{killed}"
    if facts.own_kill is not None:
        return facts.own_kill, facts.own_kill_detail
    if facts.reported is not None:
        return facts.reported, "reported by the command in metrics.json"
    if facts.exception is not None and facts.exception["outcome"] != "error":
        return facts.exception["outcome"], _exception_text(facts.exception)
    return _by_memory(facts) or _by_status(facts)


def _by_memory(facts: ExitFacts) -> tuple[Outcome, str] | None:
    is_killed = facts.signal_number == signal.SIGKILL or facts.exit_code == 128 + signal.SIGKILL
    if facts.oom_kills and (is_killed or (facts.has_own_group and facts.signal_number is None)):
        whom = "it" if is_killed else f"{facts.oom_kills} of its processes"
        return "oom_host", f"the kernel killed {whom}: its memory limit was reached"
    if facts.limit_bytes is None or facts.held_bytes is None or facts.exception is not None:
        return None
    held = f"it held {_mebibytes(facts.held_bytes)} MiB, its limit is {_mebibytes(facts.limit_bytes)} MiB"
    is_aborted = facts.signal_number == signal.SIGABRT  # as C++ does after an uncaught bad_alloc
    if (is_killed or is_aborted) and facts.held_bytes > NEAR_LIMIT * facts.limit_bytes:
        return "oom_host", f"ended by {'SIGKILL' if is_killed else 'SIGABRT'} while {held}"
    if facts.signal_number is None and facts.held_bytes > facts.limit_bytes:
        return "oom_host", f"{held}; it ended before it could be stopped"
    return None


def _by_status(facts: ExitFacts) -> tuple[Outcome, str]:
    if facts.exception is not None:
        return "error", _exception_text(facts.exception)
    if facts.signal_number == signal.SIGKILL:
        return "crash", "killed by SIGKILL from outside; the kernel counted no kill for memory in this group"
    if facts.signal_number is not None:
        return "crash", f"ended by {signal_name(facts.signal_number)}"
    if facts.exit_code == 0 and facts.is_command:
        return "ok", "ran to its end"
    if facts.exit_code == 0:
        return "error", "left with exit code 0 before its end; does the trainer call sys.exit()?"
    return "error", f"left with exit code {facts.exit_code}"


def memory_hint(facts: ExitFacts, outcome: Outcome) -> str | None:
    """The last log line about memory, for an outcome that memory does not explain yet; None when there is none."""
    if outcome in ("ok", "cancelled", *OUT_OF_MEMORY):
        return None
    lines = [line for line in facts.log_tail.splitlines() if _MEMORY_WORDS.search(line)]
    said = lines[-1].strip()[:_HINT_CHARACTERS] if lines else ""
    return "".join(letter if letter.isprintable() else " " for letter in said) or None


def signal_name(number: int) -> str:
    """The signal's usual name.

    >>> signal_name(11)
    'SIGSEGV'
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exception_text(exception: Mapping[str, Any]) -> str:
    return f"{exception['type']}: {first_line(exception['message'], 300)}"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f}"


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: Its number in the trial.
        host: Where it ran.
        status: Its exit code, or the negative of the signal that ended it; None when torchrun could not start it.
        exception: What it wrote: `type`, `message`, `outcome`, `unix_time`, `lost_peer`.
    """

    rank: int
    host: str
    status: int | None
    exception: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a trial of several processes ended.

    Attributes:
        first: The rank that failed first; None when none failed, or when only torchrun itself reported an error.
        lost: Why a node is gone; empty otherwise.
        lost_host: That node.
        error: Torchrun's error when the ranks could not connect; empty otherwise.
        oom_kills: Processes killed for memory on nodes other than the first.
        is_mute: Torchrun on the first node ended without a report; the supervisor sees its exit status.
        host_peak: Largest peak of host memory on nodes other than the first.
    """

    first: RankEnd | None = None
    lost: str = ""
    lost_host: str = ""
    error: str = ""
    oom_kills: int = 0
    is_mute: bool = False
    host_peak: HostPeak = field(default_factory=HostPeak)


def first_cause(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The rank that failed first; the others only lost their peer or were ended by torchrun. None if none failed.

    >>> follows = {"type": "RuntimeError", "lost_peer": True, "unix_time": 1.0}
    >>> first_cause([RankEnd(0, "a", 1, follows), RankEnd(1, "a", -9), RankEnd(2, "a", -15)]).rank
    1
    """
    failed = [end for end in ends if end.status != 0 or end.exception is not None]
    return min(failed, key=_order, default=None)


def is_certain(end: RankEnd) -> bool:
    """Whether no report of another rank could still turn out to be the first failure."""
    return _order(end)[0] < _LOST_PEER


_OWN_EXCEPTION, _SIGNAL, _EXIT_CODE, _ABORT, _LOST_PEER, _TERMINATED = range(6)


def _order(end: RankEnd) -> tuple[int, float, int]:
    if end.exception is not None:
        kind = _LOST_PEER if end.exception.get("lost_peer") else _OWN_EXCEPTION
        return kind, float(end.exception.get("unix_time") or 0.0), end.rank
    if end.status == -signal.SIGTERM:
        return _TERMINATED, 0.0, end.rank
    if end.status == -signal.SIGABRT:  # NCCL's watchdog aborts a process whose peer is gone
        return _ABORT, 0.0, end.rank
    return (_SIGNAL if end.status is not None and end.status < 0 else _EXIT_CODE), 0.0, end.rank


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
