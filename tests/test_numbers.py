"""Every quantity has one text, whichever screen, log line or report it stands in."""

from itertools import pairwise

import pytest

from flopwatch.numbers import byte_size, count, duration, flop_rate, flops, number, percent, step_time
from flopwatch.text import plural


@pytest.mark.parametrize(
    ("seconds", "text", "rough"),
    [
        (0.0003, "0.3 ms", "0.3 ms"),
        (0.9994, "999 ms", "999 ms"),
        (1.0, "1.0 s", "1.0 s"),
        (99.4, "99 s", "99 s"),
        (200.0, "3 min 20 s", "3 min"),
        (3599.6, "1 h 00 min", "1 h 00 min"),
        (3840.0, "1 h 04 min", "1 h 04 min"),
        (172_799.0, "2 d 0 h", "2 d 0 h"),
        (200_000.0, "2 d 8 h", "2 d 8 h"),
        (float("inf"), "inf s", "inf s"),
    ],
)
def test_a_duration_has_two_units_and_a_rough_one_no_seconds_beside_minutes(seconds, text, rough):
    assert (duration(seconds), duration(seconds, rough=True)) == (text, rough)


@pytest.mark.parametrize(
    ("value", "three", "four"),
    [
        (0, "0.00", "0.000"),
        (0.099, "0.099", "0.099"),
        (0.5, "0.50", "0.500"),
        (12.345, "12.3", "12.35"),
        (312.44, "312", "312.4"),
        (49_668.2, "49,668", "49,668"),
        (-2.5, "-2.50", "-2.500"),
        (1e300, "1e+300", "1e+300"),
        (float("nan"), "nan", "nan"),
        (float("inf"), "inf", "inf"),
    ],
)
def test_a_number_keeps_as_many_digits_as_its_place_has_room_for(value, three, four):
    assert (number(value), number(value, digits=4)) == (three, four)


@pytest.mark.parametrize(
    ("write", "values", "texts"),
    [
        (count, (950, 999.9, 182_345, 999_999), ("950", "1k", "182k", "1M")),
        (count, (7_391_744, 1.339e9, 5e15), ("7.39M", "1.34B", "5,000T")),
        (flops, (12, 61.34e9, 989.4e12, 1.2e21), ("12 FLOP", "61.3 GFLOP", "989.4 TFLOP", "1.2 ZFLOP")),
        (byte_size, (512, 700 * 2**20, 1023.9 * 2**20, 3 * 2**30), ("512 B", "700 MiB", "1.00 GiB", "3.00 GiB")),
        (step_time, (0.00042, 0.32649, 2.5, 200), ("0.42 ms", "326 ms", "2.50 s", "200 s")),
        (percent, (0, 0.00042, 0.4127, 1, 1.2), ("0 %", "0.042 %", "41.3 %", "100 %", "120.0 %")),
    ],
)  # fmt: skip
def test_every_quantity_has_its_unit_and_prefix(write, values, texts):
    assert tuple(map(write, values)) == texts


@pytest.mark.parametrize("write", [number, count, flops, flop_rate, byte_size, step_time, duration, percent])
def test_what_is_not_known_is_a_dash(write):
    assert write(None) == "–"


@pytest.mark.parametrize("write", [number, count, flops, byte_size, step_time, duration, percent])
def test_nothing_above_0_is_written_as_0(write):
    for power in range(-12, 13):
        shown = write(3.0 * 10.0**power)
        assert any(digit in shown for digit in "123456789") or write in (flops, byte_size), (power, shown)


def test_longer_times_are_never_written_as_shorter_ones():
    units = {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}
    texts = [duration(1.07**power) for power in range(-90, 250)]
    words = [text.split() for text in texts]
    seconds = [sum(float(a) * units[b] for a, b in zip(w[::2], w[1::2], strict=True)) for w in words]
    assert all(before <= after for before, after in pairwise(seconds))


def test_one_is_one_and_more_are_many():
    assert (plural(1, "trial"), plural(0, "trial"), plural(3_000, "trial")) == ("1 trial", "0 trials", "3,000 trials")
