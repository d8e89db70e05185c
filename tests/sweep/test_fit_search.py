"""The search for the largest and the fastest batch, on memory curves whose truth is known."""

import random
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwatch.sweep.fit import Probe, fastest_of, search


def trials_of(used_by, capacity, *, rate_by=None, spread=0.0):
    """A `measure` for this curve, and the list of what it was asked."""
    asked = []

    def measure(batch_size):
        asked.append(batch_size)
        used = used_by(batch_size)
        if used > capacity:
            return Probe(batch_size, fits=False, outcome="oom_host", reason="out of memory")
        rate = rate_by(batch_size) if rate_by else None
        return Probe(
            batch_size,
            fits=True,
            outcome="ok",
            peak_bytes=round(used),
            capacity_bytes=capacity,
            samples_per_s=rate,
            slowest_per_s=rate * (1 - spread) if rate else None,
            fastest_per_s=rate * (1 + spread) if rate else None,
        )

    return measure, asked


def test_the_batch_is_doubled_and_then_the_range_is_halved():
    measure, asked = trials_of(lambda batch: 500 + 16 * batch, 2000)
    found = search(measure)
    assert asked == [1, 2, 4, 8, 16, 32, 64, 128, 96, 80, 88, 92]
    assert (found.largest, found.too_large, found.is_largest_known) == (92, 96, True)


@pytest.mark.parametrize("true_largest", range(1, 200))
def test_every_small_answer_is_right(true_largest):
    measure, asked = trials_of(lambda batch: 1000 + 64 * batch, 1000 + 64 * true_largest + 32)
    found = search(measure)
    assert 0.95 * true_largest <= found.largest <= true_largest
    assert len(asked) <= 2 * true_largest.bit_length() + 1
    assert len(set(asked)) == len(asked), "nothing is tried twice"


def test_a_batch_of_one_that_does_not_fit_ends_the_search():
    measure, asked = trials_of(lambda batch: 3000, 2000)
    found = search(measure)
    assert (found.largest, found.too_large, found.is_largest_known) == (None, 1, True)
    assert asked == [1]


def test_memory_that_does_not_grow_ends_at_the_most_that_may_be_tried():
    measure, asked = trials_of(lambda batch: 1000, 2000)
    found = search(measure, max_batch=300)
    assert (found.largest, found.too_large, found.is_largest_known) == (300, None, True)
    assert max(asked) == 300


def test_nothing_beyond_the_most_is_tried_though_the_line_goes_on():
    measure, asked = trials_of(lambda batch: 100 + batch, 100_000)
    assert search(measure, max_batch=5).largest == 5
    assert max(asked) == 5


@pytest.mark.parametrize("true_largest", [3, 10, 31, 100, 302, 1431])
def test_memory_quadratic_in_the_batch_is_found_all_the_same(true_largest):
    def used(batch):
        return 1e6 + 40 * batch + batch**2

    measure, asked = trials_of(used, used(true_largest))
    found = search(measure)
    assert 0.95 * true_largest <= found.largest <= true_largest
    assert len(asked) <= 2 * true_largest.bit_length() + 1


@pytest.mark.parametrize("seed", range(20))
def test_noise_in_what_fits_never_makes_the_answer_one_that_failed(seed):
    rng = random.Random(seed)

    def measure(batch_size):
        used = (500 + 16 * batch_size) * rng.uniform(0.97, 1.03)
        fits = used <= 2000
        return Probe(batch_size, fits, "ok" if fits else "oom_host", "", round(used), 2000, samples_per_s=batch_size)

    found = search(measure)
    failed = [probe.batch_size for probe in found.probes if not probe.fits]
    assert found.largest < min(failed)
    assert found.largest >= 0.95 * (min(failed) - 1)
    assert 84 <= found.largest <= 98


def test_a_trial_that_fails_otherwise_stops_the_search_with_its_reason():
    def measure(batch_size):
        if batch_size == 8:
            return Probe(8, fits=None, outcome="error", reason="ValueError: no")
        return Probe(batch_size, fits=True, outcome="ok", peak_bytes=10 * batch_size, capacity_bytes=1000)

    found = search(measure)
    assert found.stopped == "batch 8: error: ValueError: no"
    assert (found.largest, found.is_largest_known) == (4, False)
    assert len(found.probes) == 4


