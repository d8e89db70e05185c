"""Checks of `flopwatch doctor --gpu` of the device itself: product, times, memory, peaks and hardware counters.

Not yet run on an accelerator; the tests drive them with a fake one.
"""

import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from flopwatch.cli.doctor.accelerator import Accelerator
from flopwatch.cli.doctor.findings import Checked, NotPossibleError, passed_if
from flopwatch.clock import monotonic_seconds
from flopwatch.errors import MeasurementError
from flopwatch.hardware import peak_flops
from flopwatch.hardware.counters.protocol import CounterSource
from flopwatch.hardware.measure import matmul_flops
from flopwatch.hardware.peak_clock import peak_clock_mhz
from flopwatch.hardware.peaks import Unknown, find_accelerator
from flopwatch.monitor.counters.alarm import is_near
from flopwatch.monitor.counters.values import flops_by_counters
from flopwatch.numbers import byte_size, flop_rate, percent, step_time
from flopwatch.records.counters import CounterReading, CounterWindow, window_of
from flopwatch.runs.traces import read_trace

_STEPS, _STEP_SECONDS, _CALL_SECONDS = 10, 0.04, 1e-3
_LARGEST_SIDE = 8192
_NEAR = 0.05
_ABOVE_PEAK = 1.05
_ALLOCATED_BYTES = 256 << 20
_COUNTER_SPANS, _SPAN_SECONDS = 8, 0.3


def product(accelerator: Accelerator) -> Checked:
    """What torch reports about the device, against the product table."""
    facts, record = accelerator.facts, find_accelerator(accelerator.facts)
    figures: dict[str, Any] = {"count": accelerator.count, **asdict(facts), "peak_clock_mhz": peak_clock_mhz(facts)}
    if isinstance(record, Unknown):
        return Checked("not possible", f"the product table does not have it: {record.reason}", figures)
    figures |= {"product": record.name, "product_unit_count": record.unit_count}
    units = f"{facts.unit_count or '?'} of {record.unit_count or '?'} units"
    fits = not (facts.unit_count and record.unit_count) or facts.unit_count <= record.unit_count
    return passed_if(fits, f"{facts.name} is {record.name} in the product table; {units}", **figures)


def times_by_events(accelerator: Accelerator) -> Checked:
    """Times between events, against the host's clock around the same matmuls and their end on the device."""
    step, timer = steady_work(accelerator), accelerator.timer()
    step()
    accelerator.synchronize()
    began = monotonic_seconds()
    marks = [timer.mark()]
    for _ in range(_STEPS):
        step()
        marks.append(timer.mark())
    queued_seconds = monotonic_seconds() - began
    accelerator.synchronize()
    seconds = monotonic_seconds() - began
    if not all(map(timer.has_passed, marks)):
        return Checked("failed", "events have not passed, although the device has done its work")
    by_step = [timer.seconds(*pair) for pair in pairwise(marks)]
    by_events = timer.seconds(marks[0], marks[-1])
    said = f"{step_time(by_events)} by events, {step_time(seconds)} by the host"
    is_right = abs(by_events / seconds - 1) <= _NEAR and abs(sum(by_step) / by_events - 1) <= _NEAR and min(by_step) > 0
    figures = {"event_seconds": by_events, "host_seconds": seconds, "seconds_until_queued": queued_seconds}
    return passed_if(is_right, said, **figures, step_seconds=by_step)


def times_by_a_trace(accelerator: Accelerator) -> Checked:
    """The time of the same steps by events and by the kernels in a profiler's trace."""
    step, timer = steady_work(accelerator), accelerator.timer()
    step()
    marks: list[Any] = []

    def marked() -> None:
        marks.extend([] if marks else [timer.mark()])
        step()
        marks.append(timer.mark())

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        accelerator.trace(marked, _STEPS, file)
        split = read_trace(file)
    by_events = timer.seconds(marks[0], marks[-1])
    figures = {"event_seconds": by_events, **{name: value for name, value in asdict(split).items() if name != "file"}}
    if split.device != accelerator.facts.kind or split.steps != _STEPS:
        return Checked("failed", f"the trace has {split.steps} steps on {split.device}", figures)
    said = f"{step_time(split.seconds)} by the trace, {step_time(by_events)} by events"
    return passed_if(abs(split.seconds / by_events - 1) <= _NEAR, said, **figures)


def memory(accelerator: Accelerator) -> Checked:
    """Memory that is taken and given back is seen, and the peak remembers it."""
    before = accelerator.memory()
    held: Any = accelerator.allocate(_ALLOCATED_BYTES)
    during = accelerator.memory()
    del held
    after = accelerator.memory()
    if not during.peak:
        raise NotPossibleError(f"torch does not keep the peak of memory on {accelerator.facts.kind} devices")
    grown = during.allocated - before.allocated
    is_right = (
        _ALLOCATED_BYTES <= grown <= 1.02 * _ALLOCATED_BYTES
        and after.allocated == before.allocated
        and min(during.reserved, after.peak) >= during.allocated
    )
    said = f"{byte_size(grown)} seen of {byte_size(_ALLOCATED_BYTES)}, peak {byte_size(after.peak)}"
    return passed_if(is_right, said, before=asdict(before), during=asdict(during), after=asdict(after))


