"""The readings of hardware counters in a logging window."""

from math import inf, nan

import pytest

from flopwatch.records.counters import CounterReading, window_of


def reading(seconds, active):
    return CounterReading("fake", seconds, tensor_active=active)


@pytest.mark.parametrize(
    ("before", "readings", "mean"),
    [
        # Busy for 0.2 of one second and 0.8 of nine: 7.4 of ten seconds.
        (reading(0.0, None), [reading(1.0, 0.2), reading(10.0, 0.8)], 0.74),
        (reading(0.0, None), [reading(1.0, 0.2), reading(9.0, None), reading(10.0, 0.8)], 0.5),
        (None, [reading(1.0, 0.2), reading(10.0, 0.8)], 0.5),
        (None, [reading(1.0, 0.2)], 0.2),
        (reading(1.0, 0.9), [reading(1.0, 0.2)], 0.2),
        (reading(0.0, 0.9), [reading(1.0, None)], None),
    ],
)
def test_a_share_of_a_late_reading_stands_for_all_the_time_since_the_one_before(before, readings, mean):
    assert window_of(readings, before).tensor_active == pytest.approx(mean)


@pytest.mark.parametrize(
    ("joules", "used"),
    [
        ((100.0, 120.0, 150.0), 50.0),
        ((100.0, None, 150.0), 50.0),
        ((100.0, 0.0, 150.0), None),  # it began again, and has counted more than before since
        ((100.0, 120.0, 50.0), None),
        ((100.0, nan, 150.0), 50.0),
        ((100.0, 120.0, inf), None),
    ],
)
def test_energy_is_unknown_if_its_counter_went_back(joules, used):
    before, *readings = [CounterReading("fake", float(at), energy_joules=value) for at, value in enumerate(joules)]
    assert window_of(readings, before).energy_joules == used


def test_a_value_that_is_no_number_is_unknown():
    readings = [CounterReading("fake", 1.0, tensor_active=nan, power_watts=inf), reading(2.0, 0.4)]
    window = window_of(readings)
    assert (window.tensor_active, window.power_watts) == (0.4, None)
