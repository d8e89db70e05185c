"""A trace that another process asks for is taken once, after the next logging window, and disturbs no training."""

import gc
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

import flopwatch
from flopwatch.monitor.trace_capture import TraceCapture
from flopwatch.runs.traces import read_trace
from flopwatch.runs.traces.files import MOST_STEPS, TraceRequests, newest_traces, write_request
from support.sinks.servers import wait_until
from support.small_models import TinyText, text_batch
from support.torchrun import torchrun


@pytest.fixture(scope="module", autouse=True)
def forget_profilers():
    """One that was interrupted looks to later tests like a profiler of the training, until it is collected."""
    yield
    gc.collect()


LOG_EVERY = 4
RANKS = Path(__file__).parent / "scripts" / "traced_ranks.py"


def train(folder, before_step=None, steps=30, *, strict=True, monitored=True):
    """Train; `before_step` maps a step to what happens before it. Returns the trained parameters."""
    torch.manual_seed(0)
    model = TinyText()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = None
    if monitored:
        settings = {"peak_flops_per_s": 1e12, "log_every": LOG_EVERY, "strict": strict, "config": {"log_seconds": 1e9}}
        monitor = flopwatch.TrainingMonitor(folder, model=model, **settings)
    torch.manual_seed(1)
    for step in range(steps):
        if before_step and step in before_step:
            before_step[step]()
        batch = text_batch(2, 8)
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.log_step(step, batch=batch)
    if monitor is not None:
        monitor.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def at_once(monkeypatch):
    """Look for requests on the training's own thread, so that it is certain which steps are traced."""

    def look(self):
        steps = self._requests.new_steps()
        if steps is not None:
            self.ask(steps)

    monkeypatch.setattr(TraceCapture, "look_for_request", look)


def ask(folder, steps=2):
    return lambda: write_request(folder / "traces", steps)


def traces_in(folder):
    return sorted(path.name for path in (folder / "traces").glob("step*.gz"))


def notices(folder, code):
    records = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return [record["message"] for record in records if record.get("code") == code]


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_a_request_is_answered_once_after_the_next_window(tmp_path):
    train(tmp_path, {9: ask(tmp_path)})
    # The window ends with step 11, the profiler starts after step 12, and steps 13 and 14 are traced.
    assert traces_in(tmp_path) == ["step14_rank0.pt.trace.json.gz"]
    split = read_trace(tmp_path / "traces" / "step14_rank0.pt.trace.json.gz")
    assert (split.steps, split.device) == (2, "cpu")
    assert split.matmul_seconds > 0
    assert split.optimizer_seconds > 0


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_parameters_are_bitwise_equal_with_two_traces_and_without_the_monitor(tmp_path):
    traced = train(tmp_path, {5: ask(tmp_path), 17: ask(tmp_path, 3)})
    bare = train(tmp_path, monitored=False)
    assert len(traces_in(tmp_path)) == 2
    assert all(torch.equal(a, b) for a, b in zip(traced, bare, strict=True))


def test_a_request_of_an_earlier_run_is_not_answered(tmp_path):
    ask(tmp_path)()
    train(tmp_path)
    assert traces_in(tmp_path) == []


@pytest.mark.slow
def test_asking_for_more_while_a_trace_is_recorded_does_not_make_it_longer(tmp_path):
    monitor = flopwatch.TrainingMonitor(tmp_path, strict=True, peak_flops_per_s=1e12)
    for step in range(20):
        monitor.capture_trace(3)
        torch.ones(4, 4) @ torch.ones(4, 4)
        monitor.log_step(step)
    monitor.close()
    assert {read_trace(tmp_path / "traces" / name).steps for name in traces_in(tmp_path)} == {3}


def test_a_request_is_seen_by_every_watch_and_only_once(tmp_path):
    watches = [TraceRequests(tmp_path), TraceRequests(tmp_path)]
    write_request(tmp_path, 2)
    assert [watch.new_steps() for watch in watches] == [2, 2]
    assert [watch.new_steps() for watch in watches] == [None, None]
    write_request(tmp_path, MOST_STEPS)
    assert [watch.new_steps() for watch in watches] == [MOST_STEPS, MOST_STEPS]


