"""Say how a trial ended, from what is known. Pure: facts in, one word and its reason out.

Order of evidence, strongest first: our own kill, what the trial itself said (the exception of our worker, the outcome
in a command's `metrics.json`), the kernel's count of out-of-memory kills, the memory seen, the wait status. An exit
code alone proves little: a SIGKILL may be ours, the kernel's or anybody's. Words in a log prove nothing, and are shown.
"""

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flopwatch.records.reading import first_line
from flopwatch.records.trial import OUT_OF_MEMORY, Outcome
from flopwatch.sweep.host.tree_memory import HostPeak

OwnKill = Literal["timeout", "hang", "cancelled", "oom_host"]

# What allocators print when they give up; "error" or "memory" alone say nothing. A hint for a person, never a reason.
_MEMORY_WORDS = re.compile(
    r"OutOfMemoryError|out of memory|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc|Cannot allocate memory|"
    r"DefaultCPUAllocator: (?:can't|not enough) .*memory|\bMemoryError\b|exceeded memory limit",
    re.IGNORECASE,
)
_HINT_CHARACTERS = 200

NEAR_LIMIT = 0.95
"""A process that dies by SIGKILL or SIGABRT with this much of its limit in use died of it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a supervisor knows when its worker is gone.

    Attributes:
        own_kill: Why we killed it; None when we did not.
        own_kill_detail: In words.
        exit_code: Of the worker; None when a signal ended it.
        signal_number: The signal; None when it left by itself.
        has_finished: True when it said that it is done.
        has_finished_steps: True when all its steps were measured, whatever came then.
        is_command: A command says nothing, so exit code 0 is success.
        exception: `type`, `message`, `outcome` as the worker wrote them.
        reported: The outcome a command wrote down itself.
        oom_kills: Kills by the kernel for memory while it ran, in the trial's own group or in one it shares.
        has_own_group: False when a kill may have been another trial's.
        held_bytes: Host memory that it surely held at some moment of its life; None when not known.
        limit_bytes: What it was allowed; None when it had no limit.
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


def classify(ending: Ending) -> tuple[Outcome, str]:
    """The outcome and one line for a person.

    A trial whose steps are measured is `ok`: what comes after them is flopwatch's own, and costs it nothing. Only a
    cancelled one is left as it is, since it will run again.
    """
    outcome, reason = _without_steps(ending)
    if outcome not in ("ok", "cancelled") and ending.has_finished_steps:
        return after_its_steps(reason)
    return outcome, reason


def after_its_steps(reason: str) -> tuple[Outcome, str]:
    """Of a trial that ended so when its steps were measured."""
    return "ok", f"its steps are measured; it ended after them: {reason}"


def _without_steps(ending: Ending) -> tuple[Outcome, str]:
    """How it ended, as if nothing was known of its steps."""
    # A worker may have ended by itself just before our kill, and said so; of a command nobody knows.
    if ending.exit_code == 0 and ending.has_finished:
        killed = f"; {ending.oom_kills} of its processes were killed for memory" if ending.oom_kills else ""
        return "ok", f"ran to its end{killed}"
    if ending.own_kill is not None:
        return ending.own_kill, ending.own_kill_detail
    if ending.reported is not None:
        return ending.reported, "it said so itself, in metrics.json"
    if ending.exception is not None and ending.exception["outcome"] != "error":
        return ending.exception["outcome"], _exception_text(ending.exception)
    return _by_memory(ending) or _by_status(ending)


def _by_memory(ending: Ending) -> tuple[Outcome, str] | None:
    """The kernel's count first, then what was seen."""
    is_killed = ending.signal_number == signal.SIGKILL or ending.exit_code == 128 + signal.SIGKILL
    if ending.oom_kills and (is_killed or (ending.has_own_group and ending.signal_number is None)):
        whom = "it" if is_killed else f"{ending.oom_kills} of its processes"
        return "oom_host", f"the kernel killed {whom}: its memory limit was reached"
    if ending.limit_bytes is None or ending.held_bytes is None or ending.exception is not None:
        return None
    seen = f"it held {_mebibytes(ending.held_bytes)} MiB of the {_mebibytes(ending.limit_bytes)} MiB it may have"
    is_aborted = ending.signal_number == signal.SIGABRT  # as C++ does after a bad_alloc that nobody caught
    if (is_killed or is_aborted) and ending.held_bytes > NEAR_LIMIT * ending.limit_bytes:
        return "oom_host", f"ended by {'SIGKILL' if is_killed else 'SIGABRT'} while {seen}"
    if ending.signal_number is None and ending.held_bytes > ending.limit_bytes:
        return "oom_host", f"{seen}; it ended before it could be stopped"
    return None


