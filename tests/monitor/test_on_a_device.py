"""How the monitor reads an accelerator: late, and never waiting. The events are fakes; no GPU has run this.

What only a GPU can show is in `tests/cli/test_doctor_gpu.py`: the checks of `flopwatch doctor --gpu`.
"""

import pytest
import torch

import flopwatch
from flopwatch.monitor.arrival import LateValues
from flopwatch.monitor.timing.tape import EventTimer
from flopwatch.testing import FakeClock, RecordingSink
from support.fakes import FakeEvents


@pytest.fixture
def clock():
    return FakeClock()


def far_away(tensors, events):
    return LateValues(tensors, event=events, is_here=lambda tensor: False)


def test_values_come_in_one_copy_per_kind_and_in_order(clock):
    tensors = [torch.tensor([3, 4]), torch.tensor(1.5), torch.tensor(7), torch.tensor([[1, 2], [3, 4]])]
    late = far_away(tensors, FakeEvents(clock))
    assert late.read() == [[3, 4], [1.5], [7], [1, 2, 3, 4]]


def test_nobody_waits_for_values_that_are_under_way(clock):
    events = FakeEvents(clock, lag_seconds=5.0)
    late = far_away([torch.tensor(1.5)], events)
    assert not late.are_there()
    clock.advance(5.0)
    assert late.are_there()
    assert events.waits == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_losses_of_every_type_are_read(dtype, clock):
    assert far_away([torch.tensor(1.5, dtype=dtype)], FakeEvents(clock)).read() == [[1.5]]


@pytest.mark.parametrize(("placement", "expected"), [("replicated", 2.0), ("partial", None)])
def test_a_norm_that_is_spread_over_ranks_is_never_gathered(tmp_path, caplog, placement, expected):
    """Reading a partial value would be a collective that the other ranks know nothing of."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        norm = DTensor.from_local(torch.tensor(2.0), mesh, [Replicate() if placement == "replicated" else Partial()])
        monitor = flopwatch.TrainingMonitor(tmp_path)
        monitor.log_step(0, grad_norm=norm)
        monitor.close()  # of four ranks, three never come
        values = monitor.latest
    finally:
        torch.distributed.destroy_process_group()

    assert values.get("training/grad_norm") == expected
    assert ("full_tensor" in caplog.text) == (expected is None)


def test_rows_come_when_the_device_has_got_there(tmp_path, clock, monkeypatch):
    """The device is 25 s behind; windows of 10 s become rows when their last step has passed on it."""
    monkeypatch.setattr("flopwatch.monitor.arrival.sleep", lambda seconds: clock.advance(1.0))
    events = FakeEvents(clock, lag_seconds=25.0)
    monkeypatch.setattr("flopwatch.monitor.run.timer_for", lambda device, clock: EventTimer(device, events))
    sink = RecordingSink()
    monitor = flopwatch.TrainingMonitor(
        tmp_path,
        model=torch.nn.Linear(8, 8),
        sinks=[sink],
        clock=clock,
        strict=True,
        peak_flops_per_s=1e12,
        log_every=10,
        config={"warm_up_steps": 0, "log_seconds": 1e9},
    )
    rows_after = []
    for number in range(60):
        clock.advance(1.0)
        monitor.log_step(number, loss=1.0, batch=torch.zeros(4, 8))
        rows_after.append(monitor.latest.get("total/steps", 0))
    monitor.close()

    assert events.waits == 0, "nobody waits inside the device's library, not even at the end"
    assert rows_after[29] == 0
    assert rows_after[39] == 10
    assert rows_after[59] == 30
    rows = [record for record in sink.records if record.type == "row"]
    assert [row.step for row in rows] == [9, 19, 29, 39, 49, 59]
    assert monitor.summary.values["total/steps"] == 60
    assert rows[1].values["perf/step_time"] == 1.0


def test_a_device_that_hangs_does_not_hold_up_the_end_after_an_error(tmp_path, clock, monkeypatch):
    """As after the death of another rank: the device waits for a collective that never ends."""
    events = FakeEvents(clock, lag_seconds=float("inf"))
    monkeypatch.setattr("flopwatch.monitor.run.timer_for", lambda device, clock: EventTimer(device, events))
    monkeypatch.setattr("flopwatch.monitor.run._CLOSE_AFTER_ERROR_SECONDS", 0.01)
    monitor = flopwatch.TrainingMonitor(tmp_path, model=torch.nn.Linear(8, 8), clock=clock)
    for number in range(7):
        monitor.log_step(number, batch=torch.zeros(4, 8))
    monitor.__exit__(RuntimeError, RuntimeError("rank 3 is gone"), None)
    assert monitor.summary.notices["device_late"] == 1
    assert "total/steps" not in monitor.summary.values or monitor.summary.values["total/steps"] == 0
    assert events.waits == 0
