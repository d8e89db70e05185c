"""A fake accelerator for `flopwatch doctor --gpu`: it computes on the CPU, and says what its arguments make it say."""

import time
import weakref
from pathlib import Path

import torch

from flopwatch.cli.doctor.accelerator import Load, Memory
from flopwatch.errors import MeasurementError
from flopwatch.hardware import peak_flops
from flopwatch.hardware.counters.chain import open_counters
from flopwatch.hardware.counters.protocol import DeviceIdentity
from flopwatch.hardware.measure import matmul_flops, matmul_timer
from flopwatch.hardware.peak_clock import peak_clock_mhz
from flopwatch.monitor.timing.tape import EventTimer
from flopwatch.records.counters import CounterReading
from flopwatch.records.flops import Peak
from flopwatch.testing import fake_device
from support.fakes import FakeEvents
from support.make_trace import MATMUL, event, write_trace


class FakeAccelerator:
    """The CPU as an H100. Its work has ended when a call returns, so its events are readings of the host's clock.

    Args:
        product: A name of `flopwatch.testing.FAKE_DEVICES`.
        event_factor, trace_factor: What events and traces say of a time, in truths.
        peak_share: The measured peak, as a share of that of the datasheet.
        counter_factor: What the counters of the tensor cores say of their use, in truths.
        counters: Other sources of hardware counters, which replace those of the tensor cores.
        leaks: Whether memory that is given back stays allocated.
        count: Number of devices.
    """

    def __init__(
        self,
        product="h100",
        *,
        event_factor=1.0,
        trace_factor=1.0,
        peak_share=0.75,
        counter_factor=1.0,
        counters=None,
        leaks=False,
        count=1,
    ):
        self.device = torch.device("cpu")
        self.facts = fake_device(product)
        self.count, self.backend = count, "gloo"
        self.load = Load("tiny", 2, 64)
        self._event_factor, self._trace_factor, self._peak_share = event_factor, trace_factor, peak_share
        self._leaks = leaks
        self._pipes = _TensorPipes(self.facts, counter_factor)
        self._counters = [self._pipes] if counters is None else counters
        self._held = []
        self._peak = 0

    def synchronize(self):
        pass

    def timer(self):
        return EventTimer(self.device, FakeEvents(lambda: self._event_factor * time.perf_counter()))

    def time_matmul(self, dtype):
        run = matmul_timer(self.device, dtype)

        def timed(shape, calls):
            self._pipes.flops += calls * matmul_flops(shape)
            return run(shape, calls)

        return timed

    def measure_peak(self, dtype, seconds):
        known = peak_flops(self.facts, dtype)
        if known is None:
            raise MeasurementError(f"{dtype} matmuls failed on {self.facts.name}")
        return Peak(self._peak_share * known.flops_per_s, self.facts.name, dtype, "a fake", "measured", "medium")

    def trace(self, step, steps, file: Path):
        """One kernel per step, which lasts as long as the step took, times `trace_factor`."""
        events, start = [], 4e12
        for number in range(steps):
            began = time.perf_counter()
            step()
            lasts = round(self._trace_factor * 1e6 * (time.perf_counter() - began))
            events.append(event("user_annotation", f"ProfilerStep#{number}", start, lasts, stream=1))
            events.append(event("cuda_runtime", "cudaLaunchKernel", start, 1, stream=1, correlation=number + 1))
            events.append(event("kernel", MATMUL, start, lasts, correlation=number + 1))
            events.append(event("gpu_user_annotation", f"ProfilerStep#{number}", start, lasts))
            start += lasts
        write_trace(file, events)

    def allocate(self, size):
        tensor = torch.empty(size, dtype=torch.uint8)
        self._held.append((weakref.ref(tensor), size))
        self._peak = max(self._peak, self._allocated())
        return tensor

    def _allocated(self):
        return sum(size for tensor, size in self._held if self._leaks or tensor() is not None)

    def memory(self):
        return Memory(self._allocated(), self._peak, self._peak)

    def open_counters(self):
        return open_counters(DeviceIdentity("cuda", self.facts.name), self._counters)


class _TensorPipes:
    """Counters of a device whose tensor cores do the FLOPs of its matmuls. It is a source and its own probe."""

    name = "pipes"
    interval_seconds = 0.0

    def __init__(self, facts, factor):
        self.flops = 0
        self._facts, self._factor = facts, factor
        self._before = (time.perf_counter(), 0)

    def open(self, device):
        return self

    def sample(self):
        now, (began, flops) = (time.perf_counter(), self.flops), self._before
        self._before = now
        rate = (now[1] - flops) / (now[0] - began)
        active = self._factor * rate / peak_flops(self._facts, "bf16").flops_per_s
        return CounterReading(self.name, now[0], tensor_active=active, sm_clock_mhz=peak_clock_mhz(self._facts))

    def close(self):
        pass
