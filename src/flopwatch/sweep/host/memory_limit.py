"""A hard limit on the host memory of a trial's process tree, and how much memory this host has left.

The supervisor enforces the limit itself: it samples the tree and kills it above the limit (tree_memory.py). The hard
limit is for a tree that grows faster than that. In a cgroup, where we may create one, the kernel kills and counts its
kills, so the cause of the end is certain. Else a resource limit makes allocations far beyond the limit fail in each
process: RLIMIT_DATA counts private writable memory whether it is used or not (stacks of threads, reserves of
allocators), so it is set well above the limit.
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
        """How many of its processes the kernel killed for memory."""
        return read_oom_kills(self.folder) if self.folder else 0

    def peak_bytes(self) -> int | None:
        """Peak of the memory charged to the cgroup; None without one."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                return int((self.folder / name).read_text())  # type: ignore[operator]
        return None

    def close(self) -> None:
        if self.folder:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def limit_memory(limit_bytes: int | None, name: str) -> MemoryLimit:
    """Set the strictest limit that we may set on this machine."""
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
    """Kills by the kernel in the cgroups we run in (a container, a Slurm step), our children's included."""
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
            raise OSError("the memory controller is not enabled in this cgroup")
        file.write_text(str(limit_bytes))
        # Otherwise the kernel swaps instead of enforcing the limit. Not every kernel accounts for swap.
        for swap, value in (("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", limit_bytes)):
            with contextlib.suppress(OSError):
                (folder / swap).write_text(str(value))
    except OSError:
        folder.rmdir()
        return False
    return True


def group_places() -> list[Path]:
    """Where cgroups of trials may be."""
    return _places()


def _places() -> list[Path]:
    """Where a cgroup may be created: beside ours (version 2 forbids children of one with processes), or below it."""
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


_MEMINFO = Path("/proc/meminfo")
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

_MARGIN = 0.10
_LEAST_MARGIN_BYTES = 512 << 20


def available_bytes() -> int | None:
    """Memory that new processes can get, on the machine and in our cgroups (a container, a Slurm step)."""
    return least_available(_MEMINFO, own_groups())


def least_available(meminfo: Path, groups: Sequence[Path]) -> int | None:
    """The smallest of what the machine and each cgroup, with its parents, have left; None when unknown."""
    folders = {folder for group in groups for folder in (group, *group.parents)}
    found = [_of_machine(meminfo), *(_of_group(folder, *files) for folder in folders for files in _GROUP_FILES)]
    return min((size for size in found if size is not None), default=None)


def safe_limit_bytes(available: int) -> int:
    """The available memory minus a margin for other processes.

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
    """None without a limit ("max"). Inactive page cache counts as free: the kernel drops it on demand."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        taken = int((folder / used).read_text()) - int(statistics[droppable])
        return max(0, int((folder / limit).read_text()) - taken)
    return None
