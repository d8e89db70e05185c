"""What ranks tell each other: exact sums, extremes and where, in a short message."""

import random

import pytest

from flopwatch.monitor.measured_step import MeasuredStep, window_values
from flopwatch.monitor.ranks.job_values import counted_once, job_totals, job_values
from flopwatch.monitor.ranks.reports import (
    AMOUNTS,
    Amount,
    Message,
    RankDoubt,
    RankReport,
    extend,
    merge,
    report_of,
)

PEAK = 4e12


def steps_of(rank: int, first: int = 0, count: int = 5) -> list[MeasuredStep]:
    chance = random.Random(100 * rank + first)
    return [
        MeasuredStep(
            step,
            seconds=0.25,
            input_wait_seconds=0.01 * (rank + 1),
            samples=chance.randrange(1, 9),
            tokens=(tokens := chance.randrange(100, 900)),
            real_tokens=tokens - chance.randrange(50),
            trainable_tokens=tokens - 60,
            backward_seconds=0.1 - 0.01 * rank,
            model_flops=chance.randrange(10**18, 10**19),
            hardware_flops=2 * 10**19,
            recompute_flops=10**18,
        )
        for step in range(first, first + count)
    ]


def report(rank: int, first: int = 0, count: int = 5) -> RankReport:
    return report_of(rank, steps_of(rank, first, count), peak_flops_per_s=PEAK)


def sent(report: RankReport) -> RankReport:
    """The report as the rank above gets it."""
    message = Message([report], None, False)
    assert Message.from_json(message.to_json()) == message
    return Message.from_json(message.to_json().encode()).reports[0]


def test_a_message_comes_out_as_it_went_in_and_is_short_for_any_number_of_ranks():
    merged = merge([report(rank) for rank in range(40)])

    assert sent(merged) == merged
    assert sent(report(3)) == report(3)
    assert len(Message([merged], None, False).to_json()) < 1024
    last = Message([report(3), report(3, 5)], RankDoubt(0, 3), True)
    assert Message.from_json(last.to_json()) == last


def test_a_report_that_knows_nothing_comes_out_the_same():
    nothing = report_of(0, [MeasuredStep(7)], peak_flops_per_s=None)

    assert sent(nothing) == nothing
    assert nothing.capacity_flops is None
    assert nothing.longest_own is None


@pytest.mark.slow
def test_sums_are_exact_beyond_64_bits():
    ranks = 16_384
    flops = 9 * 10**18 + 7
    steps = [MeasuredStep(0, seconds=1.0, model_flops=flops)]
    merged = merge([report_of(rank, steps, peak_flops_per_s=None) for rank in range(ranks)])

    assert sent(merged).total("model_flops") == Amount(ranks * flops, ranks)
    assert ranks * flops > 2**63


@pytest.mark.parametrize("name", AMOUNTS)
def test_the_order_in_which_ranks_are_added_up_does_not_matter(name):
    reports = [report(rank) for rank in range(9)]
    truth = sum(getattr(step, name) for rank in range(9) for step in steps_of(rank))

    for seed in range(5):
        random.Random(seed).shuffle(reports)
        as_tree = merge([merge(reports[:4]), merge([merge(reports[4:6]), *reports[6:]])])
        assert as_tree.total(name) == Amount(truth, 9)


def test_minimum_and_maximum_say_where():
    merged = merge([report(rank) for rank in (2, 0, 5, 1)])

    assert merged.longest_wait == (5, pytest.approx(0.06 / 0.25))
    assert merged.longest_own == (5, pytest.approx(0.2))
    assert merged.shortest_own == (0, pytest.approx(0.15))


def test_a_row_names_the_rank_that_waits_longest_and_the_rank_with_the_longest_own_step():
    values = job_values(merge([report(rank) for rank in (2, 0, 5, 1)]), data_parallel_size=4)

    assert values["ranks/longest_input_wait_rank"] == values["ranks/longest_own_step_rank"] == 5
    assert values["ranks/longest_input_wait_percent"] == pytest.approx(24)
    assert values["ranks/longest_own_step_seconds"] == pytest.approx(0.2)
    assert values["ranks/shortest_own_step_seconds"] == pytest.approx(0.15)


def test_the_own_step_is_not_known_where_forward_passes_wait_too_or_no_pass_was_timed():
    sharded = report_of(0, steps_of(0), peak_flops_per_s=PEAK, waits_in_forward=True)
    untimed = [step._replace(backward_seconds=None) for step in steps_of(1)]

    for each in (sharded, report_of(1, untimed, peak_flops_per_s=PEAK)):
        values = job_values(each, data_parallel_size=1)
        assert not any("own_step" in key for key in values)
        assert "ranks/longest_input_wait_rank" in values


def test_windows_one_after_the_other_hold_the_same_ranks():
    both = extend(merge([report(0), report(1)]), merge([report(0, 5), report(1, 5)]))
    truth = sum(s.tokens for rank in (0, 1) for s in steps_of(rank) + steps_of(rank, 5))

    assert both.ranks == 2
    assert both.total("tokens") == Amount(truth, 2)
    assert (both.first_step, both.last_step, both.timed_steps) == (0, 9, 20)


