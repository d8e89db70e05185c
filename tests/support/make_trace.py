"""Writes traces as Kineto would, of which the truth is known: two streams, communication half behind computation."""

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PART_MICROSECONDS = 1000
PART_TRUTH = {
    "matmul": 400,
    "attention": 100,
    "other_kernel": 100,
    "optimizer": 50,
    "exposed_communication": 100,
    "hidden_communication": 100,
    "copy": 50,
    "idle": 200,
}
"""Microseconds of one part of a step of `steps_on_device`."""
MATMUL = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
ATTENTION = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(
    category: str, name: str, start: float, microseconds: float, *, stream: int = 7, **more: Any
) -> dict[str, Any]:
    about = {"device": 0, "stream": stream, "grid": [64, 1, 1], **more}
    times = {"ts": start, "dur": microseconds}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, **times, "args": about}


def steps_on_device(count: int, parts: int = 1, first: float = 4_000_000_000_000.0) -> Iterator[dict[str, Any]]:
    """Steps of equal parts. Each computes 600 µs and all-reduces 200 µs, half of it behind the computation."""
    length = parts * PART_MICROSECONDS
    for number in range(count):
        start = first + number * length
        yield event("user_annotation", f"ProfilerStep#{number}", start, length, stream=1)
        for part in range(parts):
            yield from _part(start + part * PART_MICROSECONDS)
        yield event("gpu_user_annotation", f"ProfilerStep#{number}", start + 50, length - 130)


def _part(start: float) -> Iterator[dict[str, Any]]:
    """The host launches everything in the first 40 µs, the last kernel in the optimizer's step."""
    works = (
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 50, 70, 13),
        ("kernel", MATMUL, 100, 400, 7),
        ("kernel", ATTENTION, 500, 100, 7),
        ("kernel", ELEMENTWISE, 600, 100, 7),
        ("kernel", ALL_REDUCE, 600, 200, 13),
        ("kernel", ELEMENTWISE, 850, 50, 7),
    )
    for number, (category, name, after, microseconds, stream) in enumerate(works):
        correlation = int(start) % 10**9 + number + 1
        yield event("cuda_runtime", "cudaLaunchKernel", start + 5 * number, 4, stream=1, correlation=correlation)
        yield event(category, name, start + after, microseconds, stream=stream, correlation=correlation)
    yield event("user_annotation", "Optimizer.step#AdamW.step", start + 24, 10, stream=1)
    yield event("gpu_user_annotation", "Optimizer.step#AdamW.step", start + 820, 100)


def write_trace(path: Path, events: Iterable[dict[str, Any]], **about: Any) -> Path:
    """Write a trace; with a name that ends in `.gz`, a compressed one."""
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as file:
        entries = {"baseTimeNanoseconds": 1790857026000000000, "distributedInfo": {"rank": 0, "world_size": 1}, **about}
        file.write(json.dumps(entries)[:-1] + ',\n"traceEvents": [\n')
        for number, each in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(each, indent=2))
        file.write(f'\n],"traceName": "{path.name}" }}\n')
    return path


def write_large_trace(path: Path, least_bytes: int, steps: int = 3) -> int:
    """Write an uncompressed trace of at least this size. Returns the number of parts in its steps together."""
    one = len("".join(json.dumps(each, indent=2) + ",\n" for each in _part(4e12)))
    parts = least_bytes // (steps * one) + 1
    write_trace(path, steps_on_device(steps, parts))
    return steps * parts
