"""Which seconds are a step's: exact with a clock that stands still, and once with a real one."""

import pytest
import torch

import flopwatch
from flopwatch.testing import FakeClock, RecordingSink

TOKENS = 4 * 16


class Run:
    """A monitored run without a model in which time passes only where it is said."""

    def __init__(self, tmp_path, **options):
        self.clock = FakeClock()
        self.sink = RecordingSink()
        options = {"log_every": 1, "strict": True, "config": {"warm_up_steps": 0}, **options}
        options["config"] = {"log_seconds": 1e9, **options["config"]}
        self.monitor = flopwatch.TrainingMonitor(tmp_path, sinks=[self.sink], clock=self.clock, **options)
        self.batch = {"input_ids": torch.zeros(4, 16, dtype=torch.long)}
        self.number = 0

    def train(self, steps, seconds=2.0, wait=0.0):
        for _ in range(steps):
            self.clock.advance(wait)
            with self.monitor.step(self.batch, step=self.number) as step:
                self.clock.advance(seconds)
                step.log(loss=1.0)
            self.number += 1

    def rows(self):
        self.monitor.close()
        return [record for record in self.sink.records if record.type == "row"]


def test_pauses_evaluation_and_checkpoints_are_outside_the_step_time(tmp_path):
    run = Run(tmp_path)
    run.train(3)
    with run.monitor.phase("eval"):
        run.clock.advance(100.0)
    run.train(1)
    with run.monitor.pause():
        run.clock.advance(50.0)
    with run.monitor.phase("checkpoint"):
        run.clock.advance(25.0)
    run.train(1)
    rows = run.rows()

    assert [row.values["perf/step_time"] for row in rows] == [2.0] * 5
    assert [row.values["perf/tokens_per_second"] for row in rows] == [TOKENS / 2.0] * 5
    totals = run.monitor.summary.values
    assert totals["time/eval_seconds"] == 100.0
    assert totals["time/pause_seconds"] == 50.0
    assert totals["time/checkpoint_seconds"] == 25.0
    assert totals["time/train_seconds"] == 10.0


def test_a_pause_inside_a_step_is_not_the_steps(tmp_path):
    run = Run(tmp_path)
    with run.monitor.step(run.batch):
        run.clock.advance(1.0)
        with run.monitor.pause():
            run.clock.advance(30.0)
            with run.monitor.phase("eval"):
                run.clock.advance(30.0)
        run.clock.advance(2.0)
    (row,) = run.rows()

    assert row.values["perf/step_time"] == 3.0
    assert run.monitor.summary.values["time/pause_seconds"] == 60.0
    assert run.monitor.summary.values["time/eval_seconds"] == 0.0


def test_time_booked_afterwards_is_outside_the_step_time(tmp_path):
    run = Run(tmp_path)
    run.train(1)
    run.clock.advance(40.0)
    run.monitor.spent_on("eval")
    run.clock.advance(10.0)
    run.monitor.spent_on("checkpoint")
    run.train(1, wait=0.5)
    rows = run.rows()

    assert rows[1].values["perf/step_time"] == 2.5
    assert rows[1].values["perf/input_wait_percent"] == 20.0
    assert run.monitor.summary.values["time/eval_seconds"] == 40.0
    assert run.monitor.summary.values["time/checkpoint_seconds"] == 10.0


def test_the_wait_for_a_batch_is_part_of_the_step_and_told_apart(tmp_path):
    run = Run(tmp_path)
    run.train(3, seconds=3.0, wait=1.0)
    rows = run.rows()

    assert rows[2].values["perf/step_time"] == 4.0
    assert rows[2].values["perf/input_wait_percent"] == 25.0
    assert run.monitor.summary.values["time/input_wait_seconds"] == 2.0, "the first batch was there before the run"


def test_the_first_step_of_a_plain_loop_has_no_beginning_so_no_time(tmp_path):
    run = Run(tmp_path)
    for number in range(3):
        run.clock.advance(5.0)
        run.monitor.log_step(number, batch=run.batch)
    rows = run.rows()

    assert "perf/step_time" not in rows[0].values
    assert [row.values["perf/step_time"] for row in rows[1:]] == [5.0, 5.0]
    assert run.monitor.summary.values["total/tokens"] == 3 * TOKENS


