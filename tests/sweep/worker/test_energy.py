"""The energy of a trial's steps: measured where a source is there, told in the table, and else absent."""

import time

import pytest
import torch

from flopwatch.hardware.counters.chain import OpenedCounters, open_counters
from flopwatch.records.settings import TrialSpec
from flopwatch.records.trial import Measured, StepTimes, TrialResult
from flopwatch.report.cells import METRICS, cell_text, make_cell
from flopwatch.sweep.progress import Heartbeat
from flopwatch.sweep.supervisor.build_result import collect_measurements
from flopwatch.sweep.worker import energy
from flopwatch.sweep.worker.measure import measure_trial
from flopwatch.testing import FakeClock, FakeCounters

WATTS = 40.0


class Meter(FakeCounters):
    """A counter of a CPU that draws 40 W."""

    def sample(self):
        reading = super().sample()
        return type(reading)(self.name, reading.seconds, energy_joules=WATTS * reading.seconds)


class Slow:
    """A trainer whose step takes 0.1 s."""

    def __init__(self, model, settings):
        self.model = model

    def forward(self, batch):
        time.sleep(0.1)
        return self.model(**batch)["loss"]

    def backward(self, loss):
        loss.backward()

    def update(self):
        self.model.zero_grad()


def measured(tmp_path, monkeypatch, source, steps):
    from flopwatch.sweep.supervisor.build_result import HostPeak

    folder = tmp_path / "trials" / "one"
    folder.mkdir(parents=True)
    reasons = {} if source else {"rapl": "it cannot be read"}
    monkeypatch.setattr(energy, "open_counters", lambda device: OpenedCounters(source, reasons))
    monkeypatch.setattr(energy, "usable_cores", lambda: range(energy.os.cpu_count()))
    spec = TrialSpec(f"{__name__}:Slow", "tiny", 2, 16, device="cpu", steps=steps, warmup_steps=1, trace=False)
    measure_trial(folder, spec, Heartbeat(folder))
    return spec, collect_measurements(folder, spec, HostPeak()).measured


def test_energy_per_step_is_that_of_the_measured_steps(tmp_path, monkeypatch):
    source = Meter("rapl")
    _, found = measured(tmp_path, monkeypatch, source, steps=6)
    assert found.extra["joules_per_step"] == pytest.approx(WATTS * found.steps.median, rel=0.25)
    assert (source.sampled, source.closed) == (2, 1)


@pytest.mark.parametrize(("source", "steps"), [(None, 6), (FakeCounters("nvml"), 6), (Meter("rapl"), 2)])
def test_energy_that_is_not_known_is_absent(source, steps, tmp_path, monkeypatch):
    """Without a source, with one that has no energy, and in less than half a second."""
    _, found = measured(tmp_path, monkeypatch, source, steps)
    assert "joules_per_step" not in found.extra
    assert not found.not_measured


def metered(source, monkeypatch):
    monkeypatch.setattr(energy, "open_counters", lambda device: OpenedCounters(source, {}))
    monkeypatch.setattr(energy, "usable_cores", lambda: range(energy.os.cpu_count()))
    return energy.StepEnergy(torch.device("cpu"), is_alone=True)


def test_the_energy_of_steps_is_between_two_readings(monkeypatch):
    clock = FakeClock()
    source = FakeCounters("fake", [{"energy_joules": 100.0}, {"energy_joules": 700.0}], clock=clock)
    meter = metered(source, monkeypatch)
    meter.start()
    clock.advance(2.0)
    assert meter.joules_per_step(4) == 150.0


@pytest.mark.parametrize("fails_after", [0, 1])
def test_the_energy_is_unknown_if_a_reading_fails(fails_after, monkeypatch):
    clock = FakeClock()
    readings = [{"energy_joules": 100.0}, {"energy_joules": 700.0}]
    source = FakeCounters("fake", readings, clock=clock, raises=RuntimeError("lost"), fails_after=fails_after)
    meter = metered(source, monkeypatch)
    meter.start()
    clock.advance(2.0)
    assert meter.joules_per_step(4) is None
    assert source.closed == 1


@pytest.mark.parametrize("fails_after", [0, 1, 2])
def test_a_driver_that_hangs_does_not_hold_up_the_trial(fails_after, monkeypatch):
    """Neither when it is opened, which takes one reading, nor at the first or the last of the two readings."""
    source = FakeCounters("fake", [{"energy_joules": 100.0}], hangs=True, fails_after=fails_after)
    metered(None, monkeypatch)
    monkeypatch.setattr(energy, "open_counters", lambda device: open_counters(device, [source], seconds=0.1))
    meter = energy.StepEnergy(torch.device("cpu"), is_alone=True)
    meter.start()
    assert meter.joules_per_step(4) is None
    assert source.is_hanging
    source.release()


def test_a_cpu_that_a_trial_shares_with_others_is_not_metered(monkeypatch):
    source = Meter("rapl")
    monkeypatch.setattr(energy, "open_counters", lambda device: OpenedCounters(source, {}))
    monkeypatch.setattr(energy, "usable_cores", lambda: range(1))
    monkeypatch.setattr(energy.os, "cpu_count", lambda: 2)
    meter = energy.StepEnergy(torch.device("cpu"), is_alone=True)
    meter.start()
    assert meter.joules_per_step(1) is None
    assert source.sampled == 0


def cell(extra):
    spec = TrialSpec("standard", "tiny", 4, 16)
    times = StepTimes(5, 0.5, 0.4, 0.6, 0.4, 0.6, 0.6, 0.9, False)
    return make_cell("one", spec, TrialResult("one", "k", spec, "ok", measured=Measured(steps=times, extra=extra)), "")


def test_the_table_shows_energy_only_where_some_trial_has_it():
    metric = METRICS["energy"]
    assert metric.value(cell({})) is None
    assert cell_text(cell({"joules_per_step": 4080.0}), metric) == "4.08 kJ"
    assert metric.value(cell({"perf/joules_per_step": 2.5})) == 2.5  # of a command that flopwatch monitored
