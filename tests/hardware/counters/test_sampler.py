"""The sampling thread: windows, sources that fail or hang, forks, and the end of the interpreter."""

import itertools
import subprocess
import sys
import threading
import time

import pytest

from flopwatch.hardware.counters.protocol import DeviceIdentity
from flopwatch.hardware.counters.sampler import CounterSampler
from flopwatch.testing import FakeClock, FakeCounters

DEVICE = DeviceIdentity("cuda", "Fake GPU", uuid="1234")
KINDS = ("present", "absent", "fails at start", "fails later", "hangs")


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


def source(name, kind):
    return {
        "present": lambda: FakeCounters(name),
        "absent": lambda: FakeCounters(name, absent=f"there is no {name}"),
        "fails at start": lambda: FakeCounters(name, raises=RuntimeError("broken")),
        "fails later": lambda: FakeCounters(name, raises=RuntimeError("lost"), fails_after=2),
        "hangs": lambda: FakeCounters(name, hangs=True, fails_after=1),
    }[kind]()


@pytest.mark.slow
@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, repeat=3)), ids=", ".join)
def test_the_next_source_takes_over_with_one_message(kinds):
    names = ("first", "second", "third")
    sources = [source(name, kind) for name, kind in zip(names, kinds, strict=True)]
    tried = kinds.index("present") + 1 if "present" in kinds else 3
    readable = [name for name, kind in zip(names[:tried], kinds, strict=False) if kind in (KINDS[0], *KINDS[3:])]
    messages, windows, clock = [], [], FakeClock()
    sampler = CounterSampler(
        DEVICE, lambda *message: messages.append(message), probes=sources, interval_seconds=0.0005, clock=clock
    )

    def settled():
        for one in sources:
            if one.is_hanging and one.name not in sampler.reasons:
                clock.advance(5)
        windows.append(sampler.take())
        if "present" in kinds:
            return windows[-1] is not None and windows[-1].source == names[tried - 1]
        return any(code == "counters_absent" for code, _ in messages)

    try:
        until(settled)
        windows.append(sampler.take())
        seen = [name for window in windows if window is not None for name in window.source.split(",")]
        assert [name for name, _ in itertools.groupby(seen)] == readable
        changes = [text for code, text in messages if code == "counters_changed"]
        assert [text.split(".")[0].removeprefix("hardware counters come from ") for text in changes] == [
            name for name in readable if name != "first"
        ]
        absences = [text for code, text in messages if code == "counters_absent"]
        assert len(absences) == ("present" not in kinds)
        assert sampler.source == (names[tried - 1] if "present" in kinds else None)
        passed_over = names[: tried - 1] if "present" in kinds else names
        assert tuple(sampler.reasons) == passed_over
        for name in passed_over:
            assert name in messages[-1][1]
    finally:
        for one in sources:
            one.release()
        sampler.close()


def test_a_window_has_the_means_of_its_readings():
    counters = FakeCounters("fake", [{"tensor_active": 0.2}, {"tensor_active": 0.4}])
    sampler = CounterSampler(DEVICE, probes=[counters], interval_seconds=0.001)
    until(lambda: counters.sampled >= 3)
    sampler.close()
    window = sampler.take()
    assert window.source == "fake"
    assert window.tensor_active == pytest.approx((0.2 + 0.4 * (window.readings - 1)) / window.readings)
    assert counters.closed == 1


@pytest.mark.slow
def test_energy_is_counted_from_the_last_reading_of_the_window_before():
    counters = FakeCounters("fake", [{"energy_joules": 10.0 * place} for place in range(100_000)])
    sampler = CounterSampler(DEVICE, probes=[counters], interval_seconds=0.001)
    first = next_window(sampler)
    later = [next_window(sampler) for _ in range(5)]
    sampler.close()
    assert first.energy_joules == (None if first.readings == 1 else 10.0 * (first.readings - 1))
    assert [window.energy_joules for window in later] == [10.0 * window.readings for window in later]


def test_without_a_reading_since_the_last_call_there_is_no_window():
    sampler = CounterSampler(DEVICE, probes=[FakeCounters()], interval_seconds=1000)
    next_window(sampler)
    assert sampler.take() is None
    sampler.close()


def test_a_source_that_wants_longer_intervals_gets_them():
    slow = FakeCounters(interval_seconds=1000)
    sampler = CounterSampler(DEVICE, probes=[slow], interval_seconds=0.0001)
    next_window(sampler)
    time.sleep(0.05)
    sampler.close()
    assert slow.sampled == 1