@pytest.mark.usefixtures("at_once")
def test_a_run_that_ends_first_says_so(tmp_path):
    train(tmp_path, {9: ask(tmp_path)}, steps=13)
    assert traces_in(tmp_path) == []
    assert "the run ended before the first traced step" in notices(tmp_path, "trace_not_taken")[0]


@pytest.mark.usefixtures("at_once")
def test_a_run_that_ends_while_it_traces_writes_its_complete_steps(tmp_path):
    train(tmp_path, {9: ask(tmp_path, 5)}, steps=15)
    (split,) = newest_traces(tmp_path)
    assert split.steps == 2


@pytest.mark.usefixtures("at_once")
def test_a_trace_that_cannot_be_written_does_not_stop_the_training(tmp_path):
    """Something else is in the place of the folder, and no temporary file is left behind."""
    folder = tmp_path / "run"

    def block():
        shutil.rmtree(folder / "traces")
        (folder / "traces").write_text("a file")

    trained = train(folder, {9: ask(folder), 13: block}, strict=False)
    assert all(torch.equal(a, b) for a, b in zip(trained, train(folder, monitored=False), strict=True))
    (message,) = notices(folder, "trace_not_taken")
    assert message.startswith("no trace was taken, the training goes on: FileExistsError")
    assert not torch.autograd._profiler_enabled(), "the profiler is not left on"


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
def test_the_time_to_write_a_trace_is_a_pause(tmp_path, monkeypatch):
    export = torch.profiler.profile.export_chrome_trace
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *given: time.sleep(1) or export(*given))
    train(tmp_path, {9: ask(tmp_path)})
    records = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    seconds = [record for record in records if record["type"] == "row"][-1]["ledger"]["seconds"]
    assert seconds["pause"] >= 1


@pytest.mark.usefixtures("at_once")
def test_while_a_profiler_of_the_user_is_active_no_trace_is_taken(tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as mine:
        train(tmp_path, {5: ask(tmp_path)})
    assert traces_in(tmp_path) == []
    assert "another profiler of this process is active" in notices(tmp_path, "trace_not_taken")[0]
    assert sum(event.count for event in mine.key_averages() if event.key == "Optimizer.step#SGD.step") == 30


@pytest.mark.slow
def test_a_thread_of_its_own_looks_for_requests_and_ends_with_the_run(tmp_path):
    before = set(threading.enumerate())

    def is_looking():
        return any(thread.name == "flopwatch-trace" for thread in set(threading.enumerate()) - before)

    monitor = flopwatch.TrainingMonitor(tmp_path, strict=True, log_every=1, peak_flops_per_s=1e12)
    monitor.log_step(0)
    monitor.log_step(1)
    assert is_looking()
    write_request(tmp_path / "traces", 2)
    for step in range(2, 100_000):
        if traces_in(tmp_path):
            break
        torch.ones(4, 4) @ torch.ones(4, 4)
        monitor.log_step(step)
    assert newest_traces(tmp_path)[0].steps == 2
    monitor.close()
    wait_until(lambda: not is_looking(), "the thread that looks for requests has ended")


@pytest.mark.slow
def test_every_rank_writes_its_own_trace(tmp_path):
    torchrun(RANKS, str(tmp_path), ranks=2)
    found = newest_traces(tmp_path)
    assert [split.rank for split in found] == [0, 1]
    for split in found:
        assert split.steps == 2
        assert split.matmul_seconds > 0
        assert split.exposed_communication_seconds > 0
    assert len(traces_in(tmp_path)) == 2, "each request is answered once"


@pytest.mark.slow
def test_an_evaluation_between_traced_steps_is_no_part_of_them(tmp_path):
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters())
    with flopwatch.TrainingMonitor(tmp_path, model=model, peak_flops_per_s=1e12, log_every=4) as monitor:
        for number in range(12):
            if number == 6:
                monitor.capture_trace(3)
            with monitor.step(batch):
                model(batch).square().mean().backward()
                optimizer.step()
            with monitor.phase("eval"):
                time.sleep(0.5)
    (split,) = newest_traces(tmp_path)

    assert split.steps == 3
    assert split.seconds < 0.5
    assert split.idle_seconds < 0.5
