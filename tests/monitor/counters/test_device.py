"""Mode hybrid with counters and without, the rows that have them, and the energy of steps, tokens and samples."""

import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import flopwatch
from flopwatch.hardware.counters.sampler import CounterSampler
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.counters import device as device_counters
from flopwatch.monitor.counters.values import counter_values
from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.ranks.reports import Message, Window, extend, merge, report_of
from flopwatch.monitor.rows import RowMaker
from flopwatch.monitor.totals import Ledger, RunTotals
from flopwatch.records.counters import CounterWindow
from flopwatch.records.flops import Peak
from flopwatch.runs.reading import read_log
from flopwatch.testing import FakeClock, FakeCounters
from support.counted_device import TOKENS, FakeTraining, seconds_at
from support.torchrun import torchrun

PEAK = Peak(4e12, "a device", "bf16", "a datasheet", "datasheet", "high")


class Source:
    """The source that a sampler opens, and how many samplers there were."""

    counters = FakeCounters(absent="no source knows this device")
    samplers = 0


@pytest.fixture(autouse=True)
def source(monkeypatch):
    opened = Source()

    def sampler(device, notify):
        opened.samplers += 1
        return CounterSampler(device, notify, open_source=opened.counters.open, interval_seconds=0.01)

    monkeypatch.setattr(device_counters, "CounterSampler", sampler)
    return opened


def train(folder, steps=30, **options):
    """A real training of about 10 ms per step, in real time."""
    model = nn.Linear(16, 16)
    with flopwatch.TrainingMonitor(
        folder, model=model, log_every=10, peak_flops_per_s=1e9, quiet=True, **options
    ) as run:
        for batch in torch.randn(steps, 4, 16):
            with run.step(batch):
                model(batch).sum().backward()
                time.sleep(0.01)
    return read_log(folder / "training_log.jsonl")


def codes(log):
    return [notice.code for notice in log.notices if "counters" in notice.code]


@pytest.mark.requirement("R9")
def test_hybrid_with_counters_names_their_source_in_every_row(tmp_path, source):
    source.counters = FakeCounters("a source", [{"tensor_active": 0.25, "power_watts": 50.0}])
    log = train(tmp_path, mode="hybrid", strict=True)
    assert [row.counters_source for row in log.rows] == ["a source"] * 3
    assert all(row.values["counters/tensor_active"] == 0.25 for row in log.rows)
    assert log.starts[-1].config["mode"] == "hybrid"
    assert {provenance.mode for provenance in log.provenances} == {"hybrid"}
    assert codes(log) == []
    assert source.counters.closed == 1


@pytest.mark.requirement("R11")
@pytest.mark.parametrize(("falls_back", "became"), [(True, "profiler"), (False, "smart")])
def test_hybrid_without_any_source_counts_in_another_mode_and_says_so(falls_back, became, tmp_path, source):
    source.counters = FakeCounters("a source", absent="it is not installed")
    log = train(tmp_path, mode="hybrid", strict=True, config={"hybrid_mode": {"fallback_to_profiler": falls_back}})
    (notice,) = [notice for notice in log.notices if notice.code == "hybrid_without_counters"]
    assert f"as mode {became} does" in notice.message
    assert "it is not installed" in notice.message
    assert log.starts[-1].config["mode"] == "hybrid"
    assert log.provenances[-1].mode == became
    assert "mode hybrid was asked for" in log.provenances[-1].notes[-1]
    assert all(row.counters_source is None for row in log.rows)
    assert not [key for row in log.rows for key in row.values if key.startswith("counters/")]
    assert log.rows[-1].values["perf/mfu"] > 0


@pytest.mark.parametrize(("falls_back", "every"), [(True, 7), (False, 1000)])
def test_without_counters_steps_are_counted_as_often_as_in_the_mode_it_became(falls_back, every, tmp_path):
    config = {"flops_profile_freq": 7, "hardware_counters_enabled": False, "fallback_to_profiler": falls_back}
    with flopwatch.TrainingMonitor(tmp_path, mode="hybrid", config=config, quiet=True) as monitor:
        assert monitor._started_run.counter._schedule.every == every


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({"mode": "hybrid"}, True),
        ({"mode": "hybrid", "config": {"hybrid_mode": {"hardware_counters_enabled": False}}}, False),
        ({"mode": "hybrid", "config": {"counters": False}}, False),
        ({"mode": "smart"}, False),
        ({"mode": "profiler"}, False),
        ({"mode": "smart", "config": {"counters": True}}, True),
        ({"mode": "estimate", "config": {"counters": True}}, True),
    ],
)
def test_counters_are_read_in_hybrid_and_where_they_are_asked_for(options, reads, tmp_path, source):
    source.counters = FakeCounters("a source", [{"power_watts": 50.0}])
    log = train(tmp_path, 12, strict=True, **options)
    assert [row.counters_source for row in log.rows] == ["a source" if reads else None] * 2
    assert source.samplers == int(reads)
    assert codes(log) == []


