"""What every engine with several nodes keeps to: trials whose processes are on two of them."""

import os

from flopwatch.sweep.engines.local import LocalEngine
from flopwatch.trial_records import Limits, TrialSpec
from sweeping import TESTS, left_behind, run_sweep


def spec(trainer="standard", **settings):
    settings = {"steps": 3, "warmup_steps": 1, "trace": False, "limits": Limits(300.0, 200.0), **settings}
    return TrialSpec(trainer, "tiny", 4, 16, label=trainer.partition(":")[2], device="cpu", **settings)


def run(folder, engine, *specs):
    results = run_sweep(folder, specs, engine, shuffle_seed=None)
    assert left_behind(folder) == []
    return list(results.values())


def the_job_over_two_nodes_has_the_flops_of_the_whole_batch(engine, folder):
    (alone,) = run(folder / "alone", LocalEngine(gpus=()), spec())
    for job in run(folder / "many", engine, *(spec(nodes=2, layout=layout) for layout in ("ddp", "fsdp"))):
        assert job.outcome == "ok", (job.reason, job.log_tail)
        assert job.measured.cost.model_flops == alone.measured.cost.model_flops
        assert job.measured.cost.hardware_flops == alone.measured.cost.hardware_flops
        # Both nodes are this machine here, so its peak counts once.
        seconds, peak = job.measured.steps.median, alone.measured.cost.peak["flops_per_s"]
        assert abs(job.measured.cost.mfu / (alone.measured.cost.model_flops / (seconds * peak)) - 1) < 1e-9
        assert abs(job.measured.samples_per_s * seconds / 4 - 1) < 1e-9


def a_process_killed_on_the_second_node_is_a_crash_and_leaves_nothing(engine, folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (result,) = run(folder, engine, spec("rank_endings:OneIsKilled", nodes=2, layout="ddp"))
    assert result.outcome == "crash", (result.reason, result.log_tail)
    assert result.evidence["rank"] == 1
    assert result.reason.startswith("rank 1 on ")
    assert "SIGKILL" in result.reason
