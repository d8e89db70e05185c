"""Measures the processor time of the thread that samples hardware counters: `python counter_sampling.py [SECONDS]`.

NVIDIA's real bindings talk to a compiled stand-in for the driver's library, so the time of the driver itself is not in
the figures.
"""

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from flopwatch.hardware.counters.protocol import DeviceIdentity
from flopwatch.hardware.counters.sampler import SHORTEST_INTERVAL_SECONDS, CounterSampler
from testbeds import stand_in_nvml

UUID = "5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
WINDOWS = ((10.0, SHORTEST_INTERVAL_SECONDS), (1.0, SHORTEST_INTERVAL_SECONDS), (1.0, 0.2))
"""Length of a window, and the shortest interval of the readings; the last one is not what a monitor does."""


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    head = ("source", "the training", "interval", "readings", "µs per reading", "% of a core", "take(), µs")
    print("{:<10} {:<22} {:>9} {:>9} {:>15} {:>12} {:>11}".format(*head))
    with tempfile.TemporaryDirectory() as folder:
        library = stand_in_nvml.build(Path(folder))
        for has_gpm in (1, 0):
            for name, work in {"waits": time.sleep, "computes (one thread)": _compute}.items():
                for window_seconds, shortest in WINDOWS:
                    with stand_in_nvml.connected(library) as nvml:
                        nvml.set(nvml.gpu(UUID, "0000:3b:00.0", **stand_in_nvml.LOADED_H100), has_gpm=has_gpm)
                        _print_row(name, seconds, work, window_seconds, shortest)


def _print_row(
    name: str, seconds: float, work: Callable[[float], None], window_seconds: float, shortest: float
) -> None:
    sampler = CounterSampler(DeviceIdentity("cuda", "H100", UUID), interval_seconds=shortest)
    while sampler.take() is None:
        time.sleep(0.01)
    work(window_seconds)
    sampler.take()
    thread = next(one for one in threading.enumerate() if one.name == "flopwatch-counters")
    before, began, readings, takes = _cpu_seconds(thread), time.monotonic(), 0, []
    while time.monotonic() - began < seconds:
        work(window_seconds)
        taking = time.perf_counter()
        window = sampler.take()
        takes.append(time.perf_counter() - taking)
        readings += window.readings if window else 0
    used, elapsed = _cpu_seconds(thread) - before, time.monotonic() - began
    print(
        f"{sampler.source:<10} {name:<22} {sampler.interval_seconds:>7.1f} s {readings:>9} "
        f"{used / readings * 1e6:>15.1f} {100 * used / elapsed:>12.4f} {statistics.median(takes) * 1e6:>11.1f}",
        flush=True,
    )
    sampler.close()


def _cpu_seconds(thread: threading.Thread) -> float:
    """Processor time of a thread, in nanoseconds resolution; the other files of /proc have ticks of 10 ms."""
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


def _compute(seconds: float) -> None:
    """Matrix products of a few milliseconds, which evict what the sampling thread had in the caches."""
    torch.set_num_threads(1)
    one = torch.randn(1024, 1024)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        one @ one


if __name__ == "__main__":
    main()
