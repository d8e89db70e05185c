"""Parts of the worker that need no trial: what an exception means, how a step is timed, what its files add up to."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from flopwatch.errors import InputError, UnsupportedError
from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.host.memory import HostPeak
from flopwatch.sweep.progress import Heartbeat, Progress, read_progress
from flopwatch.sweep.supervisor.build_result import collect_measurements
from flopwatch.sweep.worker import measure as worker_clock
from flopwatch.sweep.worker.exception_outcome import describe_exception, outcome_of
from flopwatch.sweep.worker.main import lost_peer
from flopwatch.sweep.worker.measure import measure_trial, peak_bytes, reset_peak, timed_step
from flopwatch.testing import FakeClock

CPU = torch.device("cpu")


def real_cpu_allocation_failure():
    try:
        torch.empty(2**60, dtype=torch.float32)
    except RuntimeError as error:
        return error
    raise AssertionError("this machine has 4 exabytes")


def raised(error):
    """By a `raise` in Python, as anybody can."""
    try:
        raise error
    except type(error) as caught:
        return caught


def while_handling(error, *, settled):
    """A KeyError in the handler of this one; settled by `from None`."""
    try:
        try:
            raise error
        except type(error):
            if settled:
                raise KeyError("a mistake of its own") from None
            return {}["in the handler"]
    except KeyError as outer:
        return outer


def wrapped(error):
    try:
        try:
            raise error
        except type(error) as inner:
            raise RuntimeError("training failed") from inner
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "oom_device"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "oom_device"),
        (MemoryError(), "oom_host"),
        (real_cpu_allocation_failure(), "oom_host"),
        (wrapped(real_cpu_allocation_failure()), "oom_host"),
        (while_handling(MemoryError(), settled=True), "error"),
        (while_handling(torch.OutOfMemoryError("CUDA out of memory"), settled=True), "error"),
        (while_handling(MemoryError(), settled=False), "oom_host"),
        (wrapped(torch.OutOfMemoryError("CUDA out of memory")), "oom_device"),
        (RuntimeError("shape mismatch in memory bank"), "error"),
        (ValueError("out of memory"), "error"),
        (InputError("no such model"), "invalid"),
        (UnsupportedError("tied weights"), "unsupported"),
        (KeyboardInterrupt(), "error"),
        (SystemExit(4), "error"),
    ],
)
def test_what_an_exception_says_of_the_trial(error, outcome):
    assert outcome_of(error) == outcome


def test_an_exception_that_is_its_own_context_ends_the_search():
    error = ValueError("a")
    error.__context__ = KeyError("b")
    error.__context__.__context__ = error
    assert outcome_of(error) == "error"


class UnprintableError(Exception):
    def __repr__(self):
        raise RuntimeError("no")

    __str__ = __repr__


class CountsItsExceptionsError(Exception):
    """An attribute of the name that exception groups have, with something else in it."""

    def __init__(self, exceptions):
        self.exceptions = exceptions


class RaisingPropertyError(Exception):
    @property
    def exceptions(self):
        raise KeyError("no")


@pytest.mark.parametrize("error", [
    CountsItsExceptionsError(3),
    CountsItsExceptionsError(["no exception"]),
    RaisingPropertyError(),
    SystemExit(UnprintableError()),
])  # fmt: skip
def test_an_exception_of_an_odd_make_is_still_described(error):
    assert describe_exception(raised(error))["type"] == type(error).__name__


def test_out_of_memory_is_found_behind_an_exception_of_an_odd_make():
    odd = CountsItsExceptionsError(["no exception"])
    odd.__cause__ = MemoryError()
    assert outcome_of(odd) == "oom_host"


def test_an_exception_that_cannot_be_printed_is_no_lost_peer():
    assert lost_peer(RuntimeError(UnprintableError())) is False


@pytest.mark.parametrize("harm", ["sys.stdout.close()", "sys.stderr = None", "sys.stdout = 3"])
def test_a_trial_that_closed_its_output_leaves_with_its_own_status(harm):
    code = f"import sys; from flopwatch.sweep.worker.main import leave; {harm}; leave(7)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7


def test_a_description_is_json():
    content = describe_exception(SystemExit("goodbye"))
    assert json.loads(json.dumps(content))["message"] == "the trial called sys.exit('goodbye')"


def test_the_parts_of_a_step_add_up_on_a_clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(worker_clock, "monotonic_seconds", clock)
    seconds = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5}
    parts = [(name, lambda value=value: clock.advance(value)) for name, value in seconds.items()]
    assert timed_step(parts, CPU) == {"seconds": 3.5, "forward": 1.0, "backward": 2.0, "optimizer": 0.5}


def test_on_an_accelerator_the_parts_come_from_events_and_nothing_waits_in_between(monkeypatch):
    clock, waits, order = FakeClock(), [], []

    class Event:
        def __init__(self, device, enable_timing):
            assert (device, enable_timing) == ("cuda", True)

        def record(self):
            self.at = clock()

        def elapsed_time(self, other):
            return 1000 * (other.at - self.at)

    monkeypatch.setattr(worker_clock, "monotonic_seconds", clock)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(synchronize=lambda: waits.append(list(order))))
    seconds = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5}
    parts = [(name, lambda n=n: (clock.advance(n), order.append(n))) for name, n in seconds.items()]
    found = timed_step(parts, torch.device("cuda"))
    assert found == {"seconds": 3.5, "forward": 1.0, "backward": 2.0, "optimizer": 0.5}
    assert waits == [[], [1.0, 2.0, 0.5]]


def test_the_peak_of_a_part_is_its_own():
    held = torch.ones(64 * 2**20)  # 256 MiB
    del held
    reset_peak(CPU)
    before = peak_bytes(CPU)
    held = torch.ones(32 * 2**20)  # 128 MiB
    assert peak_bytes(CPU) - before == pytest.approx(2**27, rel=0.1)
    del held
    reset_peak(CPU)
    assert peak_bytes(CPU) - before < 2**26


@pytest.mark.parametrize("why", ["read-only", "ignored"])
def test_where_the_peak_cannot_be_set_back_that_is_said(monkeypatch, tmp_path, why):
    held = torch.ones(64 * 2**20)  # 256 MiB above what follows
    del held
    nowhere = tmp_path / "none" / "clear_refs" if why == "read-only" else tmp_path / "clear_refs"
    monkeypatch.setattr(worker_clock, "CLEAR_REFS", nowhere)
    assert reset_peak(CPU) is False


def test_a_heartbeat_is_read_as_it_was_written(tmp_path):
    assert read_progress(tmp_path) == Progress("start", None)
    heartbeat = Heartbeat(tmp_path)
    heartbeat.beat("measure", 123456)
    assert read_progress(tmp_path) == Progress("measure", 123456)
    heartbeat.beat("done")
    assert read_progress(tmp_path) == Progress("done", None)
    assert read_progress(tmp_path).text == "done"


def test_steps_of_a_trial_that_died_are_kept(tmp_path):
    rows = [{"phase": "warmup", "step": 0, "seconds": 9.0, "forward": 1, "backward": 1, "optimizer": 1}]
    rows += [
        {"phase": "measure", "step": n, "seconds": 2.0, "forward": 0.5, "backward": 1, "optimizer": 0.5}
        for n in range(4)
    ]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"phase": "mea')
    cost = {"model_flops": 100, "hardware_flops": 300, "peak": {"flops_per_s": 500.0}, "notes": []}
    measured = {
        "extra": {"positions_per_step": 64.0},
        "cost": cost,
        "memory": {"host_bytes": 10, "host_method": "high_water"},
    }
    (tmp_path / "measured.json").write_text(
        json.dumps({"done": False, "measured": measured, "environment": {"torch": "x"}})
    )
    left = collect_measurements(tmp_path, TrialSpec("standard", "tiny", 4, 16), HostPeak(25, "samples"))
    found = left.measured
    assert (found.steps.count, found.steps.median, found.steps.first) == (4, 2.0, 9.0)
    assert found.phase_seconds == {"forward": 0.5, "backward": 1, "optimizer": 0.5}
    assert (found.samples_per_s, found.tokens_per_s) == (2.0, 32.0)
    assert (found.cost.mfu, found.cost.hfu) == (0.1, 0.3)
    assert (found.memory.host_bytes, found.memory.host_method) == (25, "samples")
    assert (left.environment, left.done, left.steps_done) == ({"torch": "x"}, False, False)


class KeepsItsOwnLog:
    """A trainer that writes to the trial's steps.jsonl too."""

    log = None

    def __init__(self, model, settings):
        self.model = model

    def forward(self, batch):
        return self.model(**batch)["loss"]

    def backward(self, loss):
        loss.backward()

    def update(self):
        with self.log.open("a") as lines:
            lines.write(json.dumps({"loss": 1.0, "words": "x" * 1000}) + "\n")


