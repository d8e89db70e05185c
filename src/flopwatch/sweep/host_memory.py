"""How much memory this host can still give, so that a trial is stopped by its own limit and not by the kernel's."""

import contextlib
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)

_MARGIN = 0.10
_LEAST_MARGIN_BYTES = 512 << 20


def available_bytes() -> int | None:
    """What new processes may take without another having to give: of the machine, or of the container we are in."""
    found = [size for size in (_of_machine(), *(_of_container(*files) for files in _GROUP_FILES)) if size is not None]
    return min(found, default=None)


def safe_limit_bytes(available: int) -> int:
    """The available memory less a margin, for what other processes take meanwhile.

    >>> safe_limit_bytes(20 << 30) / 2**30
    18.0
    """
    return max(1, available - max(round(_MARGIN * available), _LEAST_MARGIN_BYTES))


def _of_machine() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _of_container(limit_file: Path, used_file: Path) -> int | None:
    """Inside a container the group at the root is the container's own. Cache it could drop counts as used here."""
    with contextlib.suppress(OSError, ValueError):
        return max(0, int(limit_file.read_text()) - int(used_file.read_text()))
    return None
