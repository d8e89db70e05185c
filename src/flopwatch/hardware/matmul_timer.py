"""Time real matmuls on a real device, leaving torch's switches and random state as they were."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flopwatch.clock import monotonic_seconds
from flopwatch.hardware.matmul_search import SHAPES, Shape, TimeMatmul

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