def test_a_failure_while_the_range_is_halved_keeps_what_fitted():
    inner, _ = trials_of(lambda batch: 500 + 16 * batch, 2000, rate_by=float)

    def measure(batch_size):
        return Probe(96, fits=None, outcome="timeout", reason="too long") if batch_size == 96 else inner(batch_size)

    found = search(measure)
    assert (found.largest, found.too_large, found.is_largest_known) == (64, 128, False)
    assert found.stopped == "batch 96: timeout: too long"


def test_the_fastest_is_the_smallest_that_the_noise_cannot_tell_from_the_best():
    measure, _ = trials_of(
        lambda batch: 500 + 16 * batch, 2000, rate_by=lambda batch: 400 * min(1.0, batch / 20), spread=0.01
    )
    found = search(measure)
    assert (found.fastest, found.as_fast) == (32, 64), "16 gives 320 of 400"


def test_wide_intervals_make_smaller_batches_as_good():
    def rate(batch):
        return 100 - 10 / batch

    narrow, _ = trials_of(lambda batch: 500 + 160 * batch, 2000, rate_by=rate, spread=0.001)
    wide, _ = trials_of(lambda batch: 500 + 160 * batch, 2000, rate_by=rate, spread=0.10)
    assert search(narrow).fastest == 4
    assert search(wide).fastest == 1


def test_a_noisy_best_does_not_make_everything_as_good():
    rates = {1: (100.0, 98.0, 102.0), 8: (190.0, 186.0, 194.0), 64: (200.0, 100.0, 220.0)}
    probes = [
        Probe(size, fits=True, outcome="ok", samples_per_s=rate, slowest_per_s=slowest, fastest_per_s=fastest)
        for size, (rate, slowest, fastest) in rates.items()
    ]
    assert fastest_of(probes) == (8, 64)
    assert fastest_of(probes[:2]) == (8, None)


def test_without_times_no_batch_is_called_the_fastest():
    measure, _ = trials_of(lambda batch: 500 + 16 * batch, 2000)
    assert search(measure).fastest is None


peaks = st.lists(st.none() | st.integers(1, 10_000), min_size=1, max_size=30)
"""What the trials say of their memory, one after the other; it may be wrong or unknown."""


@given(truth=st.integers(0, 600), most=st.integers(1, 500), peaks=peaks, capacity=st.none() | st.just(5000))
def test_whatever_the_peaks_say_the_search_ends_at_the_largest_batch_that_fits(truth, most, peaks, capacity):
    said = cycle(peaks)
    fitting, failing = [0], [most + 1]

    def measure(batch_size):
        assert max(fitting) < batch_size < min(failing), "neither known to fit, nor known to fail, nor above the most"
        (fitting if batch_size <= truth else failing).append(batch_size)
        fits = batch_size <= truth
        return Probe(batch_size, fits, "ok" if fits else "oom_host", "", next(said), capacity)

    found = search(measure, most)
    assert len(found.probes) <= 24
    assert found.is_largest_known
    assert 0.95 * min(truth, most) <= (found.largest or 0) <= truth


@given(rates=st.lists(st.floats(0.1, 1000), min_size=1, max_size=8, unique=True), spread=st.floats(0, 0.5))
def test_no_batch_tried_is_surely_faster_than_the_one_called_the_fastest(rates, spread):
    probes = [
        Probe(
            2**place,
            fits=True,
            outcome="ok",
            samples_per_s=rate,
            slowest_per_s=rate * (1 - spread),
            fastest_per_s=rate * (1 + spread),
        )
        for place, rate in enumerate(rates)
    ]
    fastest, as_fast = fastest_of(probes)
    chosen = next(probe for probe in probes if probe.batch_size == fastest)
    assert all(probe.slowest_per_s * 0.98 <= chosen.fastest_per_s * 1.03 for probe in probes)
    assert as_fast is None or as_fast == 2 * fastest
