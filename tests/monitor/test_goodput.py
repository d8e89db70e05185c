"""Where the wall time of a run went: exact, with clocks that stand still, over sessions that end, die and return."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import flopwatch
from flopwatch import process
from flopwatch.monitor import totals as wall_clock
from flopwatch.monitor.environment import describe_environment
from flopwatch.records.metrics import LOST, carried_seconds, goodput_of, loss_in_step
from flopwatch.testing import FakeClock, RecordingSink

FIRST_START = 1_000_000.0


def test_the_classes_and_productive_time_add_up_to_the_wall_time():
    spent = {name: float(2**index) for index, name in enumerate(LOST)}
    found = goodput_of({**spent, "train": 5000.0, "wall": 6000.0, "warm_up": 40.0})
    assert found.productive_seconds == 5000.0 - spent["compile"] - spent["stall"] - spent["input_wait"]
    assert found.productive_seconds + sum(found.lost_seconds.values()) == 6000.0
    assert found.share == found.productive_seconds / 6000.0


def test_a_log_that_called_a_long_wait_stalled_too_does_not_lose_it_twice():
    found = goodput_of({"train": 100.0, "wall": 110.0, "input_wait": 60.0, "stall": 50.0})
    assert found.lost_seconds == {"input_wait": 50.0, "stall": 50.0, "other": 10.0}
    assert found.productive_seconds == 0.0


def test_without_a_first_start_there_is_no_goodput():
    assert goodput_of({"train": 5.0}) is None


def test_the_largest_losses_come_first_and_nothing_lost_is_none():
    found = goodput_of({"wall": 20.0, "train": 10.0, "eval": 1.0, "restart": 4.0, "pause": 0.0, "start_up": 2.0})
    assert found.largest_losses() == [("restart", 4.0), ("other", 3.0), ("start_up", 2.0)]
    assert goodput_of({"wall": 10.0, "train": 10.0}).largest_losses() == []


@pytest.mark.parametrize(
    ("seconds", "is_warm_up", "loss"),
    [
        (10.0, False, None),
        (10.1, False, ("stall", pytest.approx(8.1))),
        (3.0, True, ("compile", 1.0)),
        (1.5, True, None),
    ],
)
def test_a_step_loses_what_it_takes_beyond_the_typical_one(seconds, is_warm_up, loss):
    assert loss_in_step(seconds, 2.0, is_warm_up=is_warm_up) == loss


def test_counting_that_is_told_apart_after_a_checkpoint_is_not_in_the_steps_of_the_next_session_too():
    at_checkpoint, at_the_end = {"train": 40.0, "wall": 40.0}, {"train": 32.0, "count": 10.0, "wall": 42.0}
    assert carried_seconds(at_checkpoint, at_the_end) == {"train": 32.0, "count": 10.0, "wall": 42.0}


def test_a_run_that_goes_back_twice_has_run_each_lost_step_once():
    """50 s of steps; back to 40 s, 6 s more; back to 30 s: 56 s were run, 30 count."""
    first = carried_seconds({"train": 40.0}, {"train": 50.0, "eval": 5.0})
    second = carried_seconds({"train": 30.0}, {**first, "train": 46.0})
    assert second == {"train": 30.0, "eval": 5.0, "rerun": 26.0}


class World:
    """Unix time, and processes that start and are killed in it. Time passes only where it is said."""

    def __init__(self, folder, monkeypatch):
        self.clock = FakeClock()
        self.folder = folder
        self._patch = monkeypatch
        self._state = None
        monkeypatch.setattr(wall_clock, "time", SimpleNamespace(time=self.unix_time))

    def unix_time(self):
        return FIRST_START + self.clock()

    def new_process(self, first_step=0, start_up=0.0, load=None, **options):
        """A process starts, takes its time, and makes a monitor."""
        started = self.unix_time()
        self._patch.setattr(wall_clock, "_monitored_process", None)
        self._patch.setattr(process, "start_unix_time", lambda: started)
        self.clock.advance(start_up)
        self.number = first_step
        self.new_monitor(load, **options)

    def new_monitor(self, load=None, **options):
        config = {"log_seconds": 1e9, "warm_up_steps": 0, **options.pop("config", {})}
        options = {"log_every": 1, "strict": True, "config": config, **options}
        self.sink = RecordingSink()
        self.monitor = flopwatch.TrainingMonitor(self.folder, sinks=[self.sink], clock=self.clock, **options)
        if load is not None:
            self.monitor.load_state_dict(load)

    def train(self, *seconds, wait=0.0):
        for step_seconds in seconds:
            self.clock.advance(wait)
            with self.monitor.step({"input_ids": torch.zeros(4, 16, dtype=torch.long)}, step=self.number) as step:
                self.clock.advance(step_seconds)
                step.log(loss=1.0)
            self.number += 1

    def late_batches(self, waits):
        for seconds in waits:
            self.clock.advance(seconds)
            yield {"input_ids": torch.zeros(4, 16, dtype=torch.long)}

    def spend(self, phase, seconds):
        with self.monitor.phase(phase):
            self.clock.advance(seconds)

    def kill(self, after=0.0):
        """What is in the log's file stays there; the monitor never hears of it."""
        self.monitor._run.outlets.flush_log()
        self.monitor._run, self.monitor = None, None
        self.clock.advance(after)

    def wait(self, seconds):
        self.clock.advance(seconds)

    def end(self):
        self.monitor.close()
        return checked(self.monitor.summary.values)