def test_counters_that_are_asked_for_and_absent_are_told_in_other_modes_too(tmp_path):
    log = train(tmp_path, 12, mode="smart", config={"counters": True})
    assert codes(log) == ["counters_absent"]
    assert log.provenances[-1].mode == "smart"


def test_a_source_that_fails_is_told_and_named_no_longer(tmp_path, source):
    source.counters = FakeCounters("a source", raises=OSError("the device fell off the bus"), fails_after=4)
    log = train(tmp_path, 60, config={"counters": True}, strict=True)
    named = [row.counters_source for row in log.rows]
    assert (named[0], named[-1]) == ("a source", None)
    assert codes(log) == ["counters_absent"]


def test_a_driver_that_cannot_be_asked_does_not_stop_the_training(tmp_path, monkeypatch):
    def broken(device):
        raise RuntimeError("no such symbol")

    monkeypatch.setattr(device_counters, "identify", broken)
    log = train(tmp_path, mode="hybrid")
    assert log.summary.failed_parts == {"counters": "RuntimeError: no such symbol"}
    assert log.rows[-1].values["perf/mfu"] > 0


def test_a_forked_child_reads_no_counters(tmp_path, source):
    source.counters = FakeCounters("a source", [{"power_watts": 50.0}])
    with flopwatch.TrainingMonitor(tmp_path, model=nn.Linear(16, 16), mode="hybrid", quiet=True) as monitor:
        monitor.log_step(0, batch=torch.zeros(4, 16))
        while not source.counters.sampled:
            time.sleep(0.001)
        child = os.fork()
        if child == 0:
            before = source.counters.sampled
            time.sleep(0.1)
            took = monitor._started_run.device_counters.take()
            os._exit(int(took != () or source.counters.sampled != before))
        assert os.waitpid(child, 0)[1] == 0


def test_energy_per_step_and_sample_is_that_of_the_time_in_steps(tmp_path, monkeypatch):
    """A device that draws 300 W, also in a pause of 100 s between two steps."""
    seconds = seconds_at(0.4)
    training = FakeTraining(tmp_path, monkeypatch, {}, log_every=8, watts=300.0)
    training.run_steps([seconds] * 12)
    with training.monitor.pause():
        training.clock.advance(100.0)
    training.run_steps([seconds] * 20)
    training.monitor.close()

    rows, summary = training.records("row"), training.monitor.summary.values
    assert [row.values["perf/joules_per_step"] for row in rows if row.detailed] == [pytest.approx(300 * seconds)]
    assert summary["perf/joules_per_step"] == pytest.approx(300 * seconds)
    assert summary["perf/joules_per_sample"] == pytest.approx(300 * seconds / TOKENS)
    in_rows = [row.values["counters/energy_joules"] for row in rows]
    assert in_rows[1] == pytest.approx(300 * (8 * seconds + 100))
    # The device is found after the first step, so its energy is not known.
    assert summary["total/energy_joules"] == pytest.approx(sum(in_rows)) == pytest.approx(300 * (31 * seconds + 100))


def test_steps_that_run_again_after_a_restart_have_used_energy_twice():
    """A checkpoint at 100 J, an end at 150 J, and a new session that uses 20 J."""
    totals = RunTotals(FakeClock())
    at_checkpoint, at_end = Ledger(8, Counter(energy_joules=100)), Ledger(12, Counter(energy_joules=150))
    totals.continue_from(at_checkpoint, (0.0, at_end), 8)
    totals.ledger.add_energy(20)
    assert totals.ledger.values()["total/energy_joules"] == 170


def steps(first=0, count=5):
    return [MeasuredStep(number, seconds=0.5, tokens=100, samples=2) for number in range(first, first + count)]