def test_warm_up_is_found_and_left_out_of_the_rates(tmp_path):
    run = Run(tmp_path, log_every=10, config={})
    run.train(1, seconds=60.0)
    run.train(1, seconds=10.0)
    run.train(18)
    rows = run.rows()

    assert [row.values["perf/step_time"] for row in rows] == [2.0, 2.0]
    assert run.monitor.summary.values["time/warm_up_seconds"] == 70.0
    assert run.monitor.summary.values["perf/tokens_per_second"] == TOKENS / 2.0
    assert rows[0].steps["warm_up"] == [True, True, *[False] * 8]


@pytest.mark.parametrize("through", ["state_dict", "log"])
def test_a_resumed_run_continues_its_totals_and_its_rates_are_its_own(tmp_path, through):
    first = Run(tmp_path)
    first.train(10)
    state = first.monitor.state_dict()
    first.train(2)  # after the checkpoint; lost, run again
    first.rows()

    second = Run(tmp_path)
    if through == "state_dict":
        second.monitor.load_state_dict(state)
    second.number = 10
    second.train(5)
    rows = second.rows()

    assert rows[-1].values["total/tokens"] == 15 * TOKENS
    assert [row.values["perf/tokens_per_second"] for row in rows] == [TOKENS / 2.0] * 5
    assert second.monitor.summary.values["total/steps"] == 15
    assert second.monitor.summary.values["time/train_seconds"] == 30.0
    assert next(record for record in second.sink.records if record.type == "run").resumed_after_step == 9


@pytest.mark.parametrize("first_step", [16, 20, 21, 25])
def test_a_resume_inside_a_window_keeps_the_steps_before_it(tmp_path, first_step):
    first = Run(tmp_path, log_every=10)
    first.train(30)
    first.rows()

    second = Run(tmp_path, log_every=10)
    second.number = first_step
    second.train(4)
    second.rows()

    assert second.monitor.summary.values["total/steps"] == first_step + 4
    assert second.monitor.summary.values["total/tokens"] == (first_step + 4) * TOKENS
    assert second.monitor.summary.values["time/train_seconds"] == (first_step + 4) * 2.0
    assert set(second.monitor.summary.notices) == {"no_model"}


def test_steps_that_are_missing_from_the_log_are_told(tmp_path, caplog):
    Run(tmp_path).rows()
    first = Run(tmp_path)
    first.train(10)
    first.rows()
    second = Run(tmp_path)
    second.number = 40
    second.train(1)
    second.rows()
    assert "the log ends at step 9 and the run continues at step 40" in caplog.text


def test_a_fresh_run_in_a_used_folder_starts_at_nothing(tmp_path):
    Run(tmp_path).train(3)
    run = Run(tmp_path)
    run.train(2)
    run.rows()

    assert run.monitor.summary.values["total/steps"] == 2


def test_steps_that_counting_slows_down_are_in_no_rate(tmp_path):
    model = torch.nn.Linear(8, 8)
    run = Run(tmp_path, peak_flops_per_s=1e12, model=model)
    for number in range(6):
        with run.monitor.step(torch.randn(2, 8)):
            run.clock.advance(9.0 if number in (0, 1, 2, 4) else 2.0)
            model(torch.randn(2, 8)).sum().backward()
    rows = run.rows()

    assert [row.values.get("perf/step_time") for row in rows] == [None, None, None, 2.0, None, 2.0]
    assert run.monitor.summary.values["perf/step_time"] == 2.0


def test_the_time_by_which_counting_makes_steps_longer_is_told(tmp_path):
    model = torch.nn.Linear(8, 8)
    run = Run(tmp_path, peak_flops_per_s=1e12, model=model, log_every=12)
    for number in range(12):
        with run.monitor.step(torch.randn(2, 8)):
            run.clock.advance(9.0 if number in (0, 1, 2, 4, 7, 11) else 2.0)
            model(torch.randn(2, 8)).sum().backward()
    run.rows()

    assert run.monitor.summary.values["time/count_seconds"] == 6 * 7.0


PEAK_FLOPS_PER_S = 1e12
STEPS = 60
