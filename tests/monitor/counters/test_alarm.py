"""Count against counter: planted disagreements raise the right alarm, once, and healthy trainings raise none.

The device is a fake H100, slowed down so that real steps of a small model use a large share of its peak. No GPU has
run this. What the counters show is worked out here from the FLOPs, the clock and the time of the steps.
"""

import random

import numpy as np
import pytest
import torch

from flopwatch.monitor.counters.alarm import CONFIRMED_BY, Compared, CounterAlarm, judge
from support.counted_device import BF16_PEAK, CLOCK_MHZ, STEP_FLOPS, TOKENS, WIDTH, FakeTraining, seconds_at

TILES = 1.05
STEPS = 80
"""Windows of four steps, each of more than 10 s. Only those without counted steps are compared, after step 47."""


def active(flops_per_step, step_seconds, peak=BF16_PEAK, clock_mhz=CLOCK_MHZ):
    """The share of cycles in which the tensor cores work, if a share of it is the padding of tiles."""
    return TILES * flops_per_step / step_seconds / (peak * clock_mhz / CLOCK_MHZ)


def readings(tensor_active, clock_mhz=CLOCK_MHZ, **more):
    return {
        "tensor_active": tensor_active,
        "sm_clock_mhz": clock_mhz,
        "throttled": (),
        "other_memory_bytes": 300 << 20,
        **more,
    }


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


def test_an_op_that_is_hidden_from_the_count_is_named(tmp_path, monkeypatch):
    hidden_flops = 2 * 2 * WIDTH * WIDTH * TOKENS  # two of them in a step of ten such products
    seconds = seconds_at(0.4)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(STEP_FLOPS + hidden_flops, seconds)))
    training.train([seconds] * STEPS, hidden=lambda x: Hidden.apply(Hidden.apply(x)))
    assert training.alarms() == ["counters_not_counted"]
    (notice,) = training.records("notice")
    assert "(fake)" in notice.message
    assert "register_formula" in notice.message


@pytest.mark.parametrize("told", ["tf32", "fp8"])
def test_a_peak_of_the_wrong_type_is_named_with_the_right_type(told, tmp_path, monkeypatch):
    """The products run in bf16; the user has set another type."""
    seconds = seconds_at(0.4)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(STEP_FLOPS, seconds)), dtype=told)
    training.train([seconds] * STEPS)
    assert training.alarms() == ["counters_peak_type"]
    (notice,) = training.records("notice")
    assert f"not in {told}, but in bf16" in notice.message


def test_a_peak_of_a_type_outside_of_the_tensor_cores_is_named(tmp_path, monkeypatch):
    seconds = seconds_at(0.05)  # of the peak in bf16; 74 % of that in fp32
    training = FakeTraining(tmp_path, monkeypatch, readings(active(STEP_FLOPS, seconds)), dtype="fp32")
    training.train([seconds] * STEPS)
    assert training.alarms() == ["counters_tensor_cores_busy"]


def test_fp64_is_no_alarm_because_some_tensor_cores_compute_it(tmp_path, monkeypatch):
    seconds = seconds_at(0.05)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(STEP_FLOPS, seconds)), dtype="fp64")
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
    assert training.alarms() == ["counters_not_counted"]


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


def test_a_clock_that_is_held_down_is_named_with_its_reason(tmp_path, monkeypatch):
    clock = 1100.0
    seconds = seconds_at(0.3)
    busy = active(STEP_FLOPS, seconds, clock_mhz=clock)
    training = FakeTraining(tmp_path, monkeypatch, readings(busy, clock, throttled=("power cap",)))
    training.train([seconds] * STEPS)
    assert training.alarms() == ["counters_throttled"]
    (notice,) = training.records("notice")
    assert "60.1 % of that of its peak" in notice.message
    assert "power cap in 100 %" in notice.message


def test_a_low_clock_that_nothing_holds_down_is_no_alarm(tmp_path, monkeypatch):
    """As of a device that waits for batches half of the time."""
    seconds = seconds_at(0.1)
    shown = readings(active(STEP_FLOPS, seconds, clock_mhz=1000.0), 1000.0)
    training = FakeTraining(tmp_path, monkeypatch, shown)
    training.train([seconds] * STEPS)
    assert training.alarms() == []


def test_another_process_on_the_device_is_named_with_its_memory(tmp_path, monkeypatch):
    seconds = seconds_at(0.25)
    shown = readings(active(1.8 * STEP_FLOPS, seconds), other_memory_bytes=9 << 30)
    training = FakeTraining(tmp_path, monkeypatch, shown)
    training.train([seconds] * STEPS)
    assert training.alarms() == ["counters_other_process"]
    (notice,) = training.records("notice")
    assert "9.00 GiB" in notice.message


