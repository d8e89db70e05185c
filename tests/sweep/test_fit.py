"""A fit with real trials: what it finds is the truth, and what was tried once is not tried again."""

import math
import os
import shutil
from dataclasses import replace

import pytest

from flopwatch.errors import InputError
from flopwatch.records.trial import Limits, Measured, MemoryUse, StepTimes, TrialResult, TrialSpec
from flopwatch.sweep import fit as fit_module
from flopwatch.sweep.engines.local import LocalEngine
from flopwatch.sweep.fit import fit_batch, probe_of, with_host_limit
from support.sweeping import TESTS, Listener, left_behind, run_sweep

MIB = 2**20
BYTES_PER_SAMPLE = 20 * MIB

TRAINER = f"""
import torch


class Greedy:
    '''Holds the same amount for each sample, from its forward to its update.

    It has no optimizer, because the first one imports torch._dynamo for 2.5 s.
    '''

    def __init__(self, model, settings):
        self.model, self._samples = model, settings.batch_size

    def forward(self, batch):
        self._held = torch.ones(self._samples * {BYTES_PER_SAMPLE}, dtype=torch.uint8)
        return self.model(**batch)["loss"]

    def backward(self, loss):
        loss.backward()

    def update(self):
        self.model.zero_grad()
        del self._held
"""


@pytest.fixture(autouse=True)
def own_slots(monkeypatch, tmp_path):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))


