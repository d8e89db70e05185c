"""What a trial runs on, without loading torch: part of its identity, so that an upgrade measures again."""

import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from flopwatch.trial_records import TrialSpec
from flopwatch.version import __version__

_PACKAGES = ("torch", "opacus", "transformers")


@cache
def machine() -> dict[str, Any]:
    """Versions and devices of this host."""
    found: dict[str, Any] = {"flopwatch": __version__, "python": platform.python_version(), "cpu": _cpu()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    gpus = [_line(file, "Model") for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    if gpus:
        found["gpus"] = gpus
        found["driver"] = Path("/proc/driver/nvidia/version").read_text().split("Module")[-1].split()[0]
    return found


def fingerprint(spec: TrialSpec) -> dict[str, Any]:
    """The machine, and the user's own code that the trial runs: their trainer, their model, their config file."""
    sources = {name: digest for name in (spec.trainer, spec.model) if (digest := _source_digest(name))}
    return {**machine(), **({"sources": sources} if sources else {})}


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


@cache
def _source_digest(name: str) -> str | None:
    """Of the file behind `module:Class` in the working directory, or of a config file; None for what is installed."""
    module, colon, _ = name.partition(":")
    file = Path(module.replace(".", "/") + ".py") if colon else Path(name)
    file = file / "config.json" if file.is_dir() else file
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    except (OSError, ValueError):
        return None


def _cpu() -> str:
    names = _line(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()
    return f"{names}, {os.cpu_count()} threads"


def _line(file: Path, key: str) -> str:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(key)), "")