def _by_status(ending: Ending) -> tuple[Outcome, str]:
    if ending.exception is not None:
        return "error", _exception_text(ending.exception)
    if ending.signal_number == signal.SIGKILL:
        return "crash", "killed by SIGKILL from outside; the kernel counted no kill for memory in this group"
    if ending.signal_number is not None:
        return "crash", f"ended by {signal_name(ending.signal_number)}"
    if ending.exit_code == 0 and ending.is_command:
        return "ok", "ran to its end"
    if ending.exit_code == 0:
        return "error", "left with exit code 0 before its end; does the trainer call sys.exit()?"
    return "error", f"left with exit code {ending.exit_code}"


def memory_hint(ending: Ending, outcome: Outcome) -> str | None:
    """The log's last line that tells of memory, for an ending that is not explained by it; None when there is none."""
    if outcome in ("ok", "cancelled", *OUT_OF_MEMORY):
        return None
    lines = [line for line in ending.log_tail.splitlines() if _MEMORY_WORDS.search(line)]
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


# Which of the processes of a trial ended it: the others only lost their peer, or were ended by torchrun. Pure.


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one process of several ended.

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
    """How the processes ended together.

    Attributes:
        first: The one whose end ended the others; None when all went well, or when only torchrun itself speaks.
        lost: Why a node is not there any more; empty otherwise.
        lost_host: That node.
        error: What torchrun said when the processes could not meet; empty otherwise.
        oom_kills: Kills for memory on the other nodes.
        host_peak: Most host memory on one of the other nodes.
        is_mute: Torchrun on the first node ended without a word; its status, which the supervisor sees, says how.
    """

    first: RankEnd | None = None
    lost: str = ""
    lost_host: str = ""
    error: str = ""
    oom_kills: int = 0
    is_mute: bool = False
    host_peak: HostPeak = field(default_factory=HostPeak)


def exception_file(rank: int) -> str:
    """What a process of several writes when it raises; the first cause's becomes the trial's `exception.json`."""
    return f"exception-{rank}.json"


def first_cause(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The one that did not follow another: by what it says, then by time. None when none has failed.

    >>> follows = {"type": "RuntimeError", "lost_peer": True, "unix_time": 1.0}
    >>> first_cause([RankEnd(0, "a", 1, follows), RankEnd(1, "a", -9), RankEnd(2, "a", -15)]).rank
    1
    """
    failed = [end for end in ends if end.status != 0 or end.exception is not None]
    return min(failed, key=_order, default=None)


def is_certain(end: RankEnd) -> bool:
    """Whether nothing that another process says could come before it."""
    return _order(end)[0] < _LOST_PEER


_OWN_EXCEPTION, _SIGNAL, _EXIT_CODE, _ABORT, _LOST_PEER, _TOLD_TO_STOP = range(6)


def _order(end: RankEnd) -> tuple[int, float, int]:
    if end.exception is not None:
        kind = _LOST_PEER if end.exception.get("lost_peer") else _OWN_EXCEPTION
        return kind, float(end.exception.get("unix_time") or 0.0), end.rank
    if end.status == -signal.SIGTERM:
        return _TOLD_TO_STOP, 0.0, end.rank
    if end.status == -signal.SIGABRT:  # NCCL's watchdog ends a process so when its peer is gone
        return _ABORT, 0.0, end.rank
    return (_SIGNAL if end.status is not None and end.status < 0 else _EXIT_CODE), 0.0, end.rank
