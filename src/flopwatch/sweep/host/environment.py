"""What a trial runs on, found without loading torch: versions, devices, sources, and the memory this host has left.

Versions, devices and sources are part of a trial's identity, so that an upgrade measures again.

Supervisors import it to record where a trial ran, so slow modules are imported in the functions that need them:
hashlib, platform and importlib.metadata together take 30 ms.
"""

import contextlib
import os
import shlex
import stat
import subprocess
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from flopwatch.clock import monotonic_seconds
from flopwatch.records.reading import UnreadableError, opened_regular
from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.host.memory import own_groups
from flopwatch.version import __version__

_MEMINFO = Path("/proc/meminfo")
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

_MARGIN = 0.10  # share of the available memory left to other processes
_LEAST_MARGIN_BYTES = 512 << 20  # and no less than this

OF_THIS_HOST = ("cpu", "gpus", "driver")
"""Keys of the facts that differ between the host that submits a trial and the one that runs it."""

_PACKAGES = ("torch", "opacus", "transformers")
_SOURCES_LAST_SECONDS = 5.0
"""Sources are read again after this time: a user may edit their trainer while the sweep runs."""
_LARGEST_SOURCE = 16 << 20
"""A command may name gigabytes of data. Of a larger file, size and time stand for the content."""

_NO_SOURCES = ("/proc/", "/sys/")
"""Files of the kernel claim to be regular, but change by themselves and may block for ever."""


@cache
def host_facts() -> dict[str, Any]:
    """`cpu`, and `gpus` and `driver` on a host with NVIDIA GPUs."""
    found: dict[str, Any] = {"cpu": _cpu()}
    gpus = [_line(file, "Model") for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    if gpus:
        found["gpus"] = gpus
        with contextlib.suppress(OSError, IndexError):
            found["driver"] = Path("/proc/driver/nvidia/version").read_text().split("Module")[-1].split()[0]
    return found


def _cpu() -> str:
    name = _line(Path("/proc/cpuinfo"), "model name")
    if not name:
        import platform

        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} threads"


def _line(file: Path, key: str) -> str:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(key)), "")


@cache
def machine() -> dict[str, Any]:
    """Versions and devices of this host."""
    import platform
    from importlib import metadata

    found: dict[str, Any] = {"flopwatch": __version__, "python": platform.python_version(), **host_facts()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def fingerprint(spec: TrialSpec, *, is_here: bool = True) -> dict[str, Any]:
    """Versions, devices, and digests of the user's code: trainer, model, batch, config file, a command's files.

    Args:
        spec: The trial.
        is_here: False when the trial may run on another host; then this host's devices are left out.
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


@cache
def git_state(folder: str) -> str | None:
    """Commit of the working directory, with `+` when files were changed since; None outside of a repository."""
    try:
        done = subprocess.run(
            ["git", "-C", folder, "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@lru_cache(maxsize=1024)
def _source_digest(name: str, moment: int) -> str | None:
    """Digest of the source behind `module:Class`, or of a file; None for installed packages and other words."""
    import hashlib

    module, colon, _ = name.partition(":")
    try:
        files = _sources(module) if colon else [Path(name) / "config.json" if Path(name).is_dir() else Path(name)]
        content = b"".join(map(_content, files))
    except (OSError, ValueError, UnreadableError):
        return None
    return hashlib.sha256(content).hexdigest()[:16] if content else None


def _content(file: Path) -> bytes:
    """Content of a regular file. Devices, FIFOs and sockets are not opened, because that may block."""
    if os.path.realpath(file).startswith(_NO_SOURCES) or not stat.S_ISREG(file.stat().st_mode):
        return b""
    with opened_regular(file) as stream:
        facts = os.fstat(stream.fileno())
        if facts.st_size > _LARGEST_SOURCE:
            return f"{facts.st_size} bytes of {facts.st_mtime_ns}".encode()
        return stream.read(_LARGEST_SOURCE)


def _sources(module: str) -> list[Path]:
    """Source files in the working directory, its `src`, or PYTHONPATH, where a user's own code is."""
    for root in ("", "src", *os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        place = Path(root) / module.replace(".", "/")
        if place.with_suffix(".py").is_file():
            return [place.with_suffix(".py")]
        if (place / "__init__.py").is_file():
            return sorted(place.rglob("*.py"))
    return []


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
