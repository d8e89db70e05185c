"""A trial that finished its steps keeps what it measured, whatever flopwatch's own phases after them do."""

import os

import pytest

from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.report.capture import capture_sweep
from flopwatch.report.summary import summarise
from flopwatch.sweep.engines.local import LocalEngine
from flopwatch.sweep.runner.plan import proves_too_large
from support.sweeping import TESTS, left_behind, run_sweep
from support.warm_sweep import run_sweep_warm

pytestmark = pytest.mark.slow

STEPS = 3
MIB = 2**20


@pytest.fixture(autouse=True)
def findable_trainers(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))


@pytest.fixture
def trial(monkeypatch):
    """A trial that fails in this way in this phase."""

    def make(phase, way, limits=None):
        monkeypatch.setenv("LATE_FAILURE", f"{phase} {way}")
        return spec_with(limits or Limits(120.0, None))

    return make


def spec_with(limits):
    return TrialSpec(
        "late_failures:Late", "tiny", 2, 16, device="cpu", steps=STEPS, warmup_steps=1,
        threads=1, limits=limits,
    )  # fmt: skip


def in_a_fresh_process(folder, specs):
    return run_sweep(folder, specs, LocalEngine())


def check(folder, spec, missing, run=run_sweep_warm):
    """It is ok with its measurements, and the record and the report say what is missing."""
    (result,) = run(folder, [spec]).values()
    assert result.outcome == "ok", (result.reason, result.log_tail)
    assert result.measured.steps.count == STEPS
    assert result.measured.tokens_per_s > 0
    assert result.measured.memory.host_bytes > 50 * MIB
    assert set(result.measured.not_measured) == set(missing), result.measured.not_measured
    assert not proves_too_large(result)
    summary = summarise(capture_sweep(folder))
    assert summary.totals.by_outcome == {"ok": 1}
    told = " ".join(summary.warnings)
    assert all(f"{phase} could not be measured" in told for phase in missing)
    assert left_behind(folder) == []
    return result


@pytest.mark.parametrize(
    ("phase", "missing"),
    [("memory", ("memory", "flops", "trace")), ("flops", ("flops", "trace")), ("trace", ("trace",))],
)
def test_killed_in_a_later_phase(trial, tmp_path, phase, missing):
    result = check(tmp_path / "s", trial(phase, "kill"), missing)
    assert result.phase == phase
    assert "SIGKILL" in result.reason
    assert result.evidence["signal"] == "SIGKILL"


@pytest.mark.parametrize("way", ["raise", "memory"])
def test_what_each_later_phase_raises_costs_only_that_phase(trial, tmp_path, way):
    result = check(tmp_path / "s", trial("all", way), ("memory", "trace"))
    # A trainer whose executed FLOPs cannot be counted has a note of its own; the model's are counted.
    assert result.measured.cost.model_flops > 0
    assert result.measured.cost.mfu > 0


def test_hung_in_a_later_phase(trial, tmp_path):
    result = check(tmp_path / "s", trial("flops", "hang", Limits(None, 8.0)), ("flops", "trace"))
    assert "no progress for" in result.reason


def test_out_of_memory_in_a_later_phase(trial, tmp_path):
    limited = trial("trace", "eat", Limits(120.0, None, 900 * MIB))
    result = check(tmp_path / "s", limited, ("trace",), run=in_a_fresh_process)
    assert result.measured.memory.host_bytes < 600 * MIB


def test_near_its_memory_limit_a_trial_records_no_trace_which_might_exceed_it(trial, tmp_path):
    free = check(tmp_path / "free", trial("none", "kill"), (), run=in_a_fresh_process)
    limit = int(free.measured.memory.host_bytes / 0.92)
    near = trial("trace", "kill", Limits(120.0, None, limit))
    result = check(tmp_path / "near", near, ("trace",), run=in_a_fresh_process)
    assert result.phase == "done"
    assert result.measured.not_measured["trace"].startswith("left out, because the steps used")
