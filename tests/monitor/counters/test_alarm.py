"""Count against counter: planted disagreements are told once, and healthy trainings raise no alarm.

The device is a fake H100, slowed down so that real steps of a small model use a large share of its peak. No GPU has
run this. What the counters show is worked out here from the FLOPs, the clock and the time of the steps.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from flopwatch.monitor.counters.device import Compared, CounterAlarm
from support.counted_device import BF16_PEAK, CLOCK_MHZ, STEP_FLOPS, TOKENS, WIDTH, FakeTraining, seconds_at

TILES = 1.05
STEPS = 80
"""Windows of four steps, each of more than 10 s. Only those without counted steps are compared, after step 47."""


def active(flops_per_step, step_seconds, peak=BF16_PEAK, clock_mhz=CLOCK_MHZ):
    """The share of cycles in which the tensor cores work, if a share of it is the padding of tiles."""
    return TILES * flops_per_step / step_seconds / (peak * clock_mhz / CLOCK_MHZ)


def readings(tensor_active, clock_mhz=CLOCK_MHZ):
    return {"tensor_active": tensor_active, "sm_clock_mhz": clock_mhz}


@pytest.mark.requirement("R11")
def test_a_training_whose_counters_agree_raises_no_alarm(tmp_path, monkeypatch):
    seconds = seconds_at(0.4)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(STEP_FLOPS, seconds)))
    training.train([seconds] * STEPS)
    assert training.alarms() == []
    row = training.records("row")[-1]
    assert row.values["perf/hfu_percent"] == pytest.approx(40)
    counted = row.values["perf/hardware_flops_per_second_per_device"]
    assert row.values["counters/flops_per_second_per_device"] == pytest.approx(TILES * counted, rel=1e-6)


class Hidden(torch.autograd.Function):
    """A product that torch does not see, as in an extension that was compiled by the user."""

    @staticmethod
    def forward(ctx, x):
        product = x.detach().float().numpy() @ np.ones((WIDTH, WIDTH), dtype=np.float32)
        return torch.from_numpy(product).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_an_op_that_is_hidden_from_the_count_is_noticed(tmp_path, monkeypatch):
    hidden_flops = 2 * 2 * WIDTH * WIDTH * TOKENS  # two of them in a step of ten such products
    seconds = seconds_at(0.4)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(STEP_FLOPS + hidden_flops, seconds)))
    training.train([seconds] * STEPS, hidden=lambda x: Hidden.apply(Hidden.apply(x)))
    assert training.alarms() == ["counters_disagree"]
    (notice,) = [n for n in training.records("notice") if n.code == "counters_disagree"]
    assert "(fake)" in notice.message
    assert "register_formula" in notice.message


def test_a_peak_of_the_wrong_type_is_noticed(tmp_path, monkeypatch):
    """The products run in bf16; the user has set another type."""
    seconds = seconds_at(0.4)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(STEP_FLOPS, seconds)), dtype="tf32")
    training.train([seconds] * STEPS)
    assert training.alarms() == ["counters_disagree"]
    (notice,) = [n for n in training.records("notice") if n.code == "counters_disagree"]
    assert "products in another type than tf32" in notice.message


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_types_outside_of_the_tensor_cores_are_not_compared(dtype, tmp_path, monkeypatch):
    seconds = seconds_at(0.05)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(STEP_FLOPS, seconds)), dtype=dtype)
    training.train([seconds] * STEPS)
    assert training.alarms() == []


def test_products_outside_of_the_tensor_cores_are_not_looked_for_there(tmp_path, monkeypatch):
    """28 % of the FLOPs run in plain fp32; the tensor cores are as busy as the other 72 % make them."""
    seconds = seconds_at(0.1)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(STEP_FLOPS, seconds)))
    weights = torch.ones(WIDTH, WIDTH)
    training.train([seconds] * STEPS, hidden=lambda x: x.float() @ weights)
    assert training.records("row")[-1].values["counters/flops_per_second_per_device"] > 0
    assert training.alarms() == []


def test_a_product_in_fp32_does_not_hide_what_is_not_counted(tmp_path, monkeypatch):
    seconds = seconds_at(0.1)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(1.4 * STEP_FLOPS, seconds)))
    weights = torch.ones(WIDTH, WIDTH)
    training.train([seconds] * STEPS, hidden=lambda x: x.float() @ weights)
    assert training.alarms() == ["counters_disagree"]


def test_points_are_those_of_the_tensor_cores_peak_beside_products_in_fp32(tmp_path, monkeypatch):
    """2 % and 3.4 % of the peak in bf16 are close, although products in fp32 make the mean peak five times lower."""
    seconds = seconds_at(0.02)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(1.6 * STEP_FLOPS, seconds)))
    weights = torch.ones(WIDTH, WIDTH)
    training.train([seconds] * STEPS, hidden=lambda x: x.float() @ weights)
    assert training.alarms() == []


def test_a_clock_of_0_is_not_known(tmp_path, monkeypatch):
    seconds = seconds_at(0.4)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(STEP_FLOPS, seconds), 0.0))
    training.train([seconds] * STEPS)
    assert training.alarms() == []
    assert all("counters/flops_per_second_per_device" not in row.values for row in training.records("row"))


@pytest.mark.parametrize("missing", ["tensor_active", "sm_clock_mhz"])
def test_without_a_part_of_the_figure_there_is_no_figure_and_no_alarm(missing, tmp_path, monkeypatch):
    shown = readings(0.9) | {missing: None}
    training = FakeTraining(tmp_path, monkeypatch, shown)
    training.train([seconds_at(0.1)] * STEPS)
    assert training.alarms() == []
    assert all("counters/flops_per_second_per_device" not in row.values for row in training.records("row"))


@pytest.mark.slow
def test_a_thousand_healthy_windows_raise_no_alarm(tmp_path, monkeypatch):
    """Tiles cost up to 15 %, steps and readings jitter, and now and then a window is slow or its clock is low."""
    chance = random.Random(29)
    steps, shown = [], []
    for _ in range(1000):
        tiles = chance.uniform(1.0, 1.15)
        seconds = seconds_at(0.4) * chance.gauss(1, 0.03) * chance.choice([1.0] * 19 + [1.4])
        busy = tiles * STEP_FLOPS / seconds / BF16_PEAK
        steps.append(seconds)
        shown += [
            readings(busy * chance.gauss(1, 0.1), CLOCK_MHZ * chance.uniform(0.97, 1.0))
            for _ in range(max(1, round(seconds / 0.2)))
        ]
    training = FakeTraining(tmp_path, monkeypatch, shown, log_every=1)
    training.train(steps)
    assert len(training.records("row")) == 1000
    assert training.alarms() == []


HEALTHY = Compared(10.0, 10.0, 50, 989e12, 400e12, 420e12)
WRONG = {"counter_flops_per_s": 800e12}


def given(*changes):
    """How many of these windows raise an alarm."""
    alarm = CounterAlarm()
    return sum(alarm.add(replace(HEALTHY, **change)) is not None for change in changes)


def test_an_alarm_is_of_a_whole_span_and_given_once():
    assert given(WRONG) == 0
    assert given(*[WRONG] * 30) == 1
    assert given(*[WRONG, {"counter_flops_per_s": 100e12}] * 30) == 0


def test_windows_with_other_work_in_them_are_left_out():
    """An evaluation of 5 s between the steps: the counters see it, the steps do not."""
    assert given(*[{"steps_seconds": 5.0, **WRONG}] * 30) == 0


def test_short_windows_are_judged_together():
    short = {"seconds": 0.3, "steps_seconds": 0.4, "readings": 2, **WRONG}
    assert given(*[short] * 45) == 0  # 13.5 s
    assert given(*[short] * 60) == 1


@pytest.mark.parametrize(
    ("change", "disagrees"),
    [
        ({}, False),
        ({"counter_flops_per_s": 499e12}, False),
        ({"counter_flops_per_s": 501e12}, True),
        ({"counter_flops_per_s": 321e12}, False),
        ({"counter_flops_per_s": 319e12}, True),
        ({"counted_flops_per_s": 10e12, "counter_flops_per_s": 39e12}, False),  # 2.9 points
        ({"counted_flops_per_s": 10e12, "counter_flops_per_s": 40e12}, True),
    ],
)
def test_the_bounds_of_the_verdict(change, disagrees):
    assert replace(HEALTHY, **change).disagrees == disagrees
