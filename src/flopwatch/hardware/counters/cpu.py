"""Counters of CPUs: energy by RAPL, and floating-point operations by the processor's counters (perf)."""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.hardware.counters.protocol import CounterSource, CountersUnavailableError, DeviceIdentity
from flopwatch.hardware.cpu import read_cpu
from flopwatch.records.counters import CounterReading

_POWERCAP = Path("/sys/class/powercap")
_MOST_WATTS = 10_000.0
"""More than the processors of any machine draw."""


class RaplProbe:
    """Opens the energy counters of the processor's packages (sockets)."""

    name = "rapl"

    def __init__(self, root: Path = _POWERCAP, clock: Clock = monotonic_seconds) -> None:
        self._root, self._clock = root, clock

    def open(self, device: DeviceIdentity) -> CounterSource:
        packages = [folder for folder in sorted(self._root.glob("intel-rapl:*")) if _is_package(folder)]
        if not packages:
            raise CountersUnavailableError(
                f"the kernel shows no energy counters (RAPL) in {self._root}, as in most virtual machines"
            )
        try:
            return RaplCounters(packages, self._clock)
        except PermissionError as error:
            raise CountersUnavailableError(
                f"{error.filename} may be read by root only; as root: chmod o+r {self._root}/intel-rapl:*/energy_uj"
            ) from error
        except (OSError, ValueError) as error:
            raise CountersUnavailableError(f"the energy counters (RAPL) cannot be read: {error}") from error


class RaplCounters:
    """Reads the energy of all packages together. A counter begins again after some minutes, which is noticed only if
    it is read at least once in this time.
    """

    name = "rapl"
    interval_seconds = 0.0

    def __init__(self, packages: list[Path], clock: Clock) -> None:
        self._clock = clock
        self._files = [package / "energy_uj" for package in packages]
        self._ranges = [_integer(package / "max_energy_range_uj") for package in packages]
        self._last = [_integer(file) for file in self._files]
        self._seconds = clock()
        self._joules = 0.0

    def sample(self) -> CounterReading:
        counts, seconds = [_integer(file) for file in self._files], self._clock()
        used = 0.0
        for now, before, range_ in zip(counts, self._last, self._ranges, strict=True):
            used += (now - before if now >= before else now - before + range_) / 1e6
        elapsed = seconds - self._seconds
        watts: float | None = used / elapsed if elapsed > 0 else None
        if used > _MOST_WATTS * (elapsed + 1.0):
            # A counter began again before its end, as after a suspension. This count does too, so it is noticed.
            watts, used = None, -self._joules
        self._last, self._seconds, self._joules = counts, seconds, self._joules + used
        return CounterReading(self.name, seconds, power_watts=watts, energy_joules=self._joules)

    def close(self) -> None:
        pass


def _is_package(folder: Path) -> bool:
    """Whether it is a socket, and not a part of one (`core`, `dram`) or the whole computer (`psys`)."""
    with suppress(OSError):
        return (folder / "name").read_text().startswith("package")
    return False


def _integer(file: Path) -> int:
    return int(file.read_text())


_RAW_EVENTS = 4  # PERF_TYPE_RAW
_EVENT: Final = struct.Struct("=IIQQQQQIIQ")
"""The first version of the kernel's `perf_event_attr`: type, size, config, period, sample type, read format, flags."""
_READ: Final = struct.Struct("=QQQ")
_WITH_TIMES = 1 | 2  # PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING
_INHERIT, _NO_KERNEL, _NO_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8
_SYSTEM_CALL: Final = {"x86_64": 298, "aarch64": 241}


@dataclass(frozen=True, slots=True)
class PerfEvent:
    """An event of the processor, and the FLOPs that one of it stands for."""

    config: int
    flops: int
    type: int = _RAW_EVENTS


Counts = Mapping[PerfEvent, tuple[int, int, int]]
"""Of each event in all threads: its count, the time in which it was to be counted, and that in which it was."""

# FP_ARITH_INST_RETIRED; an FMA counts as two events. Intel Software Developer's Manual, volume 3, chapter 20.
INTEL_EVENTS: Final = tuple(
    PerfEvent(umask << 8 | 0xC7, lanes)
    for umask, lanes in ((1, 1), (2, 1), (4, 2), (8, 4), (0x10, 4), (0x20, 8), (0x40, 8), (0x80, 16))
)
# Retired SSE and AVX FLOPs. AMD Processor Programming Reference, PMCx003.
AMD_EVENTS: Final = (PerfEvent(0x0F03, 1),)


