"""The readings of hardware counters in a logging window."""

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
