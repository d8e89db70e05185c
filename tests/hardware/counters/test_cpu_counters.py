"""Energy of CPUs from a real folder tree, and the kernel's perf with an event that every machine has."""

import os
import subprocess
import sys
import threading
import time

import pytest

from flopwatch.hardware.counters.cpu import (
    AMD_EVENTS,
    INTEL_EVENTS,
    PerfEvent,
    PerfProbe,
    RaplProbe,
    events_of_cpu,
    flops_between,
)
from flopwatch.hardware.counters.protocol import CountersUnavailableError, DeviceIdentity
from flopwatch.records.counters import window_of
from flopwatch.testing import FakeClock

CPU = DeviceIdentity("cpu", "a processor")
RANGE = 262_143_328_850
TASK_CLOCK = PerfEvent(1, 1, type=1)  # PERF_TYPE_SOFTWARE: nanoseconds of processor time


def powercap(root, **packages):
    """Two sockets with their parts, and the whole computer, as in /sys/class/powercap."""
    names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "dram", "intel-rapl:1": "package-1", "intel-rapl:2": "psys"}
    for folder, name in names.items():
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "name").write_text(name + "\n")
        (root / folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
        (root / folder / "energy_uj").write_text(f"{packages.get(name.replace('-', '_'), 7_000_000)}\n")


def test_energy_is_that_of_all_sockets_without_their_parts_counted_twice(tmp_path):
    clock = FakeClock()
    powercap(tmp_path, package_0=1_000_000, package_1=5_000_000)
    counters = RaplProbe(tmp_path, clock).open(CPU)
    first = counters.sample()
    powercap(tmp_path, package_0=3_000_000, package_1=9_000_000, dram=8_000_000, psys=99_000_000)
    clock.advance(2.0)
    second = counters.sample()
    assert second.energy_joules - first.energy_joules == pytest.approx(6.0)
    assert second.power_watts == pytest.approx(3.0)
    assert second.source == "rapl"


def test_a_counter_that_begins_again_does_not_lose_energy(tmp_path):
    powercap(tmp_path, package_0=RANGE - 1_000_000)
    counters = RaplProbe(tmp_path).open(CPU)
    powercap(tmp_path, package_0=2_000_000)
    assert counters.sample().energy_joules == pytest.approx(3.0)


def test_energy_never_shrinks_over_many_turns_of_the_counter(tmp_path):
    counters, joules, clock = None, 0.0, FakeClock()
    for turn in range(20):
        powercap(tmp_path, package_0=(turn * 50_000_000_000) % RANGE)
        counters = counters or RaplProbe(tmp_path, clock).open(CPU)
        clock.advance(100.0)
        joules = counters.sample().energy_joules
    assert joules == pytest.approx(19 * 50_000)


def test_energy_is_unknown_over_a_counter_that_began_again_before_its_end(tmp_path):
    """As after a suspension: the turn of the counter would be 252 kJ in a second."""
    clock, readings = FakeClock(), []
    powercap(tmp_path, package_0=5_000_000_000)
    counters = RaplProbe(tmp_path, clock).open(CPU)
    for microjoules in (10_000_000_000, 100_000, 50_100_000, 100_100_000):
        clock.advance(1.0)
        powercap(tmp_path, package_0=microjoules)
        readings.append(counters.sample())
    assert [reading.power_watts for reading in readings] == [5000, None, 50, 50]
    assert window_of(readings[1:2], readings[0]).energy_joules is None
    assert window_of(readings).energy_joules is None
    assert window_of(readings[2:], readings[1]).energy_joules == pytest.approx(100)


def test_without_the_folder_it_is_said_that_the_kernel_shows_none(tmp_path):
    with pytest.raises(CountersUnavailableError, match="no energy counters"):
        RaplProbe(tmp_path / "powercap").open(CPU)


def test_counters_that_only_root_may_read_are_told_with_the_command(tmp_path, monkeypatch):
    powercap(tmp_path)
    file = tmp_path / "intel-rapl:0" / "energy_uj"
    if os.geteuid() == 0:  # root may read everything
        real = type(file).read_text

        def read_text(self, *more, **named):
            if self == file:
                raise PermissionError(13, "Permission denied", str(self))
            return real(self, *more, **named)

        monkeypatch.setattr(type(file), "read_text", read_text)
    else:
        file.chmod(0)
    with pytest.raises(CountersUnavailableError, match="chmod o\\+r"):
        RaplProbe(tmp_path).open(CPU)


def test_a_counter_that_is_no_number_is_told(tmp_path):
    powercap(tmp_path)
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("?\n")
    with pytest.raises(CountersUnavailableError, match="cannot be read"):
        RaplProbe(tmp_path).open(CPU)


def cpuinfo(root, vendor, family, flags):
    (root / "sys/bus/event_source/devices/cpu").mkdir(parents=True)
    (root / "proc").mkdir()
    facts = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nmodel name\t: Some CPU\nflags\t\t: {flags}\n"
    (root / "proc/cpuinfo").write_text(f"processor\t: 0\n{facts}\nprocessor\t: 1\n{facts}\n")


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "events"),
    [
        ("GenuineIntel", 6, "avx2 adx", INTEL_EVENTS),  # Broadwell
        ("GenuineIntel", 6, "avx2 adx avx512f avx_vnni", INTEL_EVENTS),  # Sapphire Rapids
        ("AuthenticAMD", 0x19, "avx2 adx clwb", AMD_EVENTS),  # Zen 3
        ("GenuineIntel", 6, "avx2", None),  # Haswell
        ("GenuineIntel", 6, "avx2 adx avx_vnni", None),  # Sierra Forest
        ("AuthenticAMD", 0x17, "avx2 adx", None),  # Zen 1
        ("ARM", 8, "", None),
    ],
)
def test_events_are_used_on_known_processors_only(tmp_path, vendor, family, flags, events):
    cpuinfo(tmp_path, vendor, family, flags)
    if events is None:
        with pytest.raises(CountersUnavailableError, match="it is not known how Some CPU counts FLOPs"):
            events_of_cpu(tmp_path)
    else:
        assert events_of_cpu(tmp_path) == events


