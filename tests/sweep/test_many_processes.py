"""Trials of several processes on this machine: what the job measures, and how it ends when one process does not."""

import pytest

from flopwatch.records.trial import Limits, TrialSpec
from support.sweeping import left_behind
from support.warm_sweep import run_sweep_warm

pytestmark = pytest.mark.slow

# All of them are in benchmarks/sweeps/many_processes.py.
ENDINGS = {
    "OneRaisesInBackward": ("error", "ValueError: a mistake while the others wait"),
    "OneIsKilled": ("crash", "SIGKILL"),
}


def spec(trainer="standard", **settings):
    settings = {"steps": 3, "warmup_steps": 1, "trace": False, "limits": Limits(240.0, 120.0), **settings}
    return TrialSpec(trainer, "tiny", 4, 16, label=trainer.partition(":")[2], **settings)


def run(folder, *specs):
    results = run_sweep_warm(folder, specs, gpus=[])
    assert left_behind(folder) == []
    return list(results.values())


def test_the_flops_and_rates_of_the_job_are_those_of_the_whole_batch(tmp_path):
    alone, ddp, fsdp = run(
        tmp_path, spec(trace=True), *(spec(processes=2, layout=layout, trace=True) for layout in ("ddp", "fsdp"))
    )
    for job in (ddp, fsdp):
        assert job.outcome == "ok", job.log_tail
        assert job.measured.cost.model_flops == alone.measured.cost.model_flops
        assert job.measured.cost.hardware_flops == alone.measured.cost.hardware_flops
        assert job.measured.parameters == alone.measured.parameters
        seconds, peak = job.measured.steps.median, alone.measured.cost.peak["flops_per_s"]
        assert job.measured.cost.mfu == pytest.approx(alone.measured.cost.model_flops / (seconds * peak))
        assert job.measured.samples_per_s == pytest.approx(4 / seconds)
        assert job.measured.tokens_per_s == pytest.approx(4 * 16 / seconds)
        assert job.measured.steps.count == 3
        assert (tmp_path / job.measured.trace).exists()
        # Two processes hold more than one does.
        assert job.measured.memory.host_bytes > alone.measured.memory.host_bytes


@pytest.mark.parametrize("trainer", ENDINGS)
def test_the_trial_ends_as_the_process_that_ended_first_and_leaves_nothing(tmp_path, monkeypatch, trainer):
    (result,) = run(tmp_path, spec(f"testbeds.rank_endings:{trainer}", processes=2, layout="ddp"))
    outcome, words = ENDINGS[trainer]
    assert (result.outcome, result.evidence.get("rank")) == (outcome, 1), result.reason
    assert result.reason.startswith("rank 1: ")
    assert words in result.reason


def test_a_private_trainer_says_that_it_runs_in_one_process(tmp_path):
    (result,) = run(tmp_path, spec("ghost", processes=2, layout="ddp"))
    assert result.outcome == "unsupported"
    assert "can run in one process only, and the trial has 2" in result.reason


def test_variables_of_another_launcher_do_not_make_a_trial_of_one_process_wait_for_others(tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    (result,) = run(tmp_path, spec())
    assert result.outcome == "ok"