@pytest.mark.parametrize(("window_seconds", "interval"), [(0.1, 0.5), (3.0, 0.6), (5.0, 1.0), (3600.0, 1.0)])
def test_a_window_has_five_readings_within_the_shortest_and_the_longest_interval(window_seconds, interval):
    clock = FakeClock()
    sampler = CounterSampler(DEVICE, probes=[FakeCounters()], clock=clock)
    for _ in range(2):
        clock.advance(window_seconds)
        sampler.take()
    assert sampler.interval_seconds == pytest.approx(interval)
    sampler.close()


def test_a_device_that_no_source_knows_is_told_once():
    messages = []
    sampler = CounterSampler(DeviceIdentity("xpu", "Max 1550"), lambda *message: messages.append(message))
    until(lambda: messages)
    sampler.close()
    assert messages == [("counters_absent", "no hardware counters are read. No source knows this device")]


def test_sources_with_the_same_reason_stand_together():
    messages = []
    sources = [FakeCounters(name, absent="no driver") for name in ("one", "two")]
    sampler = CounterSampler(DEVICE, lambda *message: messages.append(message), probes=sources)
    until(lambda: messages)
    sampler.close()
    assert messages[0][1] == "no hardware counters are read. one, two: no driver"


def test_a_notice_that_raises_does_not_end_the_sampling():
    def raises(*_):
        raise ValueError("a broken sink")

    sampler = CounterSampler(DEVICE, raises, probes=[FakeCounters("a", absent="gone"), FakeCounters("b")])
    assert next_window(sampler).source == "b"
    sampler.close()


def test_a_source_that_leaves_the_thread_is_passed_over():
    sources = [FakeCounters("a", raises=SystemExit(3)), FakeCounters("b")]
    sampler = CounterSampler(DEVICE, probes=sources)
    assert next_window(sampler).source == "b"
    sampler.close()


def test_a_source_that_cannot_be_closed_is_passed_over():
    class Stuck(FakeCounters):
        def close(self):
            raise SystemExit(3)

    sampler = CounterSampler(DEVICE, probes=[Stuck("a", raises=RuntimeError("lost")), FakeCounters("b")])
    assert next_window(sampler).source == "b"
    sampler.close()


def test_a_hanging_source_holds_up_neither_take_nor_close():
    hanging = FakeCounters(hangs=True)
    sampler = CounterSampler(DEVICE, probes=[hanging])
    until(lambda: hanging.is_hanging)
    assert sampler.take() is None
    sampler.close()
    assert hanging.is_hanging
    hanging.release()
    until(lambda: hanging.closed)
    assert sampler.take() is None


def test_a_driver_that_hangs_while_it_is_opened_is_passed_over():
    opening = threading.Event()

    class Hanging(FakeCounters):
        def open(self, device=None):
            opening.set()
            self._released.wait()
            return self

    clock, hanging = FakeClock(), Hanging("a")
    sampler = CounterSampler(DEVICE, probes=[hanging, FakeCounters("b")], clock=clock)
    assert opening.wait(20)
    clock.advance(4.9)
    assert sampler.take() is None
    assert not sampler.reasons
    clock.advance(0.2)
    assert sampler.take() is None  # it may be the main thread that did not let the other one run
    clock.advance(1.1)
    assert next_window(sampler).source == "b"
    assert sampler.reasons == {"a": "it did not answer for 5 s"}
    hanging.release()
    sampler.close()


def test_a_main_thread_that_was_busy_or_stopped_does_not_make_a_source_hang():
    """For 60 s no other thread ran, as while a large object is pickled, while a source was being read."""
    clock, slow = FakeClock(), FakeCounters("a", hangs=True, fails_after=1)
    sampler = CounterSampler(DEVICE, probes=[slow, FakeCounters("b")], interval_seconds=0.001, clock=clock)
    until(lambda: slow.is_hanging)
    clock.advance(60.0)
    sampler.take()
    slow.release()  # now the sampling thread runs again
    until(lambda: slow.sampled > 2)
    clock.advance(60.0)
    sampler.take()
    until(lambda: slow.sampled > 5)
    assert (next_window(sampler).source, sampler.reasons) == ("a", {})
    sampler.close()


def test_readings_that_nobody_takes_are_dropped_from_the_oldest_on():
    counters = FakeCounters()
    sampler = CounterSampler(DEVICE, probes=[counters], interval_seconds=0)
    until(lambda: counters.sampled > 6000)
    sampler.close()
    assert sampler.take().readings == 5000


SCRIPT = """
import os, sys, threading, time
from flopwatch.hardware.counters.protocol import DeviceIdentity
from flopwatch.hardware.counters.sampler import CounterSampler
from flopwatch.testing import FakeCounters
counters = FakeCounters(hangs={hangs})
sampler = CounterSampler(DeviceIdentity("cuda", "x"), probes=[counters], interval_seconds=0.001)
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