def test_without_a_pmu_it_is_said_that_the_kernel_offers_none(tmp_path):
    with pytest.raises(CountersUnavailableError, match="as in most virtual machines"):
        events_of_cpu(tmp_path)


def test_the_flops_of_intels_events_are_their_lanes():
    assert [event.flops for event in INTEL_EVENTS] == [1, 1, 2, 4, 4, 8, 8, 16]
    assert [hex(event.config) for event in INTEL_EVENTS[:3]] == ["0x1c7", "0x2c7", "0x4c7"]


def perf(*events):
    try:
        return PerfProbe(events).open(CPU)
    except CountersUnavailableError as error:
        pytest.skip(f"this kernel permits no perf: {error}")


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("where", ["the thread itself", "a new thread", "a thread from before", "a child"])
def test_what_runs_in_threads_and_children_is_counted(where):
    """The kernel's own count of processor time is read through the same calls; the truth is the time that was spun."""
    go, done = threading.Event(), threading.Event()
    before = threading.Thread(target=lambda: (go.wait(), spin(0.1), done.set()))
    before.start()
    counters = perf(TASK_CLOCK)
    first = counters.sample()
    if where == "the thread itself":
        spin(0.1)
    elif where == "a new thread":
        new = threading.Thread(target=spin, args=(0.1,))
        new.start()
        new.join()
    elif where == "a child":
        code = "import time\nwhile time.process_time() < 0.1: pass"
        subprocess.run([sys.executable, "-S", "-c", code], check=True)
    else:
        go.set()
        done.wait()
    reading = counters.sample()
    nanoseconds = reading.flops_per_s * (reading.seconds - first.seconds)
    go.set()
    before.join()
    counters.close()
    assert 0.09e9 < nanoseconds < 1e9


def test_an_event_stands_for_as_many_flops_as_it_says():
    once, eightfold = perf(TASK_CLOCK), perf(PerfEvent(1, 8, type=1))
    spin(0.1)
    assert eightfold.sample().flops_per_s > 4 * once.sample().flops_per_s
    once.close()
    eightfold.close()


@pytest.mark.parametrize(
    ("between", "flops"),
    [
        ((100, 2, 2), 400),  # counted all the time
        ((100, 4, 2), 800),  # half of the time, so twice as many
        ((0, 2, 2), 0),  # no event, after a time in which half of the time was counted
        ((0, 0, 0), 0),  # no thread ran
        ((0, 2, 0), None),  # other events had the counter all the time
    ],
)
def test_events_that_take_turns_are_scaled_by_their_time_between_two_readings(between, flops):
    event, before = PerfEvent(1, 4), (100, 2, 1)
    after = tuple(old + new for old, new in zip(before, between, strict=True))
    assert flops_between({event: before}, {event: after}) == flops


def test_closed_counters_leave_no_open_files():
    before = len(os.listdir("/proc/self/fd"))
    counters = perf(TASK_CLOCK, TASK_CLOCK)
    assert len(os.listdir("/proc/self/fd")) > before
    counters.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_event_that_the_kernel_does_not_have_is_told():
    perf(TASK_CLOCK).close()
    with pytest.raises(CountersUnavailableError, match="the kernel offers no counters"):
        PerfProbe((PerfEvent(999, 1, type=1),)).open(CPU)
