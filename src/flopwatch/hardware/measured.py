"""The file of peaks that were measured on this user's devices. Does not load torch."""

import os
from contextlib import suppress
from pathlib import Path

from flopwatch.files import read_object, write_json
from flopwatch.records.flops import Peak

MEASURABLE = ("fp64", "fp32", "tf32", "bf16", "fp16")
"""Compute types whose matmuls can be timed; tf32 on CUDA only."""


def cache_path() -> Path:
    """The path of the cache: `$XDG_CACHE_HOME/flopwatch/peaks.json`, with `~/.cache` as the default folder."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "flopwatch" / "peaks.json"


def cache_key(device: str, unit_count: int | None, dtype: str) -> str:
    """The beginning of the key of a measurement; torch version and number of threads follow."""
    units = "" if unit_count is None else f" ({unit_count} units)"
    return f"{device}{units}, {dtype}, "


def read_cached_peak(key: str) -> Peak | None:
    """The peak that is cached under `key`; None if there is none, or if the file cannot be read."""
    try:
        peak = Peak(**read_object(cache_path())[key])
        is_usable = peak.flops_per_s > 0 and peak.kind == "measured"
    except (KeyError, TypeError):
        return None
    return peak if is_usable else None


def write_cached_peak(key: str, peak: Peak) -> None:
    """Cache a peak; does nothing if the folder cannot be written."""
    path = cache_path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**read_object(path), key: peak.to_json()})


def fastest_measured(device: str, unit_count: int | None, dtype: str) -> Peak | None:
    """The highest peak that was measured on such a device for this type, with any number of threads; None if none was.

    The highest, because a peak is what the whole device can do: a training may use fewer threads than the measurement.
    """
    beginning = cache_key(device, unit_count, dtype)
    found = [read_cached_peak(key) for key in read_object(cache_path()) if key.startswith(beginning)]
    return max((peak for peak in found if peak is not None), key=lambda peak: peak.flops_per_s, default=None)


def advice_to_measure(dtypes: tuple[str, ...] | list[str]) -> str | None:
    """The command that measures these types; None if none of them can be measured."""
    known = [dtype for dtype in dtypes if dtype in MEASURABLE]
    return (
        None if dtypes and not known else " ".join(["flopwatch peak --measure", *(f"--dtype {d}" for d in known[:1])])
    )
