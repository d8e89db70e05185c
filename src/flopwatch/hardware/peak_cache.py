"""Measured peaks on disk, so that a device is measured once. Never loads torch, never fails the caller."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from flopwatch.records import Peak


def cache_path() -> Path:
    """`$XDG_CACHE_HOME/flopwatch/peaks.json`, by default under `~/.cache`."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "flopwatch" / "peaks.json"


def read_cached_peak(key: str) -> Peak | None:
    """The peak stored under `key`; None if there is none or the file cannot be used."""
    try:
        peak = Peak(**_read_all()[key])
        return peak if peak.flops_per_s > 0 and peak.kind == "measured" else None
    except (KeyError, TypeError):
        return None


def write_cached_peak(key: str, peak: Peak) -> None:
    """Store a peak; a folder that cannot be written is left alone."""
    path = cache_path()
    # A reader sees the old file or the new one, never half of it.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({**_read_all(), key: peak.to_json()}, indent=1), encoding="utf-8")
        unfinished.replace(path)


def _read_all() -> dict[str, Any]:
    try:
        content = json.loads(cache_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
