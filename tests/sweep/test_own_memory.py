"""The memory of a trial is that of its steps, not of what flopwatch does after them."""

import json

import pytest

from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.sweep.engines.local import LocalEngine
from flopwatch.sweep.progress import Heartbeat
from flopwatch.sweep.runner.plan import proves_too_large
from flopwatch.sweep.supervisor.build_result import with_finished_steps
from support.sweeping import run_sweep

MIB = 2**20
STEPS = 4
TRAINER = f"""
import torch
from flopwatch.sweep.trainers.builtin import StandardTrainer


class LateEater(StandardTrainer):
    '''Takes 600 MiB more when the steps, and one more for the memory of its parts, are over.'''

    calls = 0

    def forward(self, batch):
        LateEater.calls += 1
        if LateEater.calls > {STEPS + 2}:
            self.more = torch.ones(600 * {MIB}, dtype=torch.uint8)
        return super().forward(batch)
"""


@pytest.mark.slow
def test_what_is_taken_after_the_steps_is_not_in_the_peak(tmp_path, monkeypatch):
    (tmp_path / "late.py").write_text(TRAINER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    spec = TrialSpec("late:LateEater", "tiny", 2, 16, device="cpu", steps=STEPS, warmup_steps=1, threads=1)
    (result,) = run_sweep(tmp_path / "s", [spec], LocalEngine()).values()
    assert result.outcome == "ok", result.log_tail
    memory = result.measured.memory
    assert memory.peak_bytes - memory.baseline_bytes < 300 * MIB


@pytest.mark.parametrize(
    ("phase", "evidence", "proves"),
    [
        ("measure", {"signal": "SIGKILL"}, True),
        ("flops", {"signal": "SIGKILL"}, False),
        ("trace", {}, False),
        ("memory", {}, False),
        ("measure", {"error": "OutOfMemoryError"}, False),
    ],
)
def test_larger_trials_are_only_left_out_for_what_the_smaller_one_took_itself(phase, evidence, proves):
    spec = TrialSpec("standard", "tiny", 1, 8)
    assert proves_too_large(TrialResult("a", "k", spec, "oom_host", "", evidence, phase=phase)) is proves


@pytest.mark.parametrize(("steps_done", "outcome"), [(True, "ok"), (False, "oom_host")])
def test_a_job_ended_for_memory_with_its_supervisor_keeps_the_steps_it_has(tmp_path, steps_done, outcome):
    row = {"phase": "measure", "step": 0, "seconds": 2.0, "forward": 0.5, "backward": 1, "optimizer": 0.5}
    (tmp_path / "steps.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "measured.json").write_text(json.dumps({"done": False, "steps_done": steps_done, "measured": {}}))
    Heartbeat(tmp_path).beat("flops")
    killed = TrialResult("a", "k", TrialSpec("standard", "tiny", 4, 8), "oom_host", "Slurm ended the job")
    result = with_finished_steps(killed, tmp_path)
    assert result.outcome == outcome
    if steps_done:
        assert result.measured.samples_per_s == 2.0
        assert list(result.measured.not_measured) == ["memory", "flops", "trace"]
        assert "Slurm ended the job" in result.reason
