"""Library versions, devices, the user's source files and the available memory of this host, found without torch.

Versions, devices and sources are hashed into a trial's content key, so that a trial runs again after they change.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import stat
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from flopwatch.clock import monotonic_seconds
from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.host.memory import own_groups
from flopwatch.version import __version__

_MEMINFO = Path("/proc/meminfo")
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

_MARGIN = 0.10  # share of the available memory that is left to other processes
_LEAST_MARGIN_BYTES = 512 << 20  # the margin is at least this large

OF_THIS_HOST = ("cpu", "gpus", "driver")
"""Keys of `machine()` whose values may differ between the host that submits a trial and the host that runs it."""

_PACKAGES = ("torch", "opacus", "transformers")
_SOURCES_LAST_SECONDS = 5.0
"""Source files are hashed again after this time, because a user may edit a trainer while the sweep runs."""
_LARGEST_SOURCE = 16 << 20
"""The digest of a larger file uses its size and modification time instead, because a command may name huge files."""


@cache
def host_facts() -> dict[str, Any]:
    name = _line(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    found: dict[str, Any] = {"cpu": f"{name}, {os.cpu_count()} threads"}
    if gpus := [_line(file, "Model") for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]:
        found["gpus"] = gpus
        with contextlib.suppress(OSError, IndexError):
            found["driver"] = Path("/proc/driver/nvidia/version").read_text().split("Module")[-1].split()[0]
    return found


def _line(file: Path, key: str) -> str:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(key)), "")


@cache
def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"flopwatch": __version__, "python": platform.python_version(), **host_facts()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def fingerprint(spec: TrialSpec, *, is_here: bool = True) -> dict[str, Any]:
    """Versions, devices, and digests of the user's files: trainer, model, batch function, config, files of a command.

    `is_here` is False if the trial may run on another host, so that this host's devices are left out.
    """
    names = (spec.trainer, spec.model, *filter(None, [spec.batch])) if spec.command is None else _words(spec.command)
    moment = int(monotonic_seconds() / _SOURCES_LAST_SECONDS)
    sources = {name: digest for name in names if (digest := _source_digest(name, moment))}
    host = {name: fact for name, fact in machine().items() if is_here or name not in OF_THIS_HOST}
    return {**host, **({"sources": sources} if sources else {})}


def _words(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError:
        return tuple(command.split())


@lru_cache(maxsize=1024)
def _source_digest(name: str, moment: int) -> str | None:
    """The digest of a file, or of the sources of `module:Class`; None for an installed package or a missing file."""
    module, colon, _ = name.partition(":")
    try:
        files = _sources(module) if colon else [Path(name) / "config.json" if Path(name).is_dir() else Path(name)]
        content = b"".join(map(_content, files))
    except (OSError, ValueError):
        return None
    return hashlib.sha256(content).hexdigest()[:16] if content else None


def _content(file: Path) -> bytes:
    """The content of a regular file. Others are not opened, because that may block; files of /proc have no size."""
    facts = file.stat()
    if not stat.S_ISREG(facts.st_mode) or not facts.st_size:
        return b""
    if facts.st_size > _LARGEST_SOURCE:
        return f"{facts.st_size} bytes of {facts.st_mtime_ns}".encode()
    return file.read_bytes()


def _sources(module: str) -> list[Path]:
    """The module's source files, if it is in the working directory, its folder `src`, or a folder of PYTHONPATH."""
    for root in ("", "src", *os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        place = Path(root) / module.replace(".", "/")
        if place.with_suffix(".py").is_file():
            return [place.with_suffix(".py")]
        if (place / "__init__.py").is_file():
            return sorted(place.rglob("*.py"))
    return []


def available_bytes() -> int | None:
    """Memory that new processes can get, limited by the machine and by this process's cgroups; None if unknown."""
    return least_available(_MEMINFO, own_groups())


def least_available(meminfo: Path, groups: Sequence[Path]) -> int | None:
    """The least of the memory left in the machine, in these cgroups and in their parents; None if all are unknown."""
    folders = {folder for group in groups for folder in (group, *group.parents)}
    found = [_of_group(folder, *files) for folder in folders for files in _GROUP_FILES]
    words = _line(meminfo, "MemAvailable").split()  # such as `1024 kB`
    if words and words[0].isdecimal():
        found.append(int(words[0]) * 1024)
    return min((size for size in found if size is not None), default=None)


def safe_limit_bytes(available: int) -> int:
    """The available memory minus a margin for other processes.

    >>> safe_limit_bytes(20 << 30) / 2**30
    18.0
    """
    return max(1, available - max(round(_MARGIN * available), _LEAST_MARGIN_BYTES))


def _of_group(folder: Path, limit: str, used: str, droppable: str) -> int | None:
    """Memory left in a cgroup, including inactive page cache, which the kernel can drop; None without a limit."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        taken = int((folder / used).read_text()) - int(statistics[droppable])
        return max(0, int((folder / limit).read_text()) - taken)
    return None
