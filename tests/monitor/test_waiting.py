"""What is waiting for a batch and what is not: exact, with a clock that stands still."""

import threading

import pytest
import torch

import flopwatch
from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.timing.divide import TapeDivision, UsualGaps, times_of
from flopwatch.monitor.timing.hooks import PassHooks
from flopwatch.monitor.timing.tape import BACKWARD, BACKWARD_END, HostTimer, Tape
from flopwatch.testing import FakeClock, RecordingSink

BATCH = {"input_ids": torch.zeros(4, 16, dtype=torch.long)}


class Run:
    """A monitored run without a model in which time passes only where it is said."""

    def __init__(self, folder):
        self.clock = FakeClock()
        self.sink = RecordingSink()
        options = {"log_every": 1, "strict": True, "config": {"warm_up_steps": 0, "log_seconds": 1e9}}
        self.monitor = flopwatch.TrainingMonitor(folder, sinks=[self.sink], clock=self.clock, **options)

    def batches(self, count, wait=1.0):
        """A loader that takes its time."""
        for _ in range(count):
            self.clock.advance(wait)
            yield BATCH

    def work(self, seconds=3.0):
        self.clock.advance(seconds)

    def column(self, name):
        self.monitor.close()
        rows = [record for record in self.sink.records if record.type == "row"]
        return [value for row in rows for value in row.steps.get(name, [None] * len(row.steps["step"]))]

    def notices(self):
        """Without those that say that there is no model, as there is none here."""
        return [r.code for r in self.sink.records if r.type == "notice" and r.code != "no_model"]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_a_loop_inside_the_step_waits_for_each_of_its_micro_batches(run):
    batches = iter(run.monitor.batches(run.batches(12)))
    for _ in range(3):
        with run.monitor.step() as step:
            for _ in range(4):
                step.micro_batch(next(batches))
                run.work()

    assert run.column("input_wait_seconds") == [4.0] * 3
    assert run.column("seconds") == [16.0] * 3


