"""Measures the achievable peak of a device: the rate of the fastest matmul in a search over shapes."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.errors import InputError, MeasurementError
from flopwatch.hardware.device import find_device, matmul_dtype, read_device
from flopwatch.hardware.peaks import (
    MEASURABLE,
    DeviceFacts,
    cache_key,
    canonical_dtype,
    read_cached_peak,
    write_cached_peak,
)
from flopwatch.records.flops import Confidence, Peak
from flopwatch.text import plural

Shape = tuple[int, int, int]
"""Shape of a matmul: rows of the left matrix, contracted dimension, columns of the right matrix."""

TimeMatmul = Callable[[Shape, int], float]
"""Takes a shape and a number of matmuls, runs them one after the other, and returns the seconds in total."""

# Square matmuls, and the wide and deep ones of transformer layers. Which is fastest depends on the device.
SHAPES: tuple[Shape, ...] = (
    *((512, 512, 512), (1024, 1024, 1024), (2048, 1024, 2048), (2048, 2048, 2048), (1024, 8192, 1024)),
    *((4096, 1024, 4096), (4096, 4096, 4096), (8192, 2048, 8192), (8192, 4096, 14336), (8192, 8192, 8192)),
    (16384, 16384, 16384),
)

_SHARE_FOR_SEARCH = 0.6
_SEARCH_REPEATS = 3
_FEWEST_REPEATS = 5
_MOST_REPEATS = 100
# A sample is long enough that the time to launch kernels and to read the clock is negligible.
_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class BestMatmul:
    """The fastest shape, its median rate and the number of repeats; `spread` is (max - min) / median of the times."""

    flops_per_s: float
    shape: Shape
    repeats: int
    spread: float
    shapes_tried: int


def matmul_flops(shape: Shape) -> int:
    """FLOPs of a matmul, with two FLOPs per multiply-add.

    >>> matmul_flops((2, 3, 4))
    48
    """
    return 2 * math.prod(shape)


def search_best_matmul(
    time_matmul: TimeMatmul, seconds: float, clock: Clock, shapes: Sequence[Shape] = SHAPES
) -> BestMatmul:
    """Find the fastest shape by trying all from small to large, then measure its rate with more repeats.

    Only the second measurement is returned, because the maximum of many noisy rates is biased upwards. Shapes that
    would take too long for `seconds` are skipped.
    """
    start = clock()
    found: dict[Shape, tuple[float, int]] = {}  # the FLOP/s of each shape, and its matmuls per sample
    for shape in sorted(shapes, key=matmul_flops):
        time_left = start + _SHARE_FOR_SEARCH * seconds - clock()
        one_call = matmul_flops(shape) / max((rate for rate, _ in found.values()), default=math.inf)
        if not found or 2 * one_call + _SEARCH_REPEATS * max(one_call, _SAMPLE_SECONDS) <= time_left:
            found[shape] = _try(time_matmul, shape)
    best = max(found, key=lambda shape: found[shape][0])
    samples: list[float] = []
    while len(samples) < _FEWEST_REPEATS or (len(samples) < _MOST_REPEATS and clock() < start + seconds):
        samples.append(_seconds_per_call(time_matmul, best, found[best][1]))
    return BestMatmul(
        flops_per_s=matmul_flops(best) / median(samples),
        shape=best,
        repeats=len(samples),
        spread=(max(samples) - min(samples)) / median(samples),
        shapes_tried=len(found),
    )


def _try(time_matmul: TimeMatmul, shape: Shape) -> tuple[float, int]:
    _seconds_per_call(time_matmul, shape, 1)  # not timed: the first call allocates memory and chooses a kernel
    calls = max(1, math.ceil(_SAMPLE_SECONDS / _seconds_per_call(time_matmul, shape, 1)))
    seconds = median(_seconds_per_call(time_matmul, shape, calls) for _ in range(_SEARCH_REPEATS))
    return matmul_flops(shape) / seconds, calls


def _seconds_per_call(time_matmul: TimeMatmul, shape: Shape, calls: int) -> float:
    seconds = time_matmul(shape, calls)
    if not seconds > 0:
        raise MeasurementError(
            f"the device's clock reports {seconds} s for {calls} matmuls of shape {shape}, which is impossible; "
            "measure again, or set FLOPWATCH_PEAK_TFLOPS to the figure of the datasheet"
        )
    return seconds / calls


_TORCH_DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
_MOST_BYTES_OFF_CUDA = 2**30


def matmul_timer(device: torch.device, dtype: torch.dtype) -> TimeMatmul:
    """A function that times matmuls on `device`. A sample is so long that the time to synchronise is negligible."""

    def synchronize() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    latest: dict[Shape, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def time_matmul(shape: Shape, calls: int) -> float:
        if shape not in latest:
            latest.clear()  # keep the matrices of one shape only, because the largest take gigabytes
            latest[shape] = _operands(shape, device, dtype)
        left, right, product = latest[shape]
        synchronize()
        start = monotonic_seconds()
        for _ in range(calls):
            torch.mm(left, right, out=product)
        synchronize()
        return monotonic_seconds() - start

    return time_matmul


def shapes_that_fit(device: torch.device, dtype: torch.dtype) -> list[Shape]:
    most = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else _MOST_BYTES_OFF_CUDA
    sizes = {(m, k, n): dtype.itemsize * (m * k + k * n + m * n) for m, k, n in SHAPES}
    return [shape for shape, size in sizes.items() if size <= most] or [SHAPES[0]]


@contextmanager
def plain_matmuls(device: torch.device, dtype: str) -> Iterator[None]:
    """Switch gradients and autocast off in the block, and TF32 on only if `dtype` is `tf32`; undo this after it."""
    precision, switch, tf32, full = _fp32_switch(device)
    # The switch is set only if necessary, because reading torch's older switches (such as `allow_tf32`) raises an error
    # while they disagree with `fp32_precision`.
    must_switch = precision != tf32 if dtype == "tf32" else dtype == "fp32" and precision not in full
    try:
        if must_switch:
            switch(tf32 if dtype == "tf32" else full[0])
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        if must_switch:
            switch(precision)


def _fp32_switch(device: torch.device) -> tuple[str, Callable[[str], None], str, tuple[str, ...]]:
    """How fp32 matmuls are computed now, a function that changes it, and its values for TF32 and for full precision."""
    backends: Any = torch.backends  # type checkers do not know its attributes, because torch creates them at run time
    backend = backends.cuda.matmul if device.type == "cuda" else getattr(backends.mkldnn, "matmul", None)
    if (precision := getattr(backend, "fp32_precision", None)) is not None:
        return precision, partial(setattr, backend, "fp32_precision"), "tf32", ("ieee", "none")
    # Torch releases before 2.9 have one switch for all devices.
    return torch.get_float32_matmul_precision(), torch.set_float32_matmul_precision, "high", ("highest",)


def _operands(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, inner, columns = shape
    # The values are random, because constants need less power, so a GPU would run at a higher clock than in training.
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(rows, inner, device=device, dtype=dtype, generator=generator)
    right = torch.randn(inner, columns, device=device, dtype=dtype, generator=generator)
    return left, right, torch.empty(rows, columns, device=device, dtype=dtype)


def measure_peak(
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    seconds: float = 3.0,
    refresh: bool = False,
    time_matmul: TimeMatmul | None = None,
    clock: Clock = monotonic_seconds,
) -> Peak:
    """Measure the highest matmul rate that a device achieves, which is below the figure of its datasheet.

    Tries several shapes and measures the fastest again. The result is the median rate of this shape; `source` names the
    shape, the number of repeats and their spread. It is cached in `~/.cache/flopwatch/peaks.json` for this device,
    dtype, torch version and number of threads.

    >>> peak = measure_peak("cpu", "fp32", seconds=0.1)
    >>> peak.kind, peak.dtype
    ('measured', 'fp32')

    Args:
        device: The device; None is the current accelerator, or the CPU if there is none.
        dtype: Compute type: fp64, fp32, tf32, bf16 or fp16; None is the type in which a matmul would run now.
        seconds: Roughly how long to measure.
        refresh: Measure again even if a result is cached.
        time_matmul: Function that times matmuls; tests pass a fake one.
        clock: Clock that limits the search; tests pass a fake one.

    Raises:
        InputError: This machine has no such device, or the dtype cannot be measured.
        MeasurementError: The device cannot multiply in this dtype.
    """
    if not seconds > 0:
        raise InputError(f"seconds={seconds!r} must be a positive number, such as 3")
    facts = read_device(device)
    asked = canonical_dtype(dtype) if dtype is not None else matmul_dtype(facts.kind, None, facts.compute_capability)
    can = [each for each in MEASURABLE if each != "tf32" or facts.kind == "cuda"]
    if asked not in can:
        raise InputError(f"{asked} cannot be measured on a {facts.kind} device; measure one of: {', '.join(can)}")
    compute_dtype: str = asked
    key = _cache_key(facts, compute_dtype)
    known = None if refresh else read_cached_peak(key)
    if known is not None:
        return known
    used, torch_dtype = find_device(device), _TORCH_DTYPES.get(compute_dtype, torch.float32)
    with plain_matmuls(used, compute_dtype):
        try:
            timer = time_matmul or matmul_timer(used, torch_dtype)
            best = search_best_matmul(timer, seconds, clock, shapes_that_fit(used, torch_dtype))
        except (RuntimeError, TypeError) as error:
            raise MeasurementError(
                f"{compute_dtype} matmuls failed on {facts.name}: {error}; try another dtype, or free memory of the "
                "device"
            ) from error
    # Never high: a measured figure is below that of the datasheet, and other work on the machine lowers it.
    confidence: Confidence = "medium" if best.spread < 0.2 else "low"
    source = (
        f"best matmul of {plural(best.shapes_tried, 'shape')}: {' x '.join(map(str, best.shape))}, median of "
        f"{best.repeats} repeats, spread {best.spread:.1%}, {_versions()}"
    )
    peak = Peak(best.flops_per_s, facts.name, compute_dtype, source, "measured", confidence)
    write_cached_peak(key, peak)
    return peak


def measured_peak(device: torch.device | str | None, dtype: str) -> Peak | None:
    """The peak that `measure_peak` has measured on this device before; None without one. Measures nothing."""
    return read_cached_peak(_cache_key(read_device(device), dtype))


def _cache_key(facts: DeviceFacts, dtype: str) -> str:
    return cache_key(facts.name, facts.unit_count, dtype) + _versions()


def _versions() -> str:
    return f"torch {torch.__version__}, {plural(torch.get_num_threads(), 'thread')}"