def measured_peak(dtype: str, accelerator: Accelerator) -> Checked:
    """The fastest matmul of a type is not faster than the peak of the datasheet."""
    facts = accelerator.facts
    if dtype == "tf32" and (facts.kind != "cuda" or (facts.compute_capability or (8, 0)) < (8, 0)):
        raise NotPossibleError("this device has no TF32")
    try:
        measured = accelerator.measure_peak(dtype, 5.0)
    except MeasurementError as error:
        raise NotPossibleError(str(error)) from error
    figures = {"measured_flops_per_s": measured.flops_per_s, "how": measured.source}
    known = peak_flops(facts, dtype)
    if known is None or known.kind == "measured":
        return Checked("passed", f"{flop_rate(measured.flops_per_s)}; no other figure is known", figures)
    figures |= {"known_flops_per_s": known.flops_per_s, "known_kind": known.kind}
    share = measured.flops_per_s / known.flops_per_s
    said = f"{flop_rate(measured.flops_per_s)}, {percent(share)} of {flop_rate(known.flops_per_s)} ({known.kind})"
    return passed_if(share <= _ABOVE_PEAK, said, **figures, share=share)


PEAKS: dict[str, Callable[[Accelerator], Checked]] = {
    f"peak in {dtype}": partial(measured_peak, dtype) for dtype in ("bf16", "fp16", "tf32", "fp32")
}


def counters(accelerator: Accelerator) -> Checked:
    """FLOP/s by the counters of the tensor cores, against those of matmuls whose FLOPs are known."""
    opened = accelerator.open_counters()
    if opened.source is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in opened.reasons.items())
        raise NotPossibleError(reasons or "no source of counters knows this device")
    try:
        window, flops_per_s = _counted_matmuls(accelerator, opened.source)
    finally:
        opened.source.close()
    figures = {**asdict(window), "matmul_flops_per_s": flops_per_s, "not_used": dict(opened.reasons)}
    peak, clock = peak_flops(accelerator.facts, matrix_type(accelerator)), peak_clock_mhz(accelerator.facts)
    if window.tensor_active is None or window.sm_clock_mhz is None:
        return Checked("not possible", f"{window.source} does not report tensor activity and clock", figures)
    by_counters = flops_by_counters(window, None if peak is None else peak.flops_per_s, clock)
    if by_counters is None:
        return Checked("not possible", "the FLOP per clock of this device are not known", figures)
    ratio = by_counters / flops_per_s
    said = f"{flop_rate(by_counters)} by {window.source}, {flop_rate(flops_per_s)} by count"
    return passed_if(is_near(ratio), said, **figures, counter_flops_per_s=by_counters, ratio=ratio)


def _counted_matmuls(accelerator: Accelerator, source: CounterSource) -> tuple[CounterWindow, float]:
    """Run matmuls, and read the counters between them: the window of the readings, and FLOP/s."""
    run, side = accelerator.time_matmul(matrix_type(accelerator)), _side(accelerator)
    shape = (side, side, side)
    calls = math.ceil(_SPAN_SECONDS / min(run(shape, 1) for _ in range(3)))
    before = source.sample()
    readings: list[CounterReading] = []
    for _ in range(_COUNTER_SPANS):
        run(shape, calls)
        readings.append(source.sample())
    window = window_of(readings, before)
    assert window is not None  # it has readings
    return window, _COUNTER_SPANS * calls * matmul_flops(shape) / window.seconds


def matrix_type(accelerator: Accelerator) -> torch.dtype:
    """NVIDIA devices before compute capability 8.0 have tensor cores for fp16 only."""
    return torch.float16 if (accelerator.facts.compute_capability or (8, 0)) < (8, 0) else torch.bfloat16


def _side(accelerator: Accelerator) -> int:
    """The side of square matrices whose product takes a millisecond, so that launching it does not matter."""
    run, side = accelerator.time_matmul(matrix_type(accelerator)), 512
    while side < _LARGEST_SIDE and min(run((side, side, side), 1) for _ in range(3)) < _CALL_SECONDS:
        side *= 2
    return side


def steady_work(accelerator: Accelerator) -> Callable[[], None]:
    """A function that queues matmuls for some 40 ms, and does not wait for them."""
    side, dtype = _side(accelerator), matrix_type(accelerator)
    one = min(accelerator.time_matmul(dtype)((side, side, side), 1) for _ in range(3))
    left = torch.randn(side, side, device=accelerator.device, dtype=dtype)
    right, into = torch.randn_like(left), torch.empty_like(left)
    calls = math.ceil(_STEP_SECONDS / one)

    def work() -> None:
        for _ in range(calls):
            torch.mm(left, right, out=into)

    return work