def test_one_rank_has_the_values_of_a_run_on_its_own():
    alone = window_values(steps_of(0), peak_flops_per_s=PEAK)
    values = job_values(report(0), data_parallel_size=1)

    shared = [key for key in alone if key in values]
    assert {key: values[key] for key in shared} == pytest.approx({key: alone[key] for key in shared}, rel=1e-12)
    assert {"perf/mfu", "perf/hfu", "perf/tokens_per_second", "perf/padding_percent"} <= set(shared)


def test_mfu_is_all_flops_over_what_all_devices_could_have_done():
    slow = [MeasuredStep(0, seconds=3.0, model_flops=10**12)]
    fast = [MeasuredStep(0, seconds=1.0, model_flops=10**12)]
    merged = merge(
        [
            report_of(0, slow, peak_flops_per_s=1e12),
            report_of(1, fast, peak_flops_per_s=5e12),
        ]
    )

    assert job_values(merged, data_parallel_size=2)["perf/mfu"] == pytest.approx(2 / (3 * 1 + 1 * 5))


def test_without_a_peak_on_one_rank_there_is_no_mfu():
    merged = merge([report(0), report_of(1, steps_of(1), peak_flops_per_s=None)])

    assert "perf/mfu" not in job_values(merged, data_parallel_size=2)
    assert "perf/model_flops_per_second_per_device" in job_values(merged, data_parallel_size=2)


def test_a_rate_is_over_the_time_of_the_steps_whose_amount_is_known():
    known = [MeasuredStep(step, seconds=0.5, tokens=100) for step in range(4)]
    partly = [*known[:2], *(step._replace(tokens=None) for step in known[2:])]
    window = merge([report_of(r, s, peak_flops_per_s=None) for r, s in enumerate((known, partly))])

    values = job_values(sent(window), data_parallel_size=2)
    assert values["perf/tokens_per_second"] == 400
    assert values["perf/tokens_per_second_per_device"] == 200


def test_steps_of_any_rank_without_flops_are_told():
    counted = [MeasuredStep(step, seconds=0.5, samples=2, model_flops=10**12) for step in range(4)]
    partly = [*counted[:3], counted[3]._replace(model_flops=None)]
    not_at_all = [step._replace(model_flops=None) for step in counted]
    given_nothing = [MeasuredStep(step, seconds=0.5) for step in range(4)]

    def values_of(*ranks, data_parallel_size=2):
        reports = [report_of(r, steps, peak_flops_per_s=PEAK) for r, steps in enumerate(ranks)]
        return job_values(sent(merge(reports)), data_parallel_size)

    assert "perf/counted_steps_percent" not in values_of(counted, counted)
    assert values_of(counted, partly)["perf/counted_steps_percent"] == 100 * 7 / 8
    assert values_of(counted, partly)["perf/mfu"] == pytest.approx(10**12 / 0.5 / PEAK)
    nothing = values_of(counted, not_at_all)
    assert nothing["perf/counted_steps_percent"] == 0
    assert "perf/mfu" not in nothing
    assert "perf/counted_steps_percent" not in values_of(counted, given_nothing, data_parallel_size=1)


def test_ranks_that_share_a_batch_count_it_once():
    shared = [report_of(rank, steps_of(rank // 2), peak_flops_per_s=PEAK) for rank in range(4)]
    apart = [report_of(rank, steps_of(rank), peak_flops_per_s=PEAK) for rank in range(2)]

    assert job_totals(merge(shared), 2) == job_totals(merge(apart), 2)
    assert job_values(merge(shared), 2)["perf/tokens_per_second"] == pytest.approx(
        job_values(merge(apart), 2)["perf/tokens_per_second"]
    )
    # Twice the devices for the same work.
    assert job_values(merge(shared), 2)["perf/mfu"] == pytest.approx(job_values(merge(apart), 2)["perf/mfu"] / 2)


def test_one_of_those_that_share_a_batch_may_tell_of_it():
    given = [report_of(rank, steps_of(rank), peak_flops_per_s=PEAK) for rank in range(2)]
    without = [
        report_of(rank, [MeasuredStep(s, seconds=0.25) for s in range(5)], peak_flops_per_s=PEAK) for rank in (2, 3)
    ]
    everyone = [report_of(rank, steps_of(rank // 2), peak_flops_per_s=PEAK) for rank in range(4)]

    assert job_totals(merge([*given, *without]), 2) == job_totals(merge(everyone), 2)
    assert job_values(merge([*given, *without]), 2)["perf/mfu"] == job_values(merge(everyone), 2)["perf/mfu"]


def test_batches_that_should_be_the_same_and_are_not_are_unknown():
    assert counted_once(Amount(1001, 4), 2) is None
    assert counted_once(Amount(3000, 3), 2) is None
    assert counted_once(Amount(0, 0), 2) is None
