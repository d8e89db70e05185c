"""A wall around the host memory of a trial's whole process tree: a cgroup where we may make one, else a resource limit.

The limit itself is kept by the supervisor, which ends a trial whose tree holds more (tree_memory.py). The wall is for
what grows faster than it looks. With a cgroup the kernel kills and counts its kills, so the ending is certain. Without
one, allocations far beyond the limit fail inside each process. RLIMIT_DATA counts private writable memory whether it is
used or not (stacks of threads, what an allocator holds ready), so it stands well above the limit.
"""

import contextlib
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

_V1_ROOT = Path("/sys/fs/cgroup/memory")
_V2_ROOT = Path("/sys/fs/cgroup")
_LEAST_SLACK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Attributes:
    kind: `cgroup`, `rlimit` or `none`.
    join: Called in the child before it becomes the worker.
    folder: Of the cgroup.
    """

    kind: str
    join: Callable[[], None]
    folder: Path | None = None

    def oom_kills(self) -> int:
        """How many processes the kernel killed in it for want of memory."""
        return read_oom_kills(self.folder) if self.folder else 0

    def peak_bytes(self) -> int | None:
        """Most memory charged to it; None without a cgroup."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                return int((self.folder / name).read_text())  # type: ignore[operator]
        return None

    def close(self) -> None:
        if self.folder:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def limit_memory(limit_bytes: int | None, name: str) -> MemoryLimit:
    """The best limit this machine lets us set."""
    if limit_bytes is None:
        return MemoryLimit("none", lambda: None)
    for parent in _places():
        folder = parent / f"flopwatch-{os.getpid()}-{name}"
        if _make_group(folder, limit_bytes):
            return MemoryLimit("cgroup", partial(_join_group, folder), folder)
    wall = limit_bytes + max(limit_bytes // 2, _LEAST_SLACK_BYTES)
    return MemoryLimit("rlimit", lambda: resource.setrlimit(resource.RLIMIT_DATA, (wall, wall)))


def _join_group(folder: Path) -> None:
    (folder / "cgroup.procs").write_text("0")


def own_oom_kills() -> int:
    """Kills by the kernel in the group we run in (a container, a Slurm step), those of our children included."""
    return sum(read_oom_kills(folder) for folder in own_groups())


def read_oom_kills(folder: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            for line in (folder / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _make_group(folder: Path, limit_bytes: int) -> bool:
    try:
        folder.mkdir()
    except OSError:
        return False
    limits = ("memory.max", "memory.limit_in_bytes")
    file = next((folder / limit for limit in limits if (folder / limit).exists()), None)
    try:
        if file is None:
            raise OSError("the memory controller is not switched on here")
        file.write_text(str(limit_bytes))
        # Else the kernel swaps instead of saying no; not every kernel counts swap.
        for swap, value in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", limit_bytes)):
            with contextlib.suppress(OSError):
                (folder / swap).write_text(str(value))
    except OSError:
        folder.rmdir()
        return False
    return True


def group_places() -> list[Path]:
    """Where groups of trials may lie."""
    return _places()


def _places() -> list[Path]:
    """Where a group may be made: beside our own (version 2 forbids groups below one with processes), or below it."""
    return [place for own in own_groups() for place in ([own.parent, own] if own != _V2_ROOT else [own])]


def own_groups() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append(_V1_ROOT / path.lstrip("/"))
        elif not controllers and (_V2_ROOT / "cgroup.controllers").exists():
            found.append(_V2_ROOT / path.lstrip("/"))
    return [folder for folder in found if folder.is_dir()]


# How much memory this host can still give, so that a trial is stopped by its own limit and not by the kernel's.


_MEMINFO = Path("/proc/meminfo")
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

_MARGIN = 0.10
_LEAST_MARGIN_BYTES = 512 << 20


def available_bytes() -> int | None:
    """What new processes may take: of the machine, and of the groups (a container, a Slurm step) we are in."""
    return least_available(_MEMINFO, own_groups())


def least_available(meminfo: Path, groups: Sequence[Path]) -> int | None:
    """The least that is left in the machine or in any of the groups, their parents included; None when nobody says."""
    folders = {folder for group in groups for folder in (group, *group.parents)}
    found = [_of_machine(meminfo), *(_of_group(folder, *files) for folder in folders for files in _GROUP_FILES)]
    return min((size for size in found if size is not None), default=None)


def safe_limit_bytes(available: int) -> int:
    """The available memory less a margin, for what other processes take meanwhile.

    >>> safe_limit_bytes(20 << 30) / 2**30
    18.0
    """
    return max(1, available - max(round(_MARGIN * available), _LEAST_MARGIN_BYTES))


def _of_machine(meminfo: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_group(folder: Path, limit: str, used: str, droppable: str) -> int | None:
    """None without a limit ("max"). Old page cache counts as free: the kernel drops it when memory is asked for."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        taken = int((folder / used).read_text()) - int(statistics[droppable])
        return max(0, int((folder / limit).read_text()) - taken)
    return None
