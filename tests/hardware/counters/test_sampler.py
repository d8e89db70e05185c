"""The sampling thread: windows, sources that fail or hang, forks, and the end of the interpreter."""

import subprocess
import sys
import threading
import time

import pytest

from flopwatch.hardware.counters.protocol import DeviceIdentity
from flopwatch.hardware.counters.sampler import CounterSampler, read_once
from flopwatch.testing import FakeClock, FakeCounters

DEVICE = DeviceIdentity("cuda", "Fake GPU", uuid="1234")


def until(happens, seconds=20.0):
    """Wait for what another thread does."""
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, f"it did not happen within {seconds} s"
        time.sleep(0.001)


def next_window(sampler):
    windows = []
    until(lambda: windows.append(sampler.take()) or windows[-1] is not None)
    return windows[-1]


@pytest.mark.parametrize(
    ("counters", "why"),
    [
        (FakeCounters(absent="it is not installed"), "it is not installed"),
        (FakeCounters(raises=RuntimeError("lost\nfor ever")), "RuntimeError: lost"),
        (FakeCounters(raises=OSError("lost"), fails_after=3), "OSError: lost"),
        (FakeCounters(raises=SystemExit(3)), "SystemExit: 3"),
    ],
)
def test_a_source_that_is_absent_or_fails_is_given_up_and_told_once(counters, why):
    told = []
    sampler = CounterSampler(DEVICE, told.append, open_source=counters.open, interval_seconds=0.001)
    until(lambda: told)
    time.sleep(0.05)
    assert (told, sampler.why_absent, sampler.source) == ([why], why, None)
    assert counters.sampled <= 4
    sampler.close()


def test_a_window_has_the_means_of_its_readings():
    counters = FakeCounters("fake", [{"tensor_active": 0.2}, {"tensor_active": 0.4}])
    sampler = CounterSampler(DEVICE, open_source=counters.open, interval_seconds=0.001)
    until(lambda: counters.sampled >= 3)
    sampler.close()
    window = sampler.take()
    assert window.source == "fake"
    assert window.tensor_active == pytest.approx((0.2 + 0.4 * (window.readings - 1)) / window.readings)
    assert counters.closed == 1


@pytest.mark.slow
def test_energy_is_counted_from_the_last_reading_of_the_window_before():
    counters = FakeCounters("fake", [{"energy_joules": 10.0 * place} for place in range(100_000)])
    sampler = CounterSampler(DEVICE, open_source=counters.open, interval_seconds=0.001)
    first = next_window(sampler)
    later = [next_window(sampler) for _ in range(5)]
    sampler.close()
    assert first.energy_joules == (None if first.readings == 1 else 10.0 * (first.readings - 1))
    assert [window.energy_joules for window in later] == [10.0 * window.readings for window in later]


def test_without_a_reading_since_the_last_call_there_is_no_window():
    sampler = CounterSampler(DEVICE, open_source=FakeCounters().open, interval_seconds=1000)
    next_window(sampler)
    assert sampler.take() is None
    sampler.close()


@pytest.mark.parametrize(("window_seconds", "interval"), [(0.1, 0.5), (3.0, 0.6), (5.0, 1.0), (3600.0, 1.0)])
def test_a_window_has_five_readings_within_the_shortest_and_the_longest_interval(window_seconds, interval):
    clock = FakeClock()
    sampler = CounterSampler(DEVICE, open_source=FakeCounters().open, clock=clock)
    for _ in range(2):
        clock.advance(window_seconds)
        sampler.take()
    assert sampler.interval_seconds == pytest.approx(interval)
    sampler.close()


def test_a_notice_that_raises_is_not_the_end_of_the_program():
    def raises(why):
        raise ValueError("a broken sink")

    sampler = CounterSampler(DEVICE, raises, open_source=FakeCounters(absent="gone").open)
    until(lambda: sampler.why_absent)
    sampler.close()