def test_a_trial_survives_foreign_lines_among_its_steps(tmp_path, monkeypatch):
    folder = tmp_path / "trials" / "one"
    folder.mkdir(parents=True)
    monkeypatch.setattr(KeepsItsOwnLog, "log", folder / "steps.jsonl")
    trainer = f"{__name__}:{KeepsItsOwnLog.__name__}"
    spec = TrialSpec(trainer, "tiny", 2, 16, device="cpu", steps=2, warmup_steps=1, trace=False)
    measure_trial(folder, spec, Heartbeat(folder))
    left = collect_measurements(folder, spec, HostPeak())
    assert (left.done, left.steps_done, left.measured.steps.count) == (True, True, 2)


def test_a_trial_that_left_nothing_measured_nothing(tmp_path):
    left = collect_measurements(tmp_path, TrialSpec("standard", "tiny", 4, 16), HostPeak())
    assert left.measured.steps is None
    assert left.measured.memory.host_bytes is None
    assert (left.environment, left.done) == ({}, False)


@pytest.mark.parametrize(
    ("cost", "steps", "rates"),
    [
        ({"model_flops": 10**12, "hardware_flops": 2 * 10**12, "peak": {"flops_per_s": 1e12}}, 3, (0.25, 0.5)),
        ({"model_flops": 10**12, "hardware_flops": 2 * 10**12, "peak": None}, 3, (None, None)),
        ({"model_flops": 10**12, "hardware_flops": 2 * 10**12, "peak": {"flops_per_s": 1e12}}, 0, (None, None)),
        ({"model_flops": 10**12, "hardware_flops": None, "peak": {"flops_per_s": 1e12}}, 3, (0.25, None)),
    ],
)
def test_rates_need_a_peak_and_seconds_and_are_absent_without(tmp_path, cost, steps, rates):
    row = {"phase": "measure", "step": 0, "seconds": 4.0, "forward": 1, "backward": 2, "optimizer": 1}
    (tmp_path / "steps.jsonl").write_text((json.dumps(row) + "\n") * steps)
    (tmp_path / "measured.json").write_text(json.dumps({"measured": {"cost": {**cost, "notes": []}}}))
    found = collect_measurements(tmp_path, TrialSpec("standard", "tiny", 4, 16), HostPeak()).measured
    assert (found.cost.mfu, found.cost.hfu) == rates
