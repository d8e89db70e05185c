"""The arithmetic of a window, to the digit."""

import pytest

from flopwatch.monitor.measured_step import MeasuredStep, find_warm_up, window_values
from flopwatch.monitor.totals import Ledger


def step(number, seconds, **more):
    return MeasuredStep(number, seconds=seconds, **more)


WINDOW = [
    step(1, 0.5, tokens=1000, real_tokens=750, trainable_tokens=500, samples=8, model_flops=3 * 10**12,
         hardware_flops=4 * 10**12, recompute_flops=10**12, input_wait_seconds=0.125, loss=2.0, grad_norm=1.0),
    step(2, 1.5, tokens=3000, real_tokens=2250, trainable_tokens=1500, samples=8, model_flops=9 * 10**12,
         hardware_flops=12 * 10**12, recompute_flops=3 * 10**12, input_wait_seconds=0.375, loss=4.0, grad_norm=3.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training/loss", 3.0),
        ("training/grad_norm", 2.0),
        ("perf/step_time", 1.0),
        ("perf/steps_per_second", 1.0),
        ("perf/tokens_per_second", 2000.0),
        ("perf/real_tokens_per_second", 1500.0),
        ("perf/trainable_tokens_per_second", 1000.0),
        ("perf/samples_per_second", 8.0),
        ("perf/tokens_per_second_per_device", 2000.0),
        ("perf/model_flops_per_second_per_device", 6e12),
        ("perf/hardware_flops_per_second_per_device", 8e12),
        ("perf/mfu", 0.375),
        ("perf/mfu_percent", 37.5),
        ("perf/hfu", 0.5),
        ("perf/hfu_percent", 50.0),
        ("perf/peak_flops_per_second_per_device", 16e12),
        ("perf/padding_percent", 25.0),
        ("perf/recompute_percent", 25.0),
        ("perf/input_wait_percent", 25.0),
    ],
)
@pytest.mark.requirement("R6")
def test_a_windows_values(key, value):
    assert window_values(WINDOW, peak_flops_per_s=16e12)[key] == value


def test_rates_are_sums_over_sums_not_means_of_rates():
    fast, slow = step(1, 1.0, tokens=1000), step(2, 9.0, tokens=1000)
    assert window_values([fast, slow], peak_flops_per_s=None)["perf/tokens_per_second"] == 200.0


def test_what_is_not_known_has_no_key():
    values = window_values([MeasuredStep(1)], peak_flops_per_s=None)
    assert values == {}


def test_without_a_peak_there_is_a_rate_but_no_mfu():
    values = window_values(WINDOW, peak_flops_per_s=None)
    assert values["perf/model_flops_per_second_per_device"] == 6e12
    assert not any("mfu" in key or "hfu" in key or "peak" in key for key in values)


def test_mfu_is_never_clamped():
    assert window_values([step(1, 1.0, model_flops=300)], peak_flops_per_s=100.0)["perf/mfu"] == 3.0


def test_warm_up_is_in_no_rate():
    warm_up = MeasuredStep(0, seconds=100.0, tokens=1, model_flops=1, is_warm_up=True)
    values = window_values([warm_up, *WINDOW], peak_flops_per_s=16e12)
    assert values["perf/mfu"] == 0.375
    assert values["perf/tokens_per_second"] == 2000.0


def test_the_untimed_first_step_is_in_no_rate_but_its_loss_counts():
    first = MeasuredStep(0, tokens=10**6, loss=6.0)
    values = window_values([first, *WINDOW], peak_flops_per_s=None)
    assert values["perf/tokens_per_second"] == 2000.0
    assert values["training/loss"] == 4.0


def test_with_several_processes_the_global_rates_are_not_guessed():
    values = window_values(WINDOW, peak_flops_per_s=16e12, world_size=4)
    assert "perf/tokens_per_second" not in values
    assert values["perf/tokens_per_second_per_device"] == 2000.0


@pytest.mark.parametrize(
    ("seconds", "count"),
    [
        ([None, 1, 1, 1, 1], 0),
        ([None, 9, 1, 1, 1], 2),
        ([9, 3, 1, 1, 1.2, 1], 2),
        ([1, 1, 9, 1, 1, 1], 0),
        ([None], 0),
        ([], 0),
        ([5.0], 0),
    ],
)
def test_leading_slow_steps_are_warm_up(seconds, count):
    assert find_warm_up(seconds) == count


def counted_steps(*seconds):
    return [MeasuredStep(index, seconds=each, is_counted=True) for index, each in enumerate(seconds)]


def test_counting_before_the_typical_time_is_known_is_booked_when_it_is():
    ledger = Ledger()
    ledger.add_steps(counted_steps(3.0, 3.0, 3.0))
    assert ledger.seconds["train"] == 9.0
    assert "count" not in ledger.seconds
    assert ledger.undivided_steps == 3

    ledger.add_steps([MeasuredStep(3, seconds=1.0)], typical_seconds=1.0)
    assert ledger.undivided_steps == 0
    assert (ledger.seconds["train"], ledger.seconds["count"]) == (4.0, 6.0)


def test_what_the_first_counted_step_takes_longer_than_others_is_warm_up_and_not_counting():
    ledger = Ledger()
    ledger.add_steps(counted_steps(30.0, 3.0, 3.0), typical_seconds=1.0)
    assert (ledger.seconds["compile"], ledger.seconds["warm_up"], ledger.seconds["count"]) == (27.0, 28.0, 6.0)
    assert ledger.seconds["train"] - ledger.seconds["compile"] == 3.0


def test_a_counted_step_that_stalls_is_not_all_counting():
    ledger = Ledger()
    ledger.add_steps(counted_steps(3.0, 3.0, 3.0, 63.0), typical_seconds=1.0)
    assert (ledger.seconds["stall"], ledger.seconds["count"], ledger.seconds["train"]) == (60.0, 8.0, 64.0)