def test_a_loop_around_the_steps_waits_for_each_of_its_micro_batches(run):
    for index, batch in enumerate(run.monitor.batches(run.batches(12))):
        run.monitor.micro_batch(batch)
        run.work()
        if index % 4 == 3:
            run.monitor.log_step(index // 4)

    assert run.column("input_wait_seconds") == [3.0, 4.0, 4.0], "the first batch came before the first step"
    assert run.column("seconds") == [15.0, 16.0, 16.0]


def test_batches_that_a_function_fetches_are_waited_for_in_a_context(run):
    def get_batch():
        run.clock.advance(1.0)
        return BATCH

    for _ in range(3):
        with run.monitor.step() as step:
            for _ in range(2):
                with run.monitor.input_wait():
                    batch = get_batch()
                step.micro_batch(batch)
                run.work()

    assert run.column("input_wait_seconds") == [2.0] * 3


def test_micro_batches_that_are_fetched_unseen_make_the_wait_unknown_and_that_is_told(run, caplog):
    loader = run.batches(12)
    for _ in range(3):
        with run.monitor.step() as step:
            for _ in range(4):
                step.micro_batch(next(loader))
                run.work()

    assert run.column("input_wait_seconds") == [None] * 3
    assert run.column("seconds") == [16.0] * 3
    assert run.notices() == ["input_wait_unknown"]
    assert "perf/input_wait_percent" not in run.monitor.summary.values


def test_a_step_that_is_given_no_batch_does_not_know_when_it_came(run):
    loader = run.batches(3)
    for _ in range(3):
        with run.monitor.step():
            next(loader)
            run.work()

    assert run.column("input_wait_seconds") == [None] * 3


def test_starting_the_loader_of_a_new_epoch_is_waiting(run):
    class Loader:
        def __len__(self):
            return 2

        def __iter__(self):
            run.clock.advance(10.0)
            return run.batches(2)

    loader = run.monitor.batches(Loader())
    for _ in range(2):
        for batch in loader:
            with run.monitor.step(batch):
                run.work()

    assert run.column("input_wait_seconds") == [0.0, 1.0, 11.0, 1.0]
    assert len(loader) == 2


def test_what_a_phase_or_another_thread_fetches_is_not_waited_for(run):
    for batch in run.monitor.batches(run.batches(3)):
        with run.monitor.step(batch):
            run.work()
            thread = threading.Thread(target=lambda: list(run.monitor.batches(run.batches(5, wait=100.0))))
            thread.start()
            thread.join()
        with run.monitor.phase("eval"):
            list(run.monitor.batches(run.batches(7)))

    assert run.column("input_wait_seconds") == [0.0, 1.0, 1.0]
    assert run.column("seconds") == [503.0, 504.0, 504.0]
    assert run.monitor.summary.values["time/eval_seconds"] == 21.0


@pytest.mark.parametrize("is_timed", [True, False])
def test_what_the_monitor_does_between_steps_is_no_wait(run, is_timed):
    loader = run.batches(9)
    for batch in run.monitor.batches(loader) if is_timed else loader:
        with run.monitor.step(batch):
            run.work()
        run.monitor._do("state_dict", lambda core: run.clock.advance(50.0))

    assert run.column("input_wait_seconds") == [0.0] + [1.0] * 8
    assert run.column("seconds") == [3.0] + [54.0] * 8
    assert run.notices() == []


def test_an_error_of_the_loader_reaches_the_loop_and_time_goes_on(run):
    def loader():
        yield BATCH
        run.clock.advance(2.0)
        raise ValueError("bad file")

    batches = iter(run.monitor.batches(loader()))
    with run.monitor.step(next(batches)):
        run.work()
    with pytest.raises(ValueError, match="bad file"):
        next(batches)
    with run.monitor.step(BATCH):
        run.work()

    assert run.column("input_wait_seconds") == [0.0, 2.0]


def test_a_monitor_that_is_switched_off_leaves_the_loader_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_DISABLE", "1")
    monitor = flopwatch.TrainingMonitor(tmp_path)
    loader = [1, 2]
    assert monitor.batches(loader) is loader
    with monitor.input_wait():
        pass


def plain(run, evaluate):
    for index, batch in enumerate(run.batches(40)):
        with run.monitor.step(batch):
            run.work()
        if index % 10 == 9:
            evaluate()


def with_timed_batches(run, evaluate):
    plain_batches = run.monitor.batches(run.batches(40))
    for index, batch in enumerate(plain_batches):
        with run.monitor.step(batch):
            run.work()
        if index % 10 == 9:
            evaluate()


def with_timed_batches_evaluating_first(run, evaluate):
    for index, batch in enumerate(run.monitor.batches(run.batches(40))):
        if index and index % 10 == 0:
            evaluate()
        with run.monitor.step(batch):
            run.work()


def with_timed_batches_and_log_step(run, evaluate):
    for index, batch in enumerate(run.monitor.batches(run.batches(40))):
        run.work()
        run.monitor.log_step(index, batch=batch)
        if index % 10 == 9:
            evaluate()


@pytest.mark.parametrize(
    ("loop", "seconds_outside"),
    [
        (plain, 3 * 61.0),  # after the fourth evaluation no step comes
        (with_timed_batches, 4 * 60.0),  # but the loader is asked once more
        (with_timed_batches_evaluating_first, 3 * 60.0),
        (with_timed_batches_and_log_step, 4 * 60.0),
    ],
)
def test_evaluation_outside_a_phase_is_told_and_is_neither_wait_nor_stall_nor_step(run, loop, seconds_outside):
    loop(run, lambda: run.clock.advance(60.0))
    run.monitor.close()
    values = run.monitor.summary.values

    assert values["perf/step_time"] == pytest.approx(4.0, rel=0.03)
    assert values["perf/input_wait_percent"] == pytest.approx(25.0, abs=0.7)
    assert values["time/outside_seconds"] == seconds_outside
    assert values.get("time/stall_seconds", 0.0) == 0.0
    assert "time_outside_steps" in run.notices()


def test_evaluation_in_a_loop_that_opens_no_steps_is_a_stall_that_is_told(run):
    for index, batch in enumerate(run.batches(40)):
        run.work()
        run.monitor.log_step(index, batch=batch)
        if index % 10 == 9:
            run.clock.advance(60.0)
    run.monitor.close()

    assert run.monitor.summary.values["time/stall_seconds"] == 180.0
    assert "stalled" in run.notices()


def test_a_loader_that_gets_slower_for_good_is_waited_for_soon(run):
    for wait in (0.1, 30.0):
        for batch in run.batches(100, wait):
            with run.monitor.step(batch):
                run.work()

    waits = run.column("input_wait_seconds")
    assert waits[60:100] == pytest.approx([0.1] * 40)
    assert waits[-80:] == pytest.approx([30.0] * 80)


def gaps():
    usual = UsualGaps(worker_processes=lambda: False)
    return lambda seconds: usual.is_outside(seconds, work_seconds=0.3, has_seen_other_work=False, cpu_seconds=0.0)


def test_gaps_are_judged_once_there_are_some_and_short_ones_never():
    is_outside = gaps()
    assert not is_outside(100.0)
    is_outside = gaps()
    assert not any(is_outside(0.001) for _ in range(20))
    assert not is_outside(0.25), "not longer than a step"
    assert is_outside(0.35)


def test_a_gap_in_which_the_model_was_called_is_not_taken_for_a_wait(run):
    for index, batch in enumerate(run.batches(10)):
        with run.monitor.step(batch):
            run.work()
        if index == 4:
            run.monitor._run.tape.model_is_called(False)
            run.clock.advance(1.0)

    assert run.column("input_wait_seconds") == [0.0, 1.0, 1.0, 1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0]
    assert run.column("seconds") == [3.0, 4.0, 4.0, 4.0, 4.0, 5.0, 4.0, 4.0, 4.0, 4.0]


def test_a_loop_that_evaluates_after_every_step_is_told_that_this_is_in_the_step_time(run):
    for batch in run.batches(10):
        with run.monitor.step(batch):
            run.work()
        run.monitor._run.tape.model_is_called(has_grad=False)
        run.clock.advance(2.0)
    run.monitor.close()

    assert run.monitor.summary.values["perf/step_time"] == pytest.approx(5.7)
    assert "perf/input_wait_percent" not in run.monitor.summary.values, "only the first step's is known"
    assert run.notices() == ["work_between_steps"]


class Device:
    """Does what is queued after all that was queued before; a mark passes when the device gets there."""

    def __init__(self, clock):
        self._clock = clock
        self._idle_from = 0.0

    def queue(self, seconds):
        self._idle_from = max(self._idle_from, self._clock()) + seconds

    def mark(self):
        self._idle_from = max(self._idle_from, self._clock())
        return self._idle_from

    def has_passed(self, mark):
        return True

    def seconds(self, start, end):
        return end - start


def test_a_wait_during_which_the_device_is_still_busy_is_no_wait():
    """The host queues 5 s of work in no time and waits 2 or 7 s for the next batch."""
    clock = FakeClock()
    device = Device(clock)
    steps = Tape(device, clock)
    for wait in (2.0, 2.0, 7.0, 7.0):
        clock.advance(wait)
        steps.start_step()
        device.queue(5.0)
        steps.end_step()
        steps.begin_gap()
    times = [MeasuredStep(0, **times_of(parts, device.seconds)) for parts in TapeDivision().divide(steps.take()).steps]

    # Batches come at 2, 4, 11 and 18 s; the device works from 2 to 17 s without a pause, then again from 18 s on.
    assert [step.seconds for step in times] == [5.0, 5.0, 5.0, 6.0]
    assert [step.input_wait_seconds for step in times] == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(("host_seconds", "idle_seconds"), [(2.0, 0.0), (7.0, 2.0)])
def test_work_of_the_host_between_the_passes_is_lost_only_where_the_device_was_idle(host_seconds, idle_seconds):
    clock = FakeClock()
    device = Device(clock)
    steps = Tape(device, clock)
    hooks = PassHooks(steps)
    steps.start_step()
    hooks.forward_begins()
    device.queue(5.0)
    hooks.forward_ends(None)
    clock.advance(host_seconds)  # the host fetches the next batch, as nanoGPT does
    steps.add(BACKWARD)
    device.queue(5.0)
    steps.add(BACKWARD_END)
    steps.end_step()

    (step,) = [
        MeasuredStep(0, **times_of(parts, device.seconds)) for parts in TapeDivision().divide(steps.take()).steps
    ]
    assert step.passes_seconds == 10.0
    assert step.seconds - step.passes_seconds == idle_seconds


def test_a_step_whose_number_is_none_ends_no_step_and_later_steps_keep_their_own_times(run):
    for index in range(3):
        run.monitor.start_step()
        run.work(1.0 + index)
        if index == 1:
            with pytest.raises(TypeError):
                run.monitor.log_step(None)
            run.work(10.0)
        run.monitor.log_step(index, loss=float(index))

    assert run.column("seconds") == [1.0, 12.0, 3.0]
    assert run.column("loss") == [0.0, 1.0, 2.0]


def test_a_step_that_lasts_for_very_long_keeps_its_time_and_little_else(run, monkeypatch):
    monkeypatch.setattr("flopwatch.monitor.timing.tape._MOST_EVENTS", 50)
    monitored = run.monitor._run
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    run.monitor.start_step()
    for _ in range(1000):
        monitored.counter._callbacks.passes.gradient_arrived()
        optimizer.step()
        run.work(1.0)
    assert len(monitored.tape.events) <= 50
    assert len(monitored.arrivals.division._step.segments) <= 100
    run.monitor.log_step(0)
    run.monitor.start_step()
    run.work(3.0)
    run.monitor.log_step(1)

    assert run.column("seconds") == [1000.0, 3.0]


def test_gradients_of_a_loop_that_ends_no_step_are_not_kept(monkeypatch):
    monkeypatch.setattr("flopwatch.monitor.timing.tape._MOST_EVENTS", 50)
    clock = FakeClock()
    tape = Tape(HostTimer(clock), clock)
    for _ in range(1000):
        PassHooks(tape).gradient_arrived()
    assert len(tape.events) <= 51
