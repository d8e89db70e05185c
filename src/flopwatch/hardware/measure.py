"""The achievable peak: the fastest matmul this device is seen to run."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.errors import InputError, MeasurementError
from flopwatch.hardware.device import find_device, matmul_dtype, read_device
from flopwatch.hardware.facts import DeviceFacts, canonical_dtype
from flopwatch.hardware.matmul_speed import (
    TORCH_DTYPES,
    BestMatmul,
    TimeMatmul,
    matmul_timer,
    plain_matmuls,
    search_best_matmul,
    shapes_that_fit,
)
from flopwatch.records.flops import Confidence, Peak


def measure_peak(
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    seconds: float = 3.0,
    refresh: bool = False,
    time_matmul: TimeMatmul | None = None,
    clock: Clock = monotonic_seconds,
) -> Peak:
    """Measure the best matmul rate of a device: what a training step could reach, not what the datasheet says.

    Tries square and rectangular shapes, then repeats the fastest; the result is its median rate, and `source` tells
    the shape, the repeats and their spread. The figure is kept in `~/.cache/flopwatch/peaks.json` for this device,
    dtype, torch version and number of threads.

    >>> peak = measure_peak("cpu", "fp32", seconds=0.1)
    >>> peak.kind, peak.dtype
    ('measured', 'fp32')

    Args:
        device: The device; None is the current accelerator, or the CPU without one.
        dtype: Compute type: fp64, fp32, tf32, bf16 or fp16; None asks torch what a matmul would run in now.
        seconds: Roughly how long to measure.
        refresh: Measure again even if the figure is known.
        time_matmul: Replaces the timer; tests pass `flopwatch.testing.FakeMatmul`.
        clock: Limits the search; tests pass `flopwatch.testing.FakeClock`.

    Raises:
        InputError: No such device, or a dtype that cannot be measured.
        MeasurementError: The device cannot multiply in this dtype.
    """
    if not seconds > 0:
        raise InputError(f"seconds={seconds!r} is not a time to measure for; pass a positive number, such as 3")
    facts = read_device(device)
    compute_dtype = _measurable_dtype(facts, dtype)
    key = _cache_key(facts, compute_dtype)
    known = None if refresh else read_cached_peak(key)
    if known is not None:
        return known
    best = _measure(find_device(device), facts, compute_dtype, seconds, time_matmul, clock)
    peak = Peak(
        flops_per_s=best.flops_per_s,
        device=facts.name,
        dtype=compute_dtype,
        source=_describe(best),
        kind="measured",
        confidence=_confidence(best.spread),
    )
    write_cached_peak(key, peak)
    return peak


def _measure(
    device: torch.device,
    facts: DeviceFacts,
    dtype: str,
    seconds: float,
    time_matmul: TimeMatmul | None,
    clock: Clock,
) -> BestMatmul:
    torch_dtype = TORCH_DTYPES[dtype]
    with plain_matmuls(device, dtype):
        try:
            timer = time_matmul or matmul_timer(device, torch_dtype)
            return search_best_matmul(timer, seconds, clock, shapes_that_fit(device, torch_dtype))
        except (RuntimeError, TypeError) as error:
            raise MeasurementError(
                f"no {dtype} matmul could be run on {facts.name}: {error}; try another dtype, or free the device"
            ) from error


def _measurable_dtype(facts: DeviceFacts, dtype: torch.dtype | str | None) -> str:
    asked = canonical_dtype(dtype) if dtype is not None else matmul_dtype(facts.kind, None, facts.compute_capability)
    if asked not in TORCH_DTYPES or (asked == "tf32" and facts.kind != "cuda"):
        can = [key for key in TORCH_DTYPES if key != "tf32" or facts.kind == "cuda"]
        raise InputError(f"{asked} cannot be measured on a {facts.kind} device; measure one of: {', '.join(can)}")
    return asked


def _cache_key(facts: DeviceFacts, dtype: str) -> str:
    units = "" if facts.unit_count is None else f" ({facts.unit_count} units)"
    return f"{facts.name}{units}, {dtype}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def _describe(best: BestMatmul) -> str:
    shape = " x ".join(map(str, best.shape))
    return (
        f"best matmul of {best.shapes_tried} shapes: {shape}, median of {best.repeats} repeats, "
        f"spread {best.spread:.1%}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )


def _confidence(spread: float) -> Confidence:
    if spread < 0.05:
        return "high"
    return "medium" if spread < 0.2 else "low"


# Measured peaks on disk, so that a device is measured once. Never loads torch, never fails the caller.


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