def checked(values):
    """The times of a row or summary, which must add up."""
    spent = {key.removeprefix("time/").removesuffix("_seconds"): values[key] for key in values if "time/" in key}
    whole = spent["productive"] + spent["other"] + sum(spent.get(name, 0.0) for name in LOST)
    assert whole == pytest.approx(spent["wall"], abs=1e-6)
    assert values["perf/goodput"] == pytest.approx(spent["productive"] / spent["wall"])
    assert values["perf/goodput_percent"] == 100 * values["perf/goodput"]
    return SimpleNamespace(**dict.fromkeys(LOST, 0.0) | spent, steps=values["total/steps"])


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


def test_every_class_of_one_session_is_told_apart(world):
    world.new_process(start_up=7.0, config={"warm_up_steps": "auto"}, log_every=10)
    world.spend("eval", 3.0)  # a sanity check before the first step is evaluation, not start-up
    world.wait(1.0)
    world.train(60.0, *[2.0] * 9)
    world.spend("checkpoint", 5.0)
    world.train(*[2.0] * 5, 32.0, *[2.0] * 4)
    world.spend("pause", 4.0)
    world.spend("tidy", 2.0)
    world.wait(6.0)
    spent = world.end()

    assert (spent.start_up, spent.eval, spent.compile, spent.checkpoint) == (8.0, 3.0, 58.0, 5.0)
    assert (spent.stall, spent.pause, spent.other) == (30.0, 6.0, 6.0)
    assert spent.wall == 8 + 3 + 60 + 18 + 5 + 10 + 32 + 8 + 4 + 2 + 6
    assert spent.productive == 20 * 2.0
    assert spent.warm_up == 60.0, "the whole step, as before"


def test_goodput_falls_when_data_gets_slower(world, tmp_path):
    shares = []
    for wait in (0.0, 1.0, 6.0):
        world.folder = tmp_path / str(wait)
        world.new_process()
        world.train(*[2.0] * 20, wait=wait)
        shares.append(world.end())

    assert [spent.productive for spent in shares] == [40.0] * 3
    assert [spent.wall for spent in shares] == [40.0, 60.0, 160.0]
    assert [spent.input_wait for spent in shares] == [0.0, 19.0, 114.0], "the first batch comes before the first step"
    assert [spent.stall for spent in shares] == [0.0] * 3


def test_a_wait_that_nobody_could_measure_is_told_beside_the_goodput(world):
    world.new_process()
    for number in range(10):
        world.wait(6.0)  # for a batch, but the loop opens no steps
        world.monitor.log_step(number)
    spent = world.end()

    assert (spent.input_wait, spent.wait_unknown) == (0.0, 54.0)
    assert not goodput_of({"wall": spent.wall, "train": spent.train, "wait_unknown": 54.0}).knows_input_wait


