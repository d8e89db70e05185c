"""How much memory this host can still give, so that a trial is stopped by its own limit and not by the kernel's."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from flopwatch.sweep.memory_limit import own_groups

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
