"""Say how a trial ended, from what is known. Pure: facts in, one word and its reason out.

Order of evidence, strongest first: our own kill, the worker's own exception, the wait status, the kernel's count of
out-of-memory kills, patterns in the log. An exit code alone proves little: a SIGKILL may be ours, the kernel's or
anybody's.
"""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flopwatch.trial_records import Outcome

OwnKill = Literal["timeout", "hang", "cancelled"]

# Only what allocators print when they give up; "error" or "memory" alone prove nothing.
_LOG_PATTERNS: tuple[tuple[str, Outcome], ...] = (
    (r"torch\.OutOfMemoryError|torch\.cuda\.OutOfMemoryError|CUDA out of memory", "oom_device"),
    (r"CUDA error: out of memory|HIP out of memory|CUBLAS_STATUS_ALLOC_FAILED", "oom_device"),
    (r"DefaultCPUAllocator: (can't|not enough) .*memory|^MemoryError\b|exceeded memory limit", "oom_host"),
)


@dataclass(frozen=True, slots=True)
class Ending:
    """What a supervisor knows when its worker is gone.

    Attributes:
        own_kill: Why we killed it; None when we did not.
        own_kill_detail: In words.
        exit_code: Of the worker; None when a signal ended it.
        signal_number: The signal; None when it left by itself.
        has_finished: True when it said that it is done.
        is_command: A command says nothing, so exit code 0 is success.
        exception: `type`, `message`, `outcome` as the worker wrote them.
        oom_kills: Kills by the kernel for memory while it ran, in the trial's own group or in one it shares.
        has_own_group: False when a kill may have been another trial's.
        log_tail: The end of its log.
    """

    own_kill: OwnKill | None = None
    own_kill_detail: str = ""
    exit_code: int | None = None
    signal_number: int | None = None
    has_finished: bool = False
    is_command: bool = False
    exception: Mapping[str, Any] | None = None
    oom_kills: int = 0
    has_own_group: bool = True
    log_tail: str = ""


def classify(ending: Ending) -> tuple[Outcome, str]:
    """The outcome and one line for a person."""
    # A worker may have ended by itself just before our kill, and said so; of a command nobody knows.
    if ending.exit_code == 0 and (ending.has_finished or (ending.is_command and ending.own_kill is None)):
        killed = f"; {ending.oom_kills} of its processes were killed for memory" if ending.oom_kills else ""
        return "ok", f"ran to its end{killed}"
    if ending.own_kill is not None:
        return ending.own_kill, ending.own_kill_detail
    if ending.exception is not None:
        return ending.exception["outcome"], f"{ending.exception['type']}: {_first_line(ending.exception['message'])}"
    is_killed = ending.signal_number == signal.SIGKILL or ending.exit_code == 128 + signal.SIGKILL
    if ending.oom_kills and (is_killed or (ending.has_own_group and ending.signal_number is None)):
        return "oom_host", "the kernel killed it: its memory limit was reached"
    said = _outcome_in_log(ending.log_tail)
    if ending.signal_number is not None:
        return _by_signal(ending, said)
    if said is not None:
        return said, f"left with exit code {ending.exit_code}; its log tells of an allocation that failed"
    if ending.exit_code == 0:
        return "error", "left with exit code 0 before its end; does the trainer call sys.exit()?"
    return "error", f"left with exit code {ending.exit_code}"


def signal_name(number: int) -> str:
    """The signal's usual name.

    >>> signal_name(11)
    'SIGSEGV'
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _by_signal(ending: Ending, said: Outcome | None) -> tuple[Outcome, str]:
    number = ending.signal_number or 0
    name = signal_name(number)
    if number == signal.SIGABRT and said is not None:  # C++ code aborts after a bad_alloc nobody caught
        return said, f"ended by {name} after an allocation failed"
    if number == signal.SIGKILL:
        return "crash", "killed by SIGKILL from outside; the kernel counted no kill for memory in this group"
    return "crash", f"ended by {name}"


def _outcome_in_log(tail: str) -> Outcome | None:
    for pattern, outcome in _LOG_PATTERNS:
        if re.search(pattern, tail, re.MULTILINE):
            return outcome
    return None


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or [""])[0][:300]
