"""Find the shape a device multiplies fastest. Pure arithmetic apart from the timer and the clock it is handed."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.errors import MeasurementError

Shape = tuple[int, int, int]
"""Rows of the left matrix, the contracted dimension, columns of the right matrix."""

TimeMatmul = Callable[[Shape, int], float]
"""Seconds that so many matmuls of this shape take, one after the other."""

# Squares, and the flat and deep products of transformer layers; which is fastest differs from device to device.
SHAPES: tuple[Shape, ...] = (
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 1024, 2048),
    (2048, 2048, 2048),
    (1024, 8192, 1024),
    (4096, 1024, 4096),
    (4096, 4096, 4096),
    (8192, 2048, 8192),
    (8192, 4096, 14336),
    (8192, 8192, 8192),
    (16384, 16384, 16384),
)

_SHARE_FOR_SEARCH = 0.6
_SEARCH_REPEATS = 3
_FEWEST_REPEATS = 5
_MOST_REPEATS = 100
# Long enough to drown the cost of launching and of reading the clock.
_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class BestMatmul:
    """The fastest shape: its median rate, over how many repeats, and how far these lay apart (range over median)."""

    flops_per_s: float
    shape: Shape
    repeats: int
    spread: float
    shapes_tried: int


def matmul_flops(shape: Shape) -> int:
    """Two for each multiply-add.

    >>> matmul_flops((2, 3, 4))
    48
    """
    return 2 * math.prod(shape)


def search_best_matmul(
    time_matmul: TimeMatmul, seconds: float, clock: Clock, shapes: Sequence[Shape] = SHAPES
) -> BestMatmul:
    """Try shapes from small to large while time allows, then measure the fastest again, longer.

    The second measurement is the result: the best of many noisy figures is too high, a fresh one is not.
    """
    start = clock()
    found: dict[Shape, _Candidate] = {}
    for shape in sorted(shapes, key=matmul_flops):
        time_left = start + _SHARE_FOR_SEARCH * seconds - clock()
        if not found or _expected_seconds(shape, found.values()) <= time_left:
            found[shape] = _try(time_matmul, shape)
    best = max(found, key=lambda shape: found[shape].flops_per_s)
    samples: list[float] = []
    while len(samples) < _FEWEST_REPEATS or (len(samples) < _MOST_REPEATS and clock() < start + seconds):
        samples.append(_seconds_per_call(time_matmul, best, found[best].calls_per_sample))
    return BestMatmul(
        flops_per_s=matmul_flops(best) / median(samples),
        shape=best,
        repeats=len(samples),
        spread=(max(samples) - min(samples)) / median(samples),
        shapes_tried=len(found),
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    flops_per_s: float
    calls_per_sample: int


def _try(time_matmul: TimeMatmul, shape: Shape) -> _Candidate:
    _seconds_per_call(time_matmul, shape, 1)  # the first call allocates and chooses a kernel
    calls = max(1, math.ceil(_SAMPLE_SECONDS / _seconds_per_call(time_matmul, shape, 1)))
    seconds = median(_seconds_per_call(time_matmul, shape, calls) for _ in range(_SEARCH_REPEATS))
    return _Candidate(matmul_flops(shape) / seconds, calls)


def _seconds_per_call(time_matmul: TimeMatmul, shape: Shape, calls: int) -> float:
    seconds = time_matmul(shape, calls)
    if not seconds > 0:
        raise MeasurementError(
            f"{calls} matmuls of shape {shape} took {seconds} s by the device's own clock; measure again, "
            "or set FLOPWATCH_PEAK_TFLOPS to the figure of the datasheet"
        )
    return seconds / calls


def _expected_seconds(shape: Shape, found: Iterable[_Candidate]) -> float:
    one_call = matmul_flops(shape) / max(candidate.flops_per_s for candidate in found)
    return 2 * one_call + _SEARCH_REPEATS * max(one_call, _SAMPLE_SECONDS)


# Time real matmuls on a real device, leaving torch's switches and random state as they were.


TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

_MOST_BYTES_OFF_CUDA = 2**30


def matmul_timer(device: torch.device, dtype: torch.dtype) -> TimeMatmul:
    """A timer of matmuls on `device`: by events on CUDA, by the clock around a synchronisation elsewhere."""
    seconds_of = _seconds_by_events if device.type == "cuda" else _seconds_by_clock
    latest: dict[Shape, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def time_matmul(shape: Shape, calls: int) -> float:
        if shape not in latest:
            latest.clear()  # one set of operands at a time: the largest need gigabytes
            latest[shape] = _operands(shape, device, dtype)
        left, right, product = latest[shape]

        def multiply() -> None:
            for _ in range(calls):
                torch.mm(left, right, out=product)

        return seconds_of(multiply, device)

    return time_matmul


def shapes_that_fit(device: torch.device, dtype: torch.dtype) -> list[Shape]:
    """The shapes whose three matrices take at most half of the free memory."""
    most = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else _MOST_BYTES_OFF_CUDA
    return [shape for shape in SHAPES if _operand_bytes(shape, dtype) <= most] or [SHAPES[0]]


@contextmanager
def plain_matmuls(device: torch.device, dtype: str) -> Iterator[None]:
    """No gradients, no autocast, and fp32 computed as what `dtype` says: in full (`fp32`) or as `tf32`."""
    backends: Any = torch.backends  # its attributes are made at run time, unseen by type checkers
    backend = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    before = backend.fp32_precision
    wanted = "tf32" if dtype == "tf32" else "ieee"
    # "none" is full precision too. Left alone where it already fits: while it differs from what the older switches
    # were set to, reading those raises.
    must_switch = dtype in ("fp32", "tf32") and wanted != before and not (wanted == "ieee" and before == "none")
    try:
        if must_switch:
            backend.fp32_precision = wanted
        with torch.inference_mode(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        if must_switch:
            backend.fp32_precision = before


def _operands(
    shape: Shape, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, inner, columns = shape
    # Random values: with constant ones a GPU draws less power and clocks higher than any training does.
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(rows, inner, device=device, dtype=dtype, generator=generator)
    right = torch.randn(inner, columns, device=device, dtype=dtype, generator=generator)
    return left, right, torch.empty(rows, columns, device=device, dtype=dtype)


def _operand_bytes(shape: Shape, dtype: torch.dtype) -> int:
    rows, inner, columns = shape
    return dtype.itemsize * (rows * inner + inner * columns + rows * columns)


def _seconds_by_events(run: Callable[[], None], device: torch.device) -> float:
    cuda: Any = torch.cuda  # its events are not typed
    with cuda.device(device):
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3  # in ms


def _seconds_by_clock(run: Callable[[], None], device: torch.device) -> float:
    _synchronize(device)
    start = monotonic_seconds()
    run()
    _synchronize(device)
    return monotonic_seconds() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