@pytest.mark.parametrize(
    ("seconds", "knows"),
    [
        ({"input_wait": 1.0, "wait_unknown": 4.0}, True),
        ({"input_wait": 1.0, "wait_unknown": 60.0}, False),
        ({"input_wait": 1.0}, True),
        ({}, False),
    ],
)
def test_the_input_wait_of_a_run_is_known_if_that_of_nearly_all_of_its_time_is(seconds, knows):
    assert goodput_of({"wall": 100.0, "train": 90.0, **seconds}).knows_input_wait is knows


def test_a_batch_that_comes_late_is_waited_for_and_no_stall(world):
    world.new_process()
    batches = iter(world.monitor.batches(world.late_batches([0.0] * 10 + [30.0] + [0.0] * 4)))
    for _ in range(15):
        batch = next(batches)
        with world.monitor.step(batch):
            world.wait(2.0)
    spent = world.end()

    assert (spent.input_wait, spent.stall, spent.outside, spent.productive) == (30.0, 0.0, 0.0, 30.0)


def test_evaluation_without_a_phase_is_time_outside_steps(world):
    world.new_process()
    for _ in range(5):
        world.train(*[2.0] * 9, wait=0.5)
        world.wait(40.0)
    spent = world.end()

    assert (spent.outside, spent.stall, spent.productive) == (4 * 40.5, 0.0, 90.0)
    assert spent.other == 40.0, "no step comes after the last one"
    assert spent.input_wait == 9 * 5 * 0.5 - 5 * 0.5, "of a batch that was fetched after an evaluation nobody knows"


def test_time_outside_steps_is_not_given_back_when_the_run_returns_to_a_checkpoint(world):
    world.new_process()
    world.train(*[2.0] * 10)
    state = world.monitor.state_dict()
    world.wait(30.0)
    world.train(2.0)
    world.kill()
    world.new_process(10, load=state)
    world.train(2.0)
    spent = world.end()

    assert (spent.outside, spent.rerun, spent.productive, spent.other) == (30.0, 2.0, 22.0, 0.0)


def test_rows_that_wait_for_the_warm_up_to_be_told_have_the_wall_time_of_their_own_steps(world):
    world.new_process(start_up=4.0, config={"warm_up_steps": "auto"})
    world.train(*[2.0] * 10)
    world.end()
    rows = [checked(record.values) for record in world.sink.records if record.type == "row" and record.detailed]
    ledgers = [record.ledger["seconds"] for record in world.sink.records if record.type == "row"]

    assert rows[0].wall == 6.0
    assert [ledger["wall"] for ledger in ledgers] == [4.0 + 2.0 * count for count in range(1, 11)]


def test_a_warm_up_given_as_a_number_is_compared_once_there_is_a_typical_step(world):
    world.new_process(config={"warm_up_steps": 3})
    world.train(9.0, 8.0, 7.0)
    early = checked(world.monitor.log_now(wait=True))
    world.train(2.0, 2.0)
    late = world.end()

    assert early.compile == 0.0, "nothing to compare with yet"
    assert late.compile == 7.0 + 6.0 + 5.0


@pytest.mark.parametrize("through", ["state_dict", "log"])
def test_a_killed_session_loses_its_last_steps_and_the_time_until_the_next_one(world, through):
    world.new_process(start_up=5.0)
    world.train(*[2.0] * 10)
    state = world.monitor.state_dict()
    world.spend("checkpoint", 3.0)
    world.train(2.0, 2.0)
    world.spend("eval", 4.0)
    world.train(2.0)
    world.kill(after=11.0)  # of which a part was steps that are in no row
    world.new_process(10, start_up=6.0, load=state if through == "state_dict" else None)
    world.train(*[2.0] * 5)
    spent = world.end()

    assert spent.steps == 15
    assert spent.productive == 30.0
    assert (spent.start_up, spent.restart, spent.rerun) == (11.0, 11.0, 6.0)
    assert (spent.checkpoint, spent.eval, spent.other) == (3.0, 4.0, 0.0), "spent for good, though it is done again"
    assert spent.wall == 5 + 20 + 3 + 4 + 4 + 2 + 11 + 6 + 10