def test_a_source_that_cannot_be_closed_is_given_up():
    class Stuck(FakeCounters):
        def close(self):
            raise SystemExit(3)

    sampler = CounterSampler(DEVICE, open_source=Stuck(raises=RuntimeError("lost")).open)
    until(lambda: sampler.why_absent == "RuntimeError: lost")
    sampler.close()


def test_a_hanging_source_holds_up_neither_take_nor_close():
    hanging = FakeCounters(hangs=True)
    sampler = CounterSampler(DEVICE, open_source=hanging.open)
    until(lambda: hanging.is_hanging)
    assert sampler.take() is None
    sampler.close()
    assert hanging.is_hanging
    hanging.release()
    until(lambda: hanging.closed)
    assert sampler.take() is None


def test_a_driver_that_hangs_while_it_is_opened_is_given_up():
    opening = threading.Event()

    class Hanging(FakeCounters):
        def open(self, device=None):
            opening.set()
            self._released.wait()
            return self

    clock, hanging, told = FakeClock(), Hanging(), []
    sampler = CounterSampler(DEVICE, told.append, open_source=hanging.open, clock=clock)
    assert opening.wait(20)
    clock.advance(4.9)
    assert sampler.take() is None
    assert not told
    clock.advance(0.2)
    assert sampler.take() is None
    assert not told  # it may be the main thread that did not let the other one run
    clock.advance(1.1)
    assert sampler.take() is None
    assert told == [sampler.why_absent] == ["the driver did not answer for 5 s"]
    hanging.release()
    sampler.close()


def test_a_main_thread_that_was_busy_or_stopped_does_not_make_a_source_hang():
    """For 60 s no other thread ran, as while a large object is pickled, while a source was being read."""
    clock, slow = FakeClock(), FakeCounters("a", hangs=True, fails_after=1)
    sampler = CounterSampler(DEVICE, open_source=slow.open, interval_seconds=0.001, clock=clock)
    until(lambda: slow.is_hanging)
    clock.advance(60.0)
    sampler.take()
    slow.release()  # now the sampling thread runs again
    until(lambda: slow.sampled > 2)
    clock.advance(60.0)
    sampler.take()
    until(lambda: slow.sampled > 5)
    assert (next_window(sampler).source, sampler.why_absent) == ("a", "")
    sampler.close()


def test_readings_that_nobody_takes_are_dropped_from_the_oldest_on():
    counters = FakeCounters()
    sampler = CounterSampler(DEVICE, open_source=counters.open, interval_seconds=0)
    until(lambda: counters.sampled > 6000)
    sampler.close()
    assert sampler.take().readings == 5000


SCRIPT = """
import os, sys, threading, time
from flopwatch.hardware.counters.protocol import DeviceIdentity
from flopwatch.hardware.counters.sampler import CounterSampler
from flopwatch.testing import FakeCounters
counters = FakeCounters(hangs={hangs})
sampler = CounterSampler(DeviceIdentity("cuda", "x"), open_source=counters.open, interval_seconds=0.001)
while not counters.sampled:
    time.sleep(0.001)
{then}
"""
IN_THE_CHILD = """
child = os.fork()
if child == 0:
    before = counters.sampled
    time.sleep(0.05)
    alone = threading.active_count() == 1 and counters.sampled == before and sampler.take() is None
    sampler.close()
    os._exit(0 if alone else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("hangs", "then"), [(True, ""), (False, ""), (False, IN_THE_CHILD), (True, IN_THE_CHILD)])
def test_the_process_ends_and_a_forked_child_does_not_sample(hangs, then):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(hangs=hangs, then=then)],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_one_reading_or_the_reason_why_there_is_none():
    window, why = read_once(DEVICE, FakeCounters(readings=[{"power_watts": 300.0}]).open)
    assert (window.power_watts, why) == (300.0, "")
    assert read_once(DEVICE, FakeCounters(absent="no driver").open) == (None, "no driver")
    hanging = FakeCounters(hangs=True)
    assert read_once(DEVICE, hanging.open, seconds=0.1) == (None, "the driver did not answer for 0.1 s")
    hanging.release()
