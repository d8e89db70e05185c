"""A checkpoint holds the totals up to its step and leaves the logging windows as they are."""

import json
import subprocess
import sys

import pytest

from flopwatch import TrainingMonitor
from flopwatch.runs import read_log, rows_from_end
from flopwatch.testing import FakeClock, RecordingSink
from support.small_models import TINY_FLOPS_PER_TOKEN, TinyText, text_batch, train

pytestmark = pytest.mark.slow

TOKENS = 2 * 8


def train_steps(monitor, model, first, last, checkpoints=()):
    states = {}
    for number in range(first, last):
        with monitor.step(text_batch(2, 8), step=number) as step:
            train(model, text_batch(2, 8))
            step.log(loss=float(number))
        if number in checkpoints:
            states[number] = json.loads(json.dumps(monitor.state_dict()))
    return states


def rows_of(sink):
    return [record for record in sink.records if record.type == "row"]


def logged_steps(folder):
    return [step for row in read_log(folder / "training_log.jsonl").rows for step in row.steps["step"]]


@pytest.mark.parametrize("checkpoints", [(), (3,), (24, 32, 35), (9, 19), range(50)], ids=str)
def test_rows_land_where_they_would_without_checkpoints(tmp_path, checkpoints):
    sink, model = RecordingSink(), TinyText()
    with TrainingMonitor(tmp_path, model=model, sinks=[sink], log_every=10, strict=True) as monitor:
        states = train_steps(monitor, model, 0, 50, checkpoints)
    assert [row.step for row in rows_of(sink)] == [9, 19, 29, 39, 49]
    assert [row.values["training/loss"] for row in rows_of(sink)] == [4.5, 14.5, 24.5, 34.5, 44.5]
    assert logged_steps(tmp_path) == list(range(50))
    assert [row["step"] for row in rows_from_end(tmp_path / "training_log.jsonl")] == [49, 39, 29, 19, 9]
    for step, state in states.items():
        assert (state["step"], state["ledger_step"], state["ledger"]["steps"]) == (step, step, step + 1)
        assert state["ledger"]["totals"]["tokens"] == TOKENS * (step + 1)
        assert state["ledger"]["totals"]["model_flops"] == TINY_FLOPS_PER_TOKEN * TOKENS * (step + 1)
    assert monitor.summary.values["total/tokens"] == TOKENS * 50


def test_a_run_killed_after_a_checkpoint_has_every_step_up_to_it_in_its_log(tmp_path):
    code = """
import os, sys
from pathlib import Path
from flopwatch import TrainingMonitor
from monitor.test_checkpoints_and_windows import train_steps
from support.small_models import TinyText
model = TinyText()
monitor = TrainingMonitor(sys.argv[1], model=model, log_every=10)
train_steps(monitor, model, 0, 28, checkpoints=(22, 24))
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert logged_steps(tmp_path) == list(range(25))
    newest = next(rows_from_end(tmp_path / "training_log.jsonl"))
    assert (newest["step"], newest["ledger"]["steps"]) == (24, 25)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("killed_at", [25, *(pytest.param(step, marks=pytest.mark.campaign) for step in (28, 30)), 47])
def test_a_resume_from_a_checkpoint_inside_a_window_counts_every_step_once(tmp_path, killed_at, with_state):
    """Killed is: no close. The log is flushed by the checkpoint, later rows may or may not have made it."""
    model = TinyText()
    first = TrainingMonitor(tmp_path, model=model, log_every=10)
    state = train_steps(first, model, 0, killed_at, checkpoints=(24,))[24]
    first._run.outlets.flush_log()
    second = TrainingMonitor(tmp_path, model=model, log_every=10)
    if with_state:
        second.load_state_dict(state)
    train_steps(second, model, 25, 60)
    second.close()
    first._run = None
    assert second.summary.values["total/steps"] == 60
    assert second.summary.values["total/tokens"] == TOKENS * 60
    assert logged_steps(tmp_path) == list(range(60))
    log = read_log(tmp_path / "training_log.jsonl")
    losses = [loss for row in log.rows for loss in row.steps["loss"]]
    assert losses == [float(number) for number in range(60)]


def test_a_checkpoint_in_the_first_steps_does_not_decide_what_warm_up_is(tmp_path):
    """Of two steps nobody can tell; the row of all ten can."""
    warm_up = []
    for checkpoints in ((), (0, 1, 2)):
        sink, clock = RecordingSink(), FakeClock()
        options = {"config": {"log_seconds": 1e9}, "log_every": 10, "clock": clock}
        with TrainingMonitor(tmp_path / str(len(checkpoints)), sinks=[sink], **options) as monitor:
            for number in range(10):
                clock.advance(9.0 if number in (1, 2) else 0.5)
                monitor.log_step(number)
                if number in checkpoints:
                    monitor.state_dict()
        warm_up.append(rows_of(sink)[0].steps["warm_up"])
    assert warm_up[0] == warm_up[1]
    assert sum(warm_up[0]) == 3
