"""What every engine with several nodes keeps to: trials whose processes are on two of them."""

from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.sweep.engines.local import LocalEngine
from support.sweeping import left_behind, run_sweep


def spec(trainer="standard", **settings):
    settings = {"steps": 3, "warmup_steps": 1, "trace": False, "limits": Limits(300.0, 200.0), **settings}
    return TrialSpec(trainer, "tiny", 4, 16, label=trainer.partition(":")[2], device="cpu", **settings)


def run(folder, engine, *specs):
    results = run_sweep(folder, specs, engine, shuffle_seed=None)
    assert left_behind(folder) == []
    return list(results.values())


def one_measures_and_one_loses_a_process(engine, folder, monkeypatch, *layouts):
    """The job has the FLOPs of the whole batch; a process killed on the second node is a crash and leaves nothing."""
    (alone,) = run(folder / "alone", LocalEngine(gpus=()), spec())
    killed = spec("testbeds.rank_endings:OneIsKilled", nodes=2, layout="ddp")
    results = run(folder / "many", engine, *(spec(nodes=2, layout=layout) for layout in layouts), killed)
    by_end = {(result.spec.label, result.spec.layout): result for result in results}
    for layout in layouts:
        has_the_figures_of_the_whole_batch(by_end["", layout], alone)
    result = by_end["OneIsKilled", "ddp"]
    assert result.outcome == "crash", (result.reason, result.log_tail)
    assert result.evidence["rank"] == 1
    assert result.reason.startswith("rank 1 on ")
    assert "SIGKILL" in result.reason


def has_the_figures_of_the_whole_batch(job, alone):
    assert job.outcome == "ok", (job.reason, job.log_tail)
    assert job.measured.cost.model_flops == alone.measured.cost.model_flops
    assert job.measured.cost.hardware_flops == alone.measured.cost.hardware_flops
    # Both nodes are this machine here, so its peak counts once.
    seconds, peak = job.measured.steps.median, alone.measured.cost.peak["flops_per_s"]
    assert abs(job.measured.cost.mfu / (alone.measured.cost.model_flops / (seconds * peak)) - 1) < 1e-9
    assert abs(job.measured.samples_per_s * seconds / 4 - 1) < 1e-9
