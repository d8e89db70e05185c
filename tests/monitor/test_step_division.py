"""The time of a step is divided into input wait, optimizer, what follows it, and the rest."""

import gc
import threading
from contextlib import contextmanager

import pytest
import torch

from flopwatch import TrainingMonitor
from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.timing.divide import TapeDivision, times_of
from flopwatch.monitor.timing.tape import HostTimer, Tape
from flopwatch.testing import FakeClock


class Loop:
    """A clock for steps whose parts take known times."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.steps = Tape(HostTimer(self.clock), self.clock)
        self.outside: list[float] = []
        self._division = TapeDivision()

    def takes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def optimizer(self, seconds: float, *, is_own: bool = True) -> None:
        self.steps.optimizer_begins("it", is_own=is_own)
        self.takes(seconds)
        self.steps.optimizer_ends("it", is_own=is_own)

    def end(self) -> dict[str, float | None]:
        """Seconds of the step that ends: whole, input wait, optimizer, and after the optimizer."""
        self.steps.end_step()
        self.steps.begin_gap()
        divided = self._division.divide(self.steps.take())
        self.outside += [seconds for phase, seconds in divided.spent if phase == "outside"]
        times = MeasuredStep(0, **times_of(divided.steps[-1], lambda start, end: end - start))
        return {
            "step": pytest.approx(times.seconds),
            "wait": approximately(times.input_wait_seconds),
            "optimizer": approximately(times.optimizer_seconds),
            "host": approximately(times.host_seconds),
        }

    @contextmanager
    def apart(self):
        began = self.steps.begin_phase()
        yield
        self.steps.end_phase(began)


def approximately(seconds):
    return None if seconds is None else pytest.approx(seconds)


@pytest.fixture
def loop():
    loop = Loop()
    loop.steps.start_step()
    loop.takes(1.0)
    loop.end()
    return loop


def test_a_step_is_input_wait_then_work_then_optimizer_then_the_rest(loop):
    loop.takes(0.5)
    loop.steps.start_step()
    loop.takes(3.0)
    loop.optimizer(0.25)
    loop.takes(0.125)

    assert loop.end() == {"step": 3.875, "wait": 0.5, "optimizer": 0.25, "host": 0.125}


def test_the_time_of_several_optimizers_is_added_up(loop):
    loop.steps.start_step()
    loop.optimizer(0.25)
    loop.takes(1.0)
    loop.optimizer(0.5)

    assert loop.end() == {"step": 1.75, "wait": 0.0, "optimizer": 0.75, "host": 0.0}


def test_an_optimizer_after_the_steps_context_is_no_input_wait_and_belongs_to_the_next_step(loop):
    loop.takes(0.125)
    loop.optimizer(0.25)
    loop.takes(0.5)
    loop.steps.start_step()
    loop.takes(1.0)

    assert loop.end() == {"step": 1.875, "wait": 0.5, "optimizer": 0.25, "host": None}


def test_an_evaluation_after_the_optimizer_is_no_part_of_the_step(loop):
    loop.steps.start_step()
    loop.optimizer(0.25)
    with loop.apart():
        loop.takes(8.0)
    loop.takes(0.5)

    assert loop.end() == {"step": 0.75, "wait": 0.0, "optimizer": 0.25, "host": 0.5}


def test_a_step_that_a_hook_ends_before_the_optimizer_is_done_has_its_time_until_then(loop):
    loop.steps.start_step()
    loop.takes(1.0)
    loop.steps.optimizer_begins()
    loop.takes(0.25)
    step = loop.end()
    loop.steps.optimizer_ends()

    assert step == {"step": 1.25, "wait": 0.0, "optimizer": 0.25, "host": 0.0}


def test_an_optimizer_in_another_thread_or_in_an_evaluation_is_not_timed(loop):
    loop.steps.start_step()
    thread = threading.Thread(target=loop.optimizer, args=(0.25,))
    thread.start()
    thread.join()
    with loop.apart():
        loop.optimizer(2.0)

    assert loop.end() == {"step": 0.25, "wait": 0.0, "optimizer": None, "host": None}


def test_a_step_without_an_optimizer_between_steps_with_one_has_0_s_of_it(loop):
    found = []
    for number in range(8):
        loop.steps.start_step()
        loop.takes(1.0)
        if number % 4 == 3:
            loop.optimizer(2.0)
        found.append(loop.end()["optimizer"])

    assert found == [None, None, None, 2.0, 0.0, 0.0, 0.0, 2.0]


def test_an_optimizer_that_steps_every_seventh_time_is_timed_in_proportion(loop):
    found = []
    for number in range(256 + 49 * 7):
        loop.steps.start_step()
        loop.takes(1.0)
        if number % 7 == 0:
            loop.optimizer(2.0)
        found.append(loop.end()["optimizer"])
    timed = [seconds for seconds in found[256:] if seconds is not None]

    assert len(timed) == 49
    assert 6 <= sum(seconds == 2.0 for seconds in timed) <= 8


def test_an_optimizer_that_another_one_calls_is_part_of_that_one(loop):
    loop.steps.start_step()
    loop.steps.optimizer_begins("outer")
    loop.takes(0.25)
    loop.optimizer(0.5)
    loop.takes(1.0)
    loop.steps.optimizer_ends("outer")
    loop.takes(0.125)

    assert loop.end() == {"step": 1.875, "wait": 0.0, "optimizer": 1.75, "host": 0.125}


def test_a_step_with_an_optimizer_that_cannot_be_timed_is_not_divided_at_all(loop):
    loop.steps.start_step()
    loop.optimizer(0.5)
    loop.steps.optimizer_is_untimed("other")
    loop.takes(2.0)
    unknown = loop.end()
    loop.steps.start_step()
    loop.optimizer(0.5)

    assert unknown == {"step": 2.5, "wait": 0.0, "optimizer": None, "host": None}
    assert loop.end()["optimizer"] == 0.5


def test_an_optimizer_that_raised_an_exception_does_not_run_on_in_the_next_step(loop):
    loop.steps.start_step()
    loop.steps.optimizer_begins("it")  # it raises, the loop catches that and goes on with the next batch
    loop.steps.start_step()
    loop.takes(3.0)
    loop.optimizer(0.5)

    assert loop.end()["optimizer"] == 0.5


def test_between_steps_the_optimizer_of_another_training_is_other_work(loop):
    for _ in range(8):
        loop.steps.start_step()
        loop.takes(1.0)
        loop.optimizer(0.25)
        loop.end()
        loop.takes(0.25)
    for _ in range(20):  # a probe is trained, without a phase
        loop.takes(1.0)
        loop.optimizer(0.25, is_own=False)
    loop.steps.start_step()
    loop.takes(1.0)
    loop.optimizer(0.25)

    assert loop.end() == {"step": 1.25, "wait": None, "optimizer": 0.25, "host": 0.0}
    assert loop.outside == [25.25]


def test_two_trainings_that_take_turns_have_their_own_times(loop):
    for _ in range(8):
        loop.steps.start_step()
        loop.takes(1.0)
        loop.optimizer(0.25)
        found = loop.end()
        loop.takes(2.0)
        loop.optimizer(0.5, is_own=False)

    assert found == {"step": 1.25, "wait": None, "optimizer": 0.25, "host": 0.0}
    assert loop.outside == [2.5] * 7


def test_a_forward_pass_after_the_optimizer_is_not_time_after_the_optimizer(loop):
    loop.steps.start_step()
    loop.optimizer(0.25)
    loop.steps.model_is_called(True)
    loop.takes(3.0)

    assert loop.end() == {"step": 3.25, "wait": 0.0, "optimizer": 0.25, "host": None}


def test_a_training_in_another_thread_than_the_one_that_made_the_monitor_is_divided():
    loop, found = Loop(), []

    def train():
        for _ in range(2):
            loop.steps.start_step()
            loop.takes(1.0)
            loop.optimizer(0.25)
            found.append(loop.end())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()

    assert [step["optimizer"] for step in found] == [0.25, 0.25]


def test_of_a_long_training_every_seventh_step_is_divided_and_no_input_wait_is_wrong(loop):
    found = []
    for _ in range(256 + 21):
        loop.optimizer(0.25)  # after the context of the step before, so that it could be taken for input wait
        loop.takes(0.5)
        loop.steps.start_step()
        loop.takes(1.0)
        found.append(loop.end())

    assert all(step["wait"] == 0.5 for step in found)
    assert [step["optimizer"] for step in found[:250]] == [0.25] * 250
    assert sum(step["optimizer"] is not None for step in found[256:]) == 3


def test_a_batch_that_is_fetched_after_the_optimizer_is_input_wait_only(tmp_path):
    clock = FakeClock()
    model, batch = torch.nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters())

    def loader():
        for _ in range(13):
            clock.advance(2.0)
            yield batch

    with TrainingMonitor(tmp_path, model=model, log_every=4, clock=clock) as monitor:
        batches = iter(monitor.batches(loader()))
        next(batches)
        for number in range(1, 13):
            clock.advance(1.0)
            model(batch).square().mean().backward()
            optimizer.step()
            clock.advance(0.25)
            next(batches)
            monitor.log_step(number, batch=batch)
    values = monitor.summary.values

    assert values["time/host_seconds"] == pytest.approx(values["time/divided_seconds"] * 0.2)
    assert values["time/input_wait_seconds"] == pytest.approx(24.0, abs=2.1)


def test_another_model_that_trains_between_the_steps_is_not_an_optimizer_of_the_run(tmp_path):
    clock = FakeClock()
    model, probe, batch = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.randn(4, 8)
    optimizer, other = (torch.optim.SGD(each.parameters()) for each in (model, probe))
    with TrainingMonitor(tmp_path, model=model, log_every=4, clock=clock) as monitor:
        for number in range(24):
            with monitor.step(batch):
                model(batch).square().mean().backward()
                clock.advance(1.0)
                optimizer.step()
            clock.advance(0.0625)
            for _ in range(10 if number in (12, 18) else 0):
                clock.advance(5.0)
                probe(batch).square().mean().backward()
                other.step()
    values = monitor.summary.values

    assert values["time/outside_seconds"] == pytest.approx(100.0, abs=0.2)
    assert values.get("time/stall_seconds", 0.0) == 0


def train(folder, steps=12, *, closure=False, compiled=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    update = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    with TrainingMonitor(folder, model=model, log_every=4) as monitor:
        for _ in range(steps):
            batch = torch.randn(4, 8)
            with monitor.step(batch) as step:
                loss = model(batch).square().mean()
                loss.backward()
                update(lambda loss=loss: loss) if closure else update()
                optimizer.zero_grad()
                step.log(loss=loss)
    assert monitor.summary is not None
    return monitor.summary.values


def test_a_real_optimizer_is_timed_by_torchs_hooks(tmp_path):
    values = train(tmp_path)

    assert 0 < values["time/optimizer_seconds"] < values["time/divided_seconds"] <= values["time/train_seconds"]
    assert values["time/host_seconds"] > 0


def test_with_a_closure_the_optimizers_time_is_unknown_because_it_contains_the_passes(tmp_path):
    assert "time/optimizer_seconds" not in train(tmp_path, closure=True)


@pytest.mark.slow
def test_the_hooks_are_gone_when_the_monitor_is_closed_or_forgotten(tmp_path):
    from torch.optim import optimizer as module

    tables = [
        table for name, table in vars(module).items() if name.startswith("_global_optimizer") and name.endswith("hooks")
    ]
    gc.collect()  # monitors that earlier tests have forgotten
    before = [list(table) for table in tables]
    train(tmp_path / "closed", steps=2)

    assert len(tables) == 2
    assert [list(table) for table in tables] == before

    forgotten = TrainingMonitor(tmp_path / "forgotten")
    assert [list(table) for table in tables] != before
    del forgotten
    gc.collect()
    assert [list(table) for table in tables] == before


def graphs_of(body):
    """How many graphs torch compiles while `body` runs."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    body()
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
def test_a_compiled_optimizer_has_as_many_graphs_as_without_the_monitor(tmp_path, monkeypatch):
    watched = graphs_of(lambda: train(tmp_path / "watched", compiled=True))
    monkeypatch.setenv("FLOPWATCH_DISABLE", "1")

    def bare():
        with pytest.raises(AssertionError):  # there is no summary
            train(tmp_path / "bare", compiled=True)

    assert watched == graphs_of(bare) > 0
