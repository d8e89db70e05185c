"""What a trial runs on, without loading torch: part of its identity, so that an upgrade measures again."""

import hashlib
import os
import platform
import shlex
import stat
import subprocess
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from flopwatch.clock import monotonic_seconds
from flopwatch.records.reading import UnreadableError, opened_regular
from flopwatch.records.trial import TrialSpec
from flopwatch.version import __version__

# The devices of this host, read without loading torch. Light: supervisors tell where a command ran.


OF_THIS_HOST = ("cpu", "gpus", "driver")


@cache
def host_facts() -> dict[str, Any]:
    """`cpu`, and `gpus` and `driver` where there are some."""
    found: dict[str, Any] = {"cpu": _cpu()}
    gpus = [_line(file, "Model") for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    if gpus:
        found["gpus"] = gpus
        found["driver"] = Path("/proc/driver/nvidia/version").read_text().split("Module")[-1].split()[0]
    return found


def _cpu() -> str:
    name = _line(Path("/proc/cpuinfo"), "model name")
    if not name:
        import platform  # 5 ms that supervisors do without

        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} threads"


def _line(file: Path, key: str) -> str:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(key)), "")


_PACKAGES = ("torch", "opacus", "transformers")
_SOURCES_LAST_SECONDS = 5.0
"""Sources are read again after this: a user may edit their trainer while the sweep runs."""
_LARGEST_SOURCE = 16 << 20
"""A command may name its data too, and gigabytes are not read: size and time stand for a larger file's content."""

_NO_SOURCES = ("/proc/", "/sys/")
"""What the kernel makes up: its files call themselves regular, change by themselves, and may wait for ever."""


@cache
def machine() -> dict[str, Any]:
    """Versions and devices of this host."""
    found: dict[str, Any] = {"flopwatch": __version__, "python": platform.python_version(), **host_facts()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def fingerprint(spec: TrialSpec, *, is_here: bool = True) -> dict[str, Any]:
    """The machine, and the user's own code that the trial runs: their trainer, model, batch, config file, command's
    files.

    Args:
        spec: The trial.
        is_here: False for a cluster, where trials run on other hosts than this one: its devices are left out.
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
    """Commit of the working directory, with `+` when files differ from it; None outside of a repository."""
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
    """Of the file or package behind `module:Class`, or of a file; None for what is installed, and for other words."""
    module, colon, _ = name.partition(":")
    try:
        files = _sources(module) if colon else [Path(name) / "config.json" if Path(name).is_dir() else Path(name)]
        content = b"".join(map(_content, files))
    except (OSError, ValueError, UnreadableError):
        return None
    return hashlib.sha256(content).hexdigest()[:16] if content else None


def _content(file: Path) -> bytes:
    """Of a regular file; devices, FIFOs and sockets have none, and are not even opened."""
    if os.path.realpath(file).startswith(_NO_SOURCES) or not stat.S_ISREG(file.stat().st_mode):
        return b""
    with opened_regular(file) as stream:
        facts = os.fstat(stream.fileno())
        if facts.st_size > _LARGEST_SOURCE:
            return f"{facts.st_size} bytes of {facts.st_mtime_ns}".encode()
        return stream.read(_LARGEST_SOURCE)


def _sources(module: str) -> list[Path]:
    """In the working directory, its `src`, or what PYTHONPATH names: where a user's own code lies."""
    for root in ("", "src", *os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        place = Path(root) / module.replace(".", "/")
        if place.with_suffix(".py").is_file():
            return [place.with_suffix(".py")]
        if (place / "__init__.py").is_file():
            return sorted(place.rglob("*.py"))
    return []