def test_compilation_and_stalls_in_steps_that_are_run_again_are_lost_once(world):
    world.new_process(config={"warm_up_steps": "auto"}, log_every=2)
    world.train(20.0, *[2.0] * 7, 62.0, 2.0)
    state = world.monitor.state_dict()
    world.train(42.0, 2.0)
    world.kill()
    world.new_process(10, load=state, config={"warm_up_steps": "auto"}, log_every=2)
    world.train(12.0, *[2.0] * 9)
    spent = world.end()

    assert (spent.compile, spent.stall, spent.rerun) == (18.0 + 10.0, 60.0, 44.0)
    assert spent.productive == 20 * 2.0
    assert spent.other == 0.0


def test_sessions_that_die_before_their_first_row_are_not_forgotten(world):
    world.new_process(start_up=5.0)
    world.train(*[2.0] * 10)
    state = world.monitor.state_dict()
    world.kill(after=1.0)
    for _ in range(3):
        world.new_process(10, start_up=6.0, load=state, log_every=50)
        world.train(2.0, 2.0)
        world.kill(after=3.0)
    world.new_process(10, start_up=6.0, load=state)
    world.train(2.0, 2.0)
    spent = world.end()

    assert spent.productive == 24.0
    assert spent.start_up == 5.0 + 4 * 6.0
    assert spent.restart == 1.0 + 3 * (4.0 + 3.0), "their steps are in no row: nobody knows what that time was"
    assert spent.other == 0.0


@pytest.mark.slow
def test_nothing_is_counted_twice_over_many_kills(world):
    world.new_process(start_up=1.0)
    state, rerun = None, 0
    for _ in range(20):
        world.train(*[2.0] * 10)
        state, first = world.monitor.state_dict(), world.number
        world.train(*[2.0] * 3)
        rerun += 3
        world.kill(after=2.0)
        world.new_process(first, start_up=1.0, load=state)
    world.train(2.0)
    spent = world.end()

    assert spent.steps == 201
    assert (spent.productive, spent.rerun) == (402.0, 2.0 * rerun)
    assert (spent.restart, spent.start_up, spent.other) == (40.0, 21.0, 0.0)
    assert spent.wall == world.clock()


def test_a_run_that_ended_and_is_continued_a_day_later_has_waited_a_day(world):
    world.new_process()
    world.train(*[2.0] * 10)
    world.spend("eval", 8.0)  # after the last row: only the summary has it
    world.end()
    world.wait(86_400.0)
    world.new_process(10)
    world.train(2.0)
    spent = world.end()

    assert (spent.eval, spent.restart, spent.productive, spent.other) == (8.0, 86_400.0, 22.0, 0.0)


def test_a_second_session_of_the_same_process_does_not_pay_for_the_first(world):
    world.new_process(start_up=5.0)
    world.train(*[2.0] * 10)
    world.end()
    world.wait(9.0)
    world.new_monitor()
    world.wait(1.0)
    world.train(2.0)
    spent = world.end()

    assert (spent.start_up, spent.restart, spent.productive, spent.other) == (6.0, 9.0, 22.0, 0.0)


def test_a_session_made_before_the_earlier_one_ended_begins_at_its_end(world):
    world.new_process()
    world.train(*[2.0] * 10)
    first = world.monitor
    world.new_monitor()
    world.wait(7.0)
    first.close()
    world.wait(3.0)
    world.train(2.0)
    spent = world.end()

    assert (spent.start_up, spent.restart, spent.other) == (3.0, 0.0, 7.0)
    assert spent.wall == 32.0


