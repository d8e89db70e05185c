"""Crossovers are interpolated in logarithms, and claimed only where the measurement decides."""

from dataclasses import replace

import pytest

from flopwatch.report.sweep.document import sweep_document
from flopwatch.report.sweep.measurements import crossover_digest, crossover_sentence
from support.few_results import ended, group_of, ran, summary_of
from testbeds.documents import document_text


def crossovers(*results, quantity="time"):
    return [found for found in group_of(*results).crossovers if found.quantity == quantity]


def test_the_crossing_point_is_where_the_logarithms_meet():
    # Ratio 1/2 at 256 and 2 at 1024: the logarithms are equal and opposite, so they meet at the geometric mean.
    (found,) = crossovers(
        ran("ghost", 8, 256, 1.0), ran("dpsgd", 8, 256, 2.0), ran("ghost", 8, 1024, 8.0), ran("dpsgd", 8, 1024, 4.0)
    )
    assert found.at == pytest.approx(512)
    assert (found.below, found.above, found.axis, found.fixed) == ("ghost", "dpsgd", "sequence", 8)
    assert crossover_sentence(found) == (
        "ghost beats dpsgd below sequence 510 at batch 8 (between 256 and 1024 measured; time)"
    )


def test_an_unequal_ratio_moves_the_point():
    # log2 of the ratio: -1 at 2, +3 at 32; a quarter of four doublings from 2 is 4.
    (found,) = crossovers(
        ran("ghost", 2, 64, 1.0), ran("dpsgd", 2, 64, 2.0), ran("ghost", 32, 64, 8.0), ran("dpsgd", 32, 64, 1.0)
    )
    assert (found.axis, found.fixed) == ("batch", 64)
    assert found.at == pytest.approx(4)


def test_nothing_is_claimed_where_intervals_overlap_at_a_neighbour():
    (found,) = crossovers(
        ran("ghost", 8, 256, 1.0, spread=0.2),
        ran("dpsgd", 8, 256, 1.1, spread=0.2),
        ran("ghost", 8, 512, 3.0),
        ran("dpsgd", 8, 512, 2.0),
    )
    assert not found.is_claimed
    assert found.at is None
    assert "but the intervals overlap" in crossover_sentence(found)


@pytest.mark.parametrize("spreads", [(0.1, 0.01, 0.01, 0.01), (0.01, 0.01, 0.01, 0.1)])
def test_a_crossover_of_unstable_step_times_is_marked_and_one_of_memory_is_not(spreads):
    figures = (("ghost", 256, 1.0, 1), ("dpsgd", 256, 2.0, 2), ("ghost", 1024, 8.0, 8), ("dpsgd", 1024, 4.0, 4))
    trials = [
        ran(trainer, 8, length, seconds, gib=gib, spread=spread)
        for (trainer, length, seconds, gib), spread in zip(figures, spreads, strict=True)
    ]
    (found,), (memory,) = crossovers(*trials), crossovers(*trials, quantity="memory")
    assert (found.is_claimed, found.is_unstable, memory.is_unstable) == (True, True, False)
    assert crossover_sentence(found).endswith("(between 256 and 1024 measured; time, unstable)")
    assert crossover_digest([found, replace(found, fixed=16)]) == [
        "ghost beats dpsgd below sequence 510 (batch 8, 16; time, unstable)"
    ]
    text = " ".join(document_text(sweep_document(summary_of(*trials)), 120).split())
    assert "A crossover of unstable step times may lie elsewhere" in text


def test_a_measured_value_between_that_decides_nothing_widens_the_bracket():
    (found,) = crossovers(
        ran("ghost", 8, 128, 1.0),
        ran("dpsgd", 8, 128, 2.0),
        ran("ghost", 8, 256, 2.0),
        ran("dpsgd", 8, 256, 2.001),
        ran("ghost", 8, 512, 8.0),
        ran("dpsgd", 8, 512, 4.0),
    )
    assert found.is_claimed
    assert (found.low, found.high, found.at, found.equal_at) == (128, 512, None, (256,))
    assert "no measurable difference at 256" in crossover_sentence(found)


def test_trainers_that_keep_their_order_do_not_cross():
    assert not crossovers(
        ran("ghost", 8, 256, 1.0), ran("dpsgd", 8, 256, 2.0), ran("ghost", 8, 512, 2.0), ran("dpsgd", 8, 512, 4.0)
    )


def test_a_trial_that_did_not_run_crosses_nothing():
    assert not crossovers(
        ran("ghost", 8, 256, 1.0),
        ran("dpsgd", 8, 256, 2.0),
        ended("ghost", 8, 512, "oom_device"),
        ran("dpsgd", 8, 512, 4.0),
    )


def test_memory_crosses_too_unless_peaks_are_equal_within_a_percent():
    clear = [
        ran("ghost", 8, 256, gib=1.0),
        ran("dpsgd", 8, 256, gib=2.0),
        ran("ghost", 8, 1024, gib=8.0),
        ran("dpsgd", 8, 1024, gib=4.0),
    ]
    (found,) = crossovers(*clear, quantity="memory")
    assert found.at == pytest.approx(512, rel=1e-6)
    (close,) = crossovers(*clear[:3], ran("dpsgd", 8, 1024, gib=7.95), quantity="memory")
    assert not close.is_claimed


def test_many_crossovers_of_one_pair_are_told_in_one_line():
    results = []
    for batch in (2, 4, 8):
        results += [ran("ghost", batch, 256, 1.0 * batch), ran("dpsgd", batch, 256, 2.0 * batch)]
        results += [ran("ghost", batch, 1024, 8.0 * batch), ran("dpsgd", batch, 1024, 4.0 * batch)]
    assert crossover_digest(crossovers(*results)) == ["ghost beats dpsgd below sequence 510 (batch 2, 4, 8; time)"]
