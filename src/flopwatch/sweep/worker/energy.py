"""The energy of a trial's measured steps, by two readings of a hardware counter."""

import os
import socket
from collections.abc import Hashable, Sequence
from contextlib import suppress

import torch

from flopwatch.guard import Guard
from flopwatch.hardware.counters.chain import open_counters
from flopwatch.hardware.counters.protocol import CounterSource, DeviceIdentity
from flopwatch.hardware.identity import identify
from flopwatch.records.counters import CounterReading, window_of
from flopwatch.sweep.host.processes import usable_cores

_LEAST_SECONDS = 0.5
"""Drivers update their energy counters some ten times per second, so that shorter times say little."""


class StepEnergy:
    """Measures what the device of this process uses in the measured steps. Its methods never raise.

    A CPU's counter is that of the whole package, so it is used only if the trial has all cores and one process.

    Attributes:
        place: The host and the device, which several processes may share.
    """

    def __init__(self, device: torch.device, *, is_alone: bool) -> None:
        self._source: CounterSource | None = None
        self._first: CounterReading | None = None
        self.place: tuple[str, DeviceIdentity | None] = (socket.gethostname(), None)
        if device.type == "cpu" and not (is_alone and len(usable_cores()) == os.cpu_count()):
            return
        with Guard("energy"):
            identity = identify(device)
            self.place = (self.place[0], identity)
            self._source = open_counters(identity).source

    def start(self) -> None:
        self._first = self._read()

    def joules_per_step(self, steps: int) -> float | None:
        """Energy per step since `start`; None if it is unknown, or if too little time has passed."""
        last = self._read()
        if self._source is not None:
            with suppress(Exception):
                self._source.close()
        window = None if last is None or self._first is None else window_of([last], self._first)
        if window is None or not window.energy_joules or not steps or window.seconds < _LEAST_SECONDS:
            return None
        return window.energy_joules / steps

    def _read(self) -> CounterReading | None:
        with Guard("an energy reading"):
            return None if self._source is None else self._source.sample()
        return None


def job_energy(of_processes: Sequence[tuple[Hashable, float | None]]) -> float | None:
    """The energy of all devices, each with its place; None if it is unknown on one of them.

    >>> job_energy([("gpu 0", 2.0), ("gpu 1", 3.0)]), job_energy([("gpu 0", 2.0), ("gpu 0", 2.0)])
    (5.0, 2.0)
    >>> job_energy([("gpu 0", 2.0), ("gpu 1", None)]) is None
    True
    """
    by_device = dict(of_processes)
    return None if None in by_device.values() else sum(filter(None, by_device.values()))
