"""Which of the processes of a trial ended it: the others only lost their peer, or were ended by torchrun. Pure."""

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flopwatch.sweep.tree_memory import HostPeak


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
