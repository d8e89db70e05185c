"""`FLOPWATCH_LOG=debug` prints what is caught and decided, and changes nothing else."""

import os
import subprocess
import sys

import pytest

TRAINING = """
import torch, flopwatch

class Broken:
    def __float__(self):
        raise RuntimeError("the user's own error")

model = torch.nn.Linear(4, 4)
with flopwatch.TrainingMonitor("run", model=model, quiet=True, log_every=2) as monitor:
    for number in range(4):
        with monitor.step(torch.ones(2, 4)) as step:
            model(torch.ones(2, 4)).sum().backward()
            step.log(loss=Broken())
    monitor.set_model("no model")
print("the training has ended at", monitor.summary.step)
"""


def output(folder, **variables):
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", TRAINING], cwd=folder, env=env, capture_output=True, text=True)
    assert done.stdout.endswith("the training has ended at 3\n"), done.stderr
    return done.stderr


@pytest.mark.slow
def test_every_caught_exception_has_a_traceback_and_every_step_a_verdict(tmp_path):
    told = output(tmp_path, FLOPWATCH_LOG="debug")

    assert "caught in a logged value" in told
    assert "caught in set_model" in told
    assert told.count("Traceback (most recent call last)") == 5
    assert "step 0, counted as it ran: exact" in told
    assert "step 3, not counted as it ran: exact" in told


@pytest.mark.slow
def test_without_it_nothing_is_printed(tmp_path):
    assert "Traceback" not in output(tmp_path)