@pytest.mark.parametrize("through", ["state_dict", "log"])
def test_phases_before_the_first_step_of_a_resumed_session_are_kept_once(world, through):
    world.new_process()
    world.train(*[2.0] * 10)
    world.spend("eval", 1.0)
    state = world.monitor.state_dict()
    world.train(2.0)
    world.kill()
    world.new_process(10, start_up=4.0)
    world.spend("eval", 8.0)
    if through == "state_dict":
        world.monitor.load_state_dict(state)
        world.spend("eval", 16.0)
        world.monitor.load_state_dict(state)  # as a framework that restores twice
    world.train(2.0)
    spent = world.end()

    assert spent.eval == 1.0 + 8.0 + (16.0 if through == "state_dict" else 0.0)
    assert (spent.start_up, spent.rerun, spent.other) == (4.0, 2.0, 0.0)


def test_a_fresh_run_in_a_used_folder_starts_its_own_wall_time(world):
    world.new_process(start_up=5.0)
    world.train(2.0, 2.0)
    world.end()
    world.wait(100.0)
    world.new_process(start_up=3.0)
    world.train(2.0)
    spent = world.end()

    assert (spent.wall, spent.start_up, spent.restart, spent.rerun) == (5.0, 3.0, 0.0, 0.0)


@pytest.mark.parametrize(("restart_count", "is_same"), [("1", True), ("0", False)])
def test_a_job_that_torchelastic_restarts_before_its_first_checkpoint_is_one_run(
    world, monkeypatch, restart_count, is_same
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    world.new_process(start_up=5.0)
    world.train(2.0, 2.0)
    world.kill(after=10.0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart_count)
    world.new_process(start_up=3.0)
    world.train(2.0)
    spent = world.end()

    assert spent.steps == 1
    assert spent.productive == 2.0
    assert (spent.wall, spent.rerun, spent.restart) == ((24.0, 4.0, 10.0) if is_same else (5.0, 0.0, 0.0))
    start = next(record for record in world.sink.records if record.type == "run")
    assert start.environment["torchelastic"]["restart_count"] == int(restart_count)


def test_a_clock_that_lags_behind_an_earlier_session_is_moved_there(world):
    """The first session ran on a host whose clock was ten minutes ahead."""
    ahead = 600.0
    world.clock.advance(ahead)
    world.new_process()
    world.train(*[10.0] * 20)
    state = world.monitor.state_dict()
    world.end()
    world.clock.advance(60.0 - ahead)
    world.new_process(first_step=20, load=state)
    world.train(10.0, 10.0)
    spent = world.end()
    assert spent.wall == 220.0
    assert spent.productive == 220.0


def test_without_torchrun_the_environment_names_no_job(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert "torchelastic" not in describe_environment(torch.device("cpu"))


def test_a_state_taken_to_another_folder_knows_its_first_start(world, tmp_path):
    world.new_process(start_up=5.0)
    world.train(*[2.0] * 10)
    state = json.loads(json.dumps(world.monitor.state_dict()))
    world.kill(after=9.0)
    world.folder = tmp_path / "elsewhere"
    world.new_process(10, load=state)
    world.train(2.0)
    spent = world.end()

    assert (spent.wall, spent.restart, spent.productive) == (36.0, 9.0, 22.0)


def test_a_state_of_another_run_is_not_mixed_with_the_log_that_is_there(world, tmp_path):
    world.new_process()
    world.train(*[2.0] * 10)
    state = world.monitor.state_dict()
    world.kill()
    world.folder = tmp_path / "elsewhere"
    world.new_process()
    world.train(*[3.0] * 30)
    world.kill(after=1.0)
    world.new_process(10, load=state)
    world.train(2.0)
    spent = world.end()

    assert (spent.wall, spent.rerun, spent.restart) == (20 + 90 + 1 + 2, 0.0, 91.0)


@pytest.mark.slow
def test_the_start_of_the_process_is_the_operating_systems(tmp_path):
    """Between the moments just before and just after it was started; the kernel counts in 10 ms."""
    code = "import time; time.sleep(0.3)\nfrom flopwatch.process import start_unix_time; print(repr(start_unix_time()))"
    before = time.time()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    after = time.time()
    told = float(process.communicate()[0])
    assert before - 0.02 <= told <= after + 0.02
