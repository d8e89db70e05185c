"""A wall around the host memory of a trial's whole process tree: a cgroup where we may make one, else a resource limit.

The limit itself is kept by the supervisor, which ends a trial whose tree holds more (tree_memory.py). The wall is for
what grows faster than it looks. With a cgroup the kernel kills and counts its kills, so the ending is certain. Without
one, allocations far beyond the limit fail inside each process. RLIMIT_DATA counts private writable memory whether it is
used or not (stacks of threads, what an allocator holds ready), so it stands well above the limit.
"""

import contextlib
import os
import resource
from collections.abc import Callable
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