class PerfProbe:
    """Opens the processor's counters of floating-point operations for this process and what it starts."""

    name = "perf"

    def __init__(
        self, events: tuple[PerfEvent, ...] | None = None, root: Path = Path("/"), clock: Clock = monotonic_seconds
    ) -> None:
        self._events, self._root, self._clock = events, root, clock

    def open(self, device: DeviceIdentity) -> CounterSource:
        events = events_of_cpu(self._root) if self._events is None else self._events
        return PerfCounters(events, self._clock)


class PerfCounters:
    """Counts events of all threads that run now, and of the threads and processes that they start.

    Never run on a machine with such counters; the tests count an event of the kernel instead.
    """

    name = "perf"
    interval_seconds = 1.0

    def __init__(self, events: tuple[PerfEvent, ...], clock: Clock) -> None:
        self._clock = clock
        self._files: list[tuple[int, PerfEvent]] = []
        try:
            for thread in os.listdir("/proc/self/task"):
                for event in events:
                    self._open(event, int(thread))
        except OSError as error:
            self.close()
            raise CountersUnavailableError(_why_no_perf(error)) from error
        self._seconds, self._counts = clock(), self._read()

    def sample(self) -> CounterReading:
        seconds, counts = self._clock(), self._read()
        flops, elapsed = flops_between(self._counts, counts), seconds - self._seconds
        rate = None if flops is None or elapsed <= 0 else flops / elapsed
        self._seconds, self._counts = seconds, counts
        return CounterReading(self.name, seconds, flops_per_s=rate)

    def close(self) -> None:
        for file, _ in self._files:
            with suppress(OSError):
                os.close(file)
        self._files.clear()

    def _open(self, event: PerfEvent, thread: int) -> None:
        with suppress(ProcessLookupError):  # the thread has ended
            self._files.append((_perf_event_open(event, thread), event))

    def _read(self) -> Counts:
        sums: dict[PerfEvent, tuple[int, int, int]] = {}
        for file, event in self._files:
            read, before = _READ.unpack(os.read(file, _READ.size)), sums.get(event, (0, 0, 0))
            sums[event] = (before[0] + read[0], before[1] + read[1], before[2] + read[2])
        return sums


def flops_between(before: Counts, after: Counts) -> float | None:
    """FLOPs between two readings; None if an event was never counted in between.

    Events take turns if the processor has too few counters, so each is scaled by its share of this time. Differences
    of counts that were scaled since the beginning may be negative.
    """
    total = 0.0
    for event, now in after.items():
        count, enabled, running = (new - old for new, old in zip(now, before[event], strict=True))
        if enabled and not running:
            return None
        total += event.flops * count * enabled / running if running else 0.0
    return total


def events_of_cpu(root: Path = Path("/")) -> tuple[PerfEvent, ...]:
    """The events that count floating-point operations of this machine's processor."""
    if sys.platform != "linux" or not (root / "sys/bus/event_source/devices/cpu").exists():
        raise CountersUnavailableError(
            "the kernel offers no counters of the processor here, as in most virtual machines and on hybrid processors"
        )
    facts = read_cpu(root)
    flags, identity = facts.flags, dict(facts.identity)
    vendor, family = identity.get("vendor_id"), int(identity.get("family") or 0)
    # ADX came with Broadwell, as these events did; cores with AVX-VNNI but without AVX-512 count them otherwise.
    if vendor == "GenuineIntel" and "adx" in flags and ("avx_vnni" not in flags or "avx512f" in flags):
        return INTEL_EVENTS
    if vendor == "AuthenticAMD" and family >= 0x17 and "clwb" in flags:  # Zen 2 and newer
        return AMD_EVENTS
    name = "this processor" if facts.name == "cpu" else facts.name
    raise CountersUnavailableError(f"it is not known how {name} counts FLOPs")


def _perf_event_open(event: PerfEvent, thread: int) -> int:
    number = _SYSTEM_CALL.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    flags = _INHERIT | _NO_KERNEL | _NO_HYPERVISOR
    attributes = _EVENT.pack(event.type, _EVENT.size, event.config, 0, 0, _WITH_TIMES, flags, 0, 0, 0)
    buffer = ctypes.create_string_buffer(attributes, _EVENT.size)
    library = ctypes.CDLL(None, use_errno=True)
    file = int(library.syscall(number, buffer, thread, -1, -1, ctypes.c_ulong(_CLOSE_ON_EXEC)))
    if file < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return file


def _why_no_perf(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return (
            "the kernel does not permit perf; as root: sysctl kernel.perf_event_paranoid=2 (in a container, also "
            "--cap-add PERFMON)"
        )
    if error.errno in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV):
        return "the kernel offers no counters of floating-point operations here, as in most virtual machines"
    return f"perf_event_open fails: {error}"
