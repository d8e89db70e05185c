"""How the processes of a trial ended that torchrun started. Standard library only.

Torchrun's process has written their exit statuses (`worker/torchrun.py`), and each process its own exception.
"""

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flopwatch.decode import read_or_none
from flopwatch.files import read_json, read_object
from flopwatch.records.trial_files import RANKS, exception_file


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of one rank."""

    rank: int
    status: int  # exit code, or the negative number of the signal that ended it
    exception: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of a trial of several processes."""

    first: RankEnd | None = None  # the rank that failed first
    error: str = ""  # torchrun's, if the ranks could not connect to each other
    is_mute: bool = False  # torchrun ended without a report, so that only its exit status is known


@dataclass(frozen=True, slots=True)
class _Report:
    """The content of `ranks.json`: the exit statuses of the ranks that failed, by rank, and torchrun's own error."""

    statuses: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


def job_end(trial_dir: Path, processes: int) -> JobEnd:
    written = read_or_none(_Report, read_json(trial_dir / RANKS))
    report = written or _Report()
    ends = [
        RankEnd(rank, report.statuses.get(str(rank), 0), read_object(trial_dir / exception_file(rank)) or None)
        for rank in range(processes)
    ]
    return JobEnd(first_cause(ends), report.error, is_mute=written is None)


def first_cause(ends: Iterable[RankEnd]) -> RankEnd | None:
    """Return the rank that failed first; None if none failed.

    Ranks that torchrun terminated, or that only lost their connection, count only if no other rank failed.

    >>> follows = {"type": "RuntimeError", "lost_peer": True, "unix_time": 1.0}
    >>> first_cause([RankEnd(0, 1, follows), RankEnd(1, -9), RankEnd(2, -15)]).rank
    1
    """
    failed = [end for end in ends if end.status != 0 or end.exception is not None]
    return min(failed, key=_order, default=None)


_OWN_EXCEPTION, _SIGNAL, _EXIT_CODE, _ABORT, _LOST_PEER, _TERMINATED = range(6)


def _order(end: RankEnd) -> tuple[int, float, int]:
    if end.exception is not None:
        kind = _LOST_PEER if end.exception.get("lost_peer") else _OWN_EXCEPTION
        raised = end.exception.get("unix_time")
        return kind, raised if isinstance(raised, float) else 0.0, end.rank
    if end.status == -signal.SIGTERM:
        return _TERMINATED, 0.0, end.rank
    if end.status == -signal.SIGABRT:  # NCCL's watchdog aborts a process that lost another rank
        return _ABORT, 0.0, end.rank
    return (_SIGNAL if end.status < 0 else _EXIT_CODE), 0.0, end.rank