def test_memory_of_others_alone_is_no_alarm(tmp_path, monkeypatch):
    seconds = seconds_at(0.4)
    training = FakeTraining(tmp_path, monkeypatch, readings(active(STEP_FLOPS, seconds), other_memory_bytes=9 << 30))
    training.train([seconds] * STEPS)
    assert training.alarms() == []


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
        for _ in range(max(1, round(seconds / 0.2))):
            held = ("power cap",) if chance.random() < 0.1 else ()
            jitter = chance.gauss(1, 0.1)
            shown.append(readings(busy * jitter, CLOCK_MHZ * chance.uniform(0.97, 1.0), throttled=held))
    training = FakeTraining(tmp_path, monkeypatch, shown, log_every=1)
    training.train(steps)
    assert len(training.records("row")) == 1000
    assert training.alarms() == []


HEALTHY = Compared(10.0, 10.0, 50, "bf16", 989e12, 400e12, 420e12, 0.43, 1.0)


def windows(*changes):
    return [Compared(**{**{name: getattr(HEALTHY, name) for name in HEALTHY.__slots__}, **each}) for each in changes]


def found(alarm, compared):
    return [each.kind for each in map(alarm.add, compared) if each is not None]


def test_an_alarm_is_confirmed_first_and_given_once():
    alarm, wrong = CounterAlarm(), {"counter_flops_per_s": 800e12}
    assert found(alarm, windows(*[wrong] * (CONFIRMED_BY - 1), {}, wrong)) == []
    assert found(alarm, windows(*[wrong] * 30)) == ["not_counted"]


def test_windows_with_other_work_in_them_are_left_out():
    """An evaluation of 5 s between the steps: the counters see it, the steps do not."""
    assert found(CounterAlarm(), windows(*[{"steps_seconds": 5.0, "counter_flops_per_s": 800e12}] * 30)) == []


def test_short_windows_are_judged_together():
    short = {"seconds": 0.3, "steps_seconds": 0.4, "readings": 2, "counter_flops_per_s": 800e12}
    assert found(CounterAlarm(), windows(*[short] * 45)) == []  # 13.5 s: two spans
    assert found(CounterAlarm(), windows(*[short] * 60)) == ["not_counted"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, None),
        ({"counter_flops_per_s": 499e12}, None),
        ({"counter_flops_per_s": 501e12}, "not_counted"),
        ({"counter_flops_per_s": 321e12}, None),
        ({"counter_flops_per_s": 319e12}, "peak_type"),
        ({"counted_flops_per_s": 10e12, "counter_flops_per_s": 39e12}, None),  # 2.9 points
        ({"counted_flops_per_s": 10e12, "counter_flops_per_s": 40e12}, "not_counted"),
        ({"counter_flops_per_s": 800e12, "other_memory_bytes": 511 << 20}, "not_counted"),
        ({"counter_flops_per_s": 800e12, "other_memory_bytes": 512 << 20}, "other_process"),
        ({"counted_flops_per_s": 0.0}, None),
        ({"clock_share": 0.89, "throttled": (("thermal", 0.5),)}, "throttled"),
        ({"clock_share": 0.91, "throttled": (("thermal", 0.5),)}, None),
        ({"clock_share": 0.89, "throttled": (("thermal", 0.4),)}, None),
    ],
)
def test_the_bounds_of_the_verdict(change, kind):
    (compared,) = windows(change)
    verdict = judge(compared)
    assert (None if verdict is None else verdict.kind) == kind


@pytest.mark.parametrize(("is_type_seen", "kind"), [(True, "not_counted"), (False, "peak_type")])
def test_twice_as_much_is_a_wrong_type_only_if_the_type_was_not_seen(is_type_seen, kind):
    """fp8 has twice the peak of bf16, so a type that was set wrongly looks like a half that was not counted."""
    peaks = {"bf16": 989e12, "fp8": 1979e12}
    change = {"dtype": "fp8", "peak_flops_per_s": 1979e12, "counter_flops_per_s": 840e12, "peaks": peaks}
    (compared,) = windows({**change, "is_type_seen": is_type_seen})
    assert judge(compared).kind == kind


def test_windows_without_activity_neither_confirm_nor_end_what_others_show():
    """As with an exporter that is read more often than it reads."""
    unknown = {"counter_flops_per_s": None, "tensor_active": None}
    wrong = {"counter_flops_per_s": 800e12}
    assert found(CounterAlarm(), windows(*[unknown] * 30)) == []
    assert found(CounterAlarm(), windows(*[unknown, unknown, wrong] * CONFIRMED_BY)) == ["not_counted"]
