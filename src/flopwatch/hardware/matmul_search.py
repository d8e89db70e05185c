"""Find the shape a device multiplies fastest. Pure arithmetic apart from the timer and the clock it is handed."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from flopwatch.clock import Clock
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
