"""The sampling thread: windows, sources that fail or hang, forks, and the end of the interpreter."""

import time

import pytest

from flopwatch.hardware.counters.protocol import DeviceIdentity
from flopwatch.hardware.counters.sampler import CounterSampler
from flopwatch.testing import FakeCounters

DEVICE = DeviceIdentity("cuda", "Fake GPU", uuid="1234")


def next_window(sampler, seconds=5.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        window = sampler.take()
        if window is not None:
            return window
        time.sleep(0.002)
    pytest.fail(f"no window within {seconds} s")


def test_a_window_has_the_means_of_its_readings():
    counters = FakeCounters("fake", [{"tensor_active": 0.2}, {"tensor_active": 0.4}])
    sampler = CounterSampler(DEVICE, probes=[counters], interval_seconds=0.001)
    try:
        while counters.sampled < 3:
            time.sleep(0.002)
        window = next_window(sampler)
        assert window.source == "fake"
        assert window.tensor_active == pytest.approx((0.2 + 0.4 * (window.readings - 1)) / window.readings)
    finally:
        sampler.close()
    assert counters.closed == 1