@pytest.fixture
def holding(tmp_path, monkeypatch):
    """A command that holds 8 MiB a sample and says its throughput: as real as a trial gets without torch."""
    shutil.copy(TESTS / "holding.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return TrialSpec(
        "command", "tiny", 1, 16, label="Holding", command="python3 holding.py {batch_size}", device="cpu", trace=False,
        limits=Limits(60.0, None, 200 * MIB),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.campaign  # every trial imports torch; the same search with a command follows
def test_the_largest_batch_of_a_limited_trainer_is_found_in_at_most_six_trials(tmp_path, monkeypatch):
    (tmp_path / "greedy.py").write_text(TRAINER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    limit = 1040 * MIB
    spec = TrialSpec(
        "greedy:Greedy", "tiny", 1, 16, device="cpu", steps=1, warmup_steps=0, threads=1, trace=False,
        limits=Limits(memory_bytes=limit),
    )  # fmt: skip
    found = fit_batch(tmp_path / "fit", spec, observer=Listener())
    # Four when memory is exactly affine, at most five when each peak is off by up to 5 MiB (simulated 4,000 times). A
    # seventh trial needs errors of 10 MiB or more; the peaks of equal trials differed by less than 1 MiB.
    assert found.probes_for_largest <= 6

    # By formula: what one sample needs is known, what all else needs is what a batch of one took beyond its sample.
    first = next(probe for probe in found.probes if probe.batch_size == 1)
    by_formula = (limit - (first.peak_bytes - BYTES_PER_SAMPLE)) // BYTES_PER_SAMPLE
    assert 30 <= by_formula <= 50
    assert abs(found.largest - by_formula) <= math.ceil(0.05 * by_formula)

    # By trial, in another folder: the answer fits, and what is more than 5 % above it does not.
    above = math.ceil(1.05 * found.largest) + 1
    for size, outcome in ((found.largest, "ok"), (above, "oom_host")):
        results = run_sweep(tmp_path / f"edge{size}", [replace(spec, batch_size=size)], LocalEngine())
        assert [result.outcome for result in results.values()] == [outcome]
    assert left_behind(tmp_path / "fit") == []


@pytest.mark.slow
def test_every_probe_is_a_trial_of_the_folder_and_a_second_fit_runs_none(tmp_path, holding):
    folder = tmp_path / "fit"
    found = fit_batch(folder, holding, observer=Listener())
    assert 0.95 * found.too_large <= found.largest + 1 <= found.too_large
    assert 15 <= found.largest <= 25, "200 MiB, 8 MiB for each sample"
    names = {f"Holding_bs{probe.batch_size}_seq16" for probe in found.probes}
    assert {folder_of_trial.name for folder_of_trial in (folder / "trials").iterdir()} == names
    again = Listener()
    assert fit_batch(folder, holding, observer=again) == found
    assert again.begun == []


@pytest.mark.slow
def test_the_fastest_is_where_the_throughput_stops_growing(tmp_path, holding):
    found = fit_batch(tmp_path / "fit", holding, observer=Listener())
    assert 3 <= found.fastest <= 8, "it grows up to 4 samples"


@pytest.mark.slow
def test_a_trial_that_fails_is_told_and_is_run_again_by_the_next_fit(tmp_path, holding):
    (tmp_path / "holding.py").rename(tmp_path / "away.py")
    found = fit_batch(tmp_path / "fit", holding, observer=Listener())
    assert found.stopped.startswith("batch 1: error: ")
    assert len(found.probes) == 1
    (tmp_path / "away.py").rename(tmp_path / "holding.py")
    mended = fit_batch(tmp_path / "fit", holding, observer=Listener(), max_batch=1)
    assert (mended.largest, mended.stopped) == (1, "")


def test_without_a_limit_the_host_s_available_memory_becomes_one_and_stays_it(tmp_path, holding, monkeypatch):
    free = replace(holding, limits=Limits(60.0, None, None))
    monkeypatch.setattr(fit_module, "available_bytes", lambda: 10 << 30)
    limited, reason = with_host_limit(tmp_path / "fit", free)
    assert limited.limits.memory_bytes == 9 << 30
    assert reason == "limit 9.00 GiB: the 10.0 GiB available on this host, less a margin"
    fit_batch(tmp_path / "fit", limited, observer=Listener(), max_batch=1)
    monkeypatch.setattr(fit_module, "available_bytes", lambda: 20 << 30)
    resumed, reason = with_host_limit(tmp_path / "fit", free)
    assert resumed == limited
    assert "the same as in the first run" in reason


def test_a_limit_above_what_the_host_has_is_refused(tmp_path, holding, monkeypatch):
    monkeypatch.setattr(fit_module, "available_bytes", lambda: 100 * MIB)
    with pytest.raises(InputError, match=r"MiB is more than the \d+ MiB available"):
        fit_batch(tmp_path / "fit", holding, observer=Listener())


def test_a_host_that_does_not_tell_its_memory_needs_a_limit(tmp_path, holding, monkeypatch):
    monkeypatch.setattr(fit_module, "available_bytes", lambda: None)
    with pytest.raises(InputError, match="--memory 8GiB"):
        with_host_limit(tmp_path, replace(holding, limits=Limits()))


def result_with(memory, *, limit=None, charged=None, outcome="ok"):
    spec = TrialSpec("standard", "tiny", 8, 16, limits=Limits(memory_bytes=limit))
    times = StepTimes(5, 0.5, 0.4, 0.8, 0.4, 0.8, 0.8, 1.0, unstable=True)
    evidence = {"memory_limit": {"by": "cgroup", "peak_bytes": charged}} if charged else {}
    return TrialResult("x", "k", spec, outcome, "why", evidence, measured=Measured(
        steps=times, samples_per_s=16.0, memory=memory,
    ))  # fmt: skip


def test_on_a_device_what_is_reserved_is_held_against_what_it_has():
    memory = MemoryUse(reserved_bytes=700, alloc_retries=2, device_bytes=1000, host_bytes=5000)
    probe = probe_of(result_with(memory, limit=9000, charged=4000))
    assert (probe.peak_bytes, probe.capacity_bytes, probe.is_bare) == (700, 1000, True)
    assert (probe.slowest_per_s, probe.samples_per_s, probe.fastest_per_s) == (10.0, 16.0, 20.0)


def test_on_a_host_the_figure_of_the_report_is_held_against_the_limit():
    result = result_with(MemoryUse(host_bytes=700, host_method="samples"), limit=1000, charged=600)
    assert probe_of(result).peak_bytes == result.measured.memory.peak_bytes == 700


@pytest.mark.parametrize(
    ("outcome", "fits"), [("ok", True), ("oom_device", False), ("oom_host", False), ("timeout", None), ("crash", None)]
)
def test_only_success_and_want_of_memory_say_whether_it_fits(outcome, fits):
    assert probe_of(result_with(MemoryUse(), outcome=outcome)).fits is fits
