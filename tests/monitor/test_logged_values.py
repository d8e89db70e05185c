"""What a user logs may be anything: it can cost that value, and nothing else."""

import json
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flopwatch import TrainingMonitor
from flopwatch.testing import RecordingSink

pytestmark = pytest.mark.requirement("R20")

STEPS, LOG_EVERY, BATCH, WIDTH = 20, 5, 4, 8
FLOPS = STEPS * 2 * (2 * BATCH * WIDTH * WIDTH)
"""A linear layer without a gradient for its input: the forward product and the one for the weight."""


class RaisingFloat:
    def __float__(self):
        raise RuntimeError("this object refuses to be a number")


class LyingArray:
    """Has a length and an item, and neither is of use."""

    def __len__(self):
        raise OSError("no length")

    def item(self):
        raise OSError("no item")


class StrangeTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} is not for this tensor")


def fake_tensor():
    with FakeTensorMode():
        return torch.empty(())


NOT_NUMBERS = {
    "list": [1.0, 2.0],
    "tuple": (1.0,),
    "dict": {"a": 1.0},
    "set": {1.0},
    "bytes": b"text",
    "generator": iter([1.0]),
    "object": object(),
    "object whose __float__ raises": RaisingFloat(),
    "object whose methods raise": LyingArray(),
    "int beyond the floats": 10**400,
    "complex": 1 + 2j,
    "array": np.arange(3.0),
    "array of objects": np.array([None]),
    "array of text": np.array("text"),
    "complex array": np.array(1j),
    "empty tensor": torch.ones(0),
    "tensor of many values": torch.ones(3),
    "large tensor": torch.ones(1000, 1000),
    "tensor of many values with a graph": 2 * torch.ones(5, requires_grad=True),
    "complex tensor": torch.ones((), dtype=torch.complex64),
    "sparse tensor": torch.ones(1, 1).to_sparse(),
    "nested tensor": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    "tensor without memory": torch.ones((), device="meta"),
    "fake tensor": fake_tensor(),
    "tensor of bits": torch.empty((), dtype=torch.bits8),
    "tensor with methods that raise": torch.ones(()).as_subclass(StrangeTensor),
}
NUMBERS = {
    "float": (1.5, 1.5),
    "int": (3, 3.0),
    "bool": (True, 1.0),
    "nan": (float("nan"), "nan"),
    "infinity": (float("inf"), "inf"),
    "the largest float": (1.7e308, 1.7e308),
    "scalar tensor": (torch.tensor(1.5), 1.5),
    "tensor of one value": (torch.full((1, 1), 1.5), 1.5),
    "tensor with a graph": (torch.ones((), requires_grad=True) * 1.5, 1.5),
    "nan tensor": (torch.tensor(float("nan")), "nan"),
    "8-bit float": (torch.ones((), dtype=torch.float8_e4m3fn), 1.0),
    "16-bit float": (torch.ones((), dtype=torch.bfloat16), 1.0),
    "bool tensor": (torch.ones((), dtype=torch.bool), 1.0),
    "unsigned tensor": (torch.tensor(2**63, dtype=torch.uint64), float(2**63)),
    "numpy scalar": (np.float32(1.5), 1.5),
    "array without axes": (np.array(1.5), 1.5),
    "array of one value": (np.array([1.5]), 1.5),
}


def train(tmp_path, logged, sinks=()):
    """Logs `logged(step)` on each step of a real training; returns the monitor and the rows of its log."""
    model = torch.nn.Linear(WIDTH, WIDTH)
    monitor = TrainingMonitor(tmp_path, model=model, log_every=LOG_EVERY, sinks=list(sinks))
    for number in range(STEPS):
        batch = torch.randn(BATCH, WIDTH)
        with monitor.step(batch) as step:
            model(batch).sum().backward()
            step.log(**{"loss": 0.5, "other": 2.0, **logged(number)})
    monitor.close()
    lines = [json.loads(line) for line in monitor.log_path.read_text().splitlines()]
    return monitor, [line for line in lines if line["type"] == "row"]


def expect_all_the_rest(monitor, rows, *, loss=0.5):
    assert monitor.summary.failed_parts == {}
    assert monitor.summary.values["total/steps"] == STEPS
    assert monitor.summary.values["total/model_flops"] == FLOPS
    assert len(rows) == STEPS // LOG_EVERY
    assert [row["values"]["training/other"] for row in rows] == [2.0] * len(rows)
    assert [row["values"].get("training/loss") for row in rows] == [loss] * len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOT_NUMBERS)
def test_what_is_no_number_is_left_out_and_said_and_costs_nothing_else(tmp_path, caplog, kind):
    sink, names = RecordingSink("other"), ("mine", "loss", "grad_norm", "lr", "epoch")
    monitor, rows = train(tmp_path, lambda step: dict.fromkeys(names, NOT_NUMBERS[kind]), [sink])

    expect_all_the_rest(monitor, rows, loss=None)
    assert all(f"training/{name}" not in row["values"] for row in rows for name in names)
    assert len([record for record in sink.records if record.type == "row"]) == len(rows)
    said = [record.getMessage() for record in caplog.records if "not a single number" in record.getMessage()]
    assert sorted(message.split()[1] for message in said) == sorted(names)


def test_whatever_is_one_number_is_logged_as_that_number(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy's float() of an array of one value is deprecated
        monitor, rows = train(tmp_path, lambda step: {kind: value for kind, (value, _) in NUMBERS.items()})

    expect_all_the_rest(monitor, rows)
    for kind, (_, expected) in NUMBERS.items():
        assert [row["values"][f"training/{kind}"] for row in rows] == [expected] * len(rows), kind


@pytest.mark.parametrize("kind", ["nan", "infinity", "the largest float", "16-bit float"])
def test_a_loss_of_any_number_is_logged_as_that_number(tmp_path, kind):
    value, expected = NUMBERS[kind]
    monitor, rows = train(tmp_path, lambda step: {"loss": value})

    expect_all_the_rest(monitor, rows, loss=expected)


def test_a_text_is_no_metric_and_nobody_is_told(tmp_path, caplog):
    monitor, rows = train(tmp_path, lambda step: {"mine": "3.5"})

    expect_all_the_rest(monitor, rows)
    assert caplog.records == []


def test_one_step_without_a_number_leaves_the_mean_of_the_others(tmp_path, caplog):
    _, rows = train(tmp_path, lambda step: {"mine": [1, 2] if step % LOG_EVERY == 0 else float(step)})

    assert [row["values"]["training/mine"] for row in rows] == [2.5, 7.5, 12.5, 17.5]


def test_a_batch_whose_values_cannot_be_read_costs_its_own_tokens_only(tmp_path, caplog):
    model = torch.nn.Linear(WIDTH, WIDTH)
    monitor = TrainingMonitor(tmp_path, model=model, log_every=LOG_EVERY)
    ids = torch.randint(0, 9, (2, 8))
    for number in range(STEPS):
        labels = ids.to(torch.bfloat16).requires_grad_() if number == 7 else ids
        monitor.log_step(number, loss=0.5, batch={"input_ids": ids, "labels": labels})
    monitor.close()

    assert monitor.summary.values["total/steps"] == STEPS
    assert monitor.summary.values["total/tokens"] == (STEPS - 1) * ids.numel()
    assert monitor.summary.failed_parts.keys() == {"batch"}
