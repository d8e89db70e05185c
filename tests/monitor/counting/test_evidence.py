"""What counts prove about steps, and what a later count puts in doubt."""

from functools import cache

import pytest

from flopwatch.flops.tracing.live import StepCount
from flopwatch.monitor.counting.call_kinds import CallKind
from flopwatch.monitor.counting.evidence import ENOUGH, UNKNOWN, UNPROVEN, Evidence, StepKind
from flopwatch.records.flops import PhaseFlops


@cache  # two calls are of one kind if they are the same object
def call(*sizes, family="model"):
    return CallKind(family, sizes, 1, "Model", has_grad=True, is_training=True)


ONE = StepKind((call(4),), nodes=10, backwards=1)
OTHER = StepKind((call(7),), nodes=10, backwards=1)


def count(forward, backward=0, dtype="fp32", **more):
    phases = PhaseFlops(forward, backward, 0)
    return StepCount(phases, {dtype: phases}, {"mm": phases}, **more)


def counted(*flops, kind=ONE, evidence=None):
    evidence = evidence or Evidence()
    for each in flops:
        evidence.add(kind, evidence.counts, count(each))
    return evidence


def claim(evidence, first, last, kind=ONE):
    """Ask for the FLOPs of uncounted steps, which are exact."""
    for step in range(first, last + 1):
        assert evidence.verdict(kind, step).reason is None


def test_a_kind_of_steps_is_exact_after_three_counts_that_agree():
    evidence = counted(100, 100)
    assert evidence.verdict(ONE, 2).reason == "such a step was counted only 2 times so far"
    assert evidence.verdict(ONE, 2).count.phases.total == 100

    counted(100, evidence=evidence)
    assert evidence.verdict(ONE, 3).reason is None
    assert ENOUGH == 3


@pytest.mark.parametrize(
    "other", [count(60, 40), count(100, dtype="bf16"), count(101), count(100, uncounted=("aten::new",))]
)
def test_counts_agree_only_in_every_phase_and_type(other):
    evidence = counted(100, 100)
    evidence.add(ONE, 2, other)

    assert evidence.verdict(ONE, 3).reason is not None


def test_a_step_of_a_kind_that_was_never_counted_has_no_flops():
    verdict = counted(100, 100, 100).verdict(OTHER, 3)

    assert verdict.count is None
    assert verdict.reason == "no step with these sizes was counted so far (it calls Model)"


@pytest.mark.parametrize(("nodes", "backwards"), [(11, 1), (10, 2)])
def test_equal_calls_with_more_operations_or_gradients_are_another_kind(nodes, backwards):
    verdict = counted(100, 100, 100).verdict(StepKind(ONE.calls, nodes, backwards), 3)

    assert verdict.count is None
    assert verdict.reason.startswith("no step with these calls, and as many operations and gradients, was counted")


def test_a_count_that_differs_doubts_the_steps_since_the_last_that_agreed():
    evidence = counted(100, 100, 100)
    claim(evidence, 3, 5)
    assert evidence.add(ONE, 6, count(100)) is None
    claim(evidence, 7, 9)

    doubt = evidence.add(ONE, 10, count(150))

    assert doubt.steps == ((7, 9),)
    assert doubt.shown == "step 10 ran 150 FLOPs (in mm), although equal calls had run 100 until then"


def test_a_cost_that_changes_back_and_forth_doubts_all_steps_that_were_called_exact():
    evidence = counted(100, 100, 100)
    claim(evidence, 3, 5)
    evidence.add(ONE, 6, count(100))
    claim(evidence, 7, 9)
    evidence.add(ONE, 10, count(150))

    assert evidence.add(ONE, 11, count(100)).steps == ((3, 10),)


def test_after_a_change_more_counts_must_agree():
    evidence = counted(100, 100, 100, 150, 150, 150)
    assert evidence.verdict(ONE, 9).reason is not None

    counted(150, evidence=evidence)
    assert evidence.verdict(ONE, 9).reason is None


def test_a_cost_that_varies_is_told_as_a_range_with_the_mean():
    verdict = counted(100, 200).verdict(ONE, 2)

    assert verdict.count.phases.total == 150
    assert "2 counted steps ran between 100 and 200, and this is their mean" in verdict.reason


def test_at_the_end_steps_of_a_kind_that_has_changed_before_are_doubted():
    evidence = counted(100, 150, 150, 150, 150)
    claim(evidence, 5, 8)

    doubt = evidence.unproven()
    assert (doubt.steps, doubt.shown) == (((5, 8),), UNPROVEN)
    assert evidence.unproven() is None, "said once"


def test_at_the_end_all_steps_before_a_change_are_doubted_if_too_few_counts_agreed_after_it():
    evidence = counted(100, 100, 100)
    claim(evidence, 3, 5)
    evidence.add(ONE, 6, count(100))
    claim(evidence, 7, 9)
    evidence.add(ONE, 10, count(150))

    assert evidence.unproven().steps == ((3, 9),)
    assert evidence.unproven() is None, "said once"


def test_at_the_end_steps_of_a_kind_that_never_changed_are_believed():
    evidence = counted(100, 100, 100)
    claim(evidence, 3, 8)

    assert evidence.unproven() is None


def test_the_first_step_of_which_less_was_seen_is_compared_without_its_gradients():
    evidence = counted(100, 100, 100)

    assert evidence.verdict(StepKind(ONE.calls, 10, UNKNOWN), 0).reason is None
    assert evidence.verdict(StepKind(ONE.calls, 11, UNKNOWN), 0).count is None


def of_size(size):
    return StepKind((call(size),), nodes=10, backwards=1)


def with_a_formula():
    evidence = Evidence()
    for step, size in enumerate((2, 20, 5, 11)):
        evidence.add(of_size(size), step, count(6 * size))
    return evidence


def test_a_formula_gives_the_flops_of_sizes_between_the_counted_ones():
    verdict = with_a_formula().verdict(of_size(13), 4)

    assert verdict.reason is None
    assert verdict.count.phases.total == 6 * 13


def test_one_count_that_a_formula_predicted_is_enough():
    assert with_a_formula().verdict(of_size(5), 4).reason is None


def test_a_count_that_a_formula_did_not_predict_doubts_the_steps_it_was_used_for():
    evidence = with_a_formula()
    claim(evidence, 4, 6, of_size(13))

    doubt = evidence.add(of_size(7), 7, count(99))

    assert doubt.steps == ((4, 6),)
    assert evidence.verdict(of_size(13), 8).count is None


def test_a_count_that_contradicts_its_kind_and_a_formula_doubts_the_steps_of_both():
    evidence = with_a_formula()
    claim(evidence, 4, 6, of_size(13))
    claim(evidence, 7, 8, of_size(5))

    assert evidence.add(of_size(5), 9, count(99)).steps == ((4, 6), (7, 8))


def test_a_step_is_counted_in_addition_only_while_that_may_make_it_exact():
    evidence = Evidence()
    assert evidence.needs_count(ONE)
    counted(100, 100, evidence=evidence)
    assert evidence.needs_count(ONE)
    counted(100, evidence=evidence)
    assert not evidence.needs_count(ONE)
    assert not with_a_formula().needs_count(of_size(13))
    assert with_a_formula().needs_count(of_size(21))


def test_a_first_call_is_known_if_its_steps_are_settled_or_a_formula_covers_it():
    evidence = counted(100, 100)
    assert not evidence.knows_call(ONE.calls[0])
    counted(100, evidence=evidence)
    assert evidence.knows_call(ONE.calls[0])
    assert with_a_formula().knows_call(call(13))
    assert not with_a_formula().knows_call(call(21))