def reported(rank, watts, ranks_on_device=1, **more):
    window = CounterWindow("nvml", 10, 2.5, energy_joules=2.5 * watts, **more)
    values = counter_values(
        window, tensor_peak_flops_per_s=4e12, peak_clock_mhz=1000.0, ranks_on_device=ranks_on_device
    )
    return report_of(rank, steps(), peak_flops_per_s=4e12, counter_values=values)


def row_of(*reports):
    rows = RowMaker(MonitorConfig(), len(reports), RunTotals(FakeClock()))
    over_the_wire = [Message.from_json(Message([report], None, False).to_json()).reports[0] for report in reports]
    return rows.row(Window(tuple(steps()), merge(over_the_wire)), PEAK, {}).values


def test_energy_of_ranks_is_added_and_shares_of_cycles_are_averaged():
    busy = {"sm_clock_mhz": 500.0}
    values = row_of(reported(0, 200.0, tensor_active=0.2, **busy), reported(1, 400.0, tensor_active=0.6, **busy))
    assert values["counters/energy_joules"] == 2.5 * 600
    assert values["counters/power_watts"] == 600
    assert values["counters/tensor_active"] == pytest.approx(0.4)
    assert values["counters/flops_per_second_per_device"] == pytest.approx(0.4 * 0.5 * 4e12)
    assert values["perf/joules_per_token"] == pytest.approx(600 / values["perf/tokens_per_second"])
    assert values["total/energy_joules"] == 2.5 * 600


def test_ranks_that_share_a_device_count_its_energy_once():
    values = row_of(reported(0, 300.0, ranks_on_device=2), reported(1, 300.0, ranks_on_device=2))
    assert values["counters/energy_joules"] == 2.5 * 300


def test_energy_is_unknown_if_a_rank_has_no_counters():
    without = report_of(1, steps(), peak_flops_per_s=4e12)
    values = row_of(reported(0, 200.0, tensor_active=0.2), without)
    assert "counters/energy_joules" not in values
    assert "perf/joules_per_step" not in values
    assert values["counters/tensor_active"] == 0.2


def test_windows_that_are_joined_add_their_energy_and_have_the_means_over_both():
    """As of a rank that ends a window early, for a checkpoint that only it writes."""
    joined = extend(reported(0, 100.0, tensor_active=0.2), reported(0, 300.0, tensor_active=0.6))
    assert joined.counters["counters/energy_joules"] == (2.5 * 400, 1)
    assert joined.counters["counters/power_watts"] == (200.0, 1)
    assert joined.counters["counters/tensor_active"] == (pytest.approx(0.4), 1)


@pytest.mark.parametrize("shown", [{"energy_joules": 0.0}, {"power_watts": 0.0}])
def test_a_device_that_draws_nothing_has_a_counter_that_does_not_count(shown):
    """As in some virtual machines, whose counters are there and always 0."""
    window = CounterWindow("nvml", 10, 2.5, **shown)
    assert counter_values(window, tensor_peak_flops_per_s=None, peak_clock_mhz=None) == {}


def test_energy_of_joined_windows_is_unknown_if_that_of_one_is():
    without = report_of(0, steps(), peak_flops_per_s=4e12, counter_values={"counters/power_watts": 300.0})
    for joined in (extend(reported(0, 100.0), without), extend(without, reported(0, 100.0))):
        assert "counters/energy_joules" not in joined.counters
        assert joined.counters["counters/power_watts"] == (200.0, 1)


@pytest.mark.slow
def test_a_row_of_several_ranks_has_the_counters_of_all(tmp_path):
    """Both ranks share one CPU, of 100 W: its power counts once."""
    results = torchrun(Path(__file__).parents[1] / "scripts" / "metered_ranks.py", str(tmp_path), ranks=2)
    newest = results[0]["newest"]
    assert newest["ranks/reporting"] == 2
    assert newest["counters/power_watts"] == pytest.approx(100)
    assert newest["counters/tensor_active"] == pytest.approx(0.3)
    assert newest["perf/joules_per_step"] == pytest.approx(100 * newest["perf/step_time"])
    rows = read_log(tmp_path / "training_log.jsonl").rows
    assert {row.counters_source for row in rows} == {"meter"}
    assert newest["total/energy_joules"] == pytest.approx(sum(row.values["counters/energy_joules"] for row in rows))
