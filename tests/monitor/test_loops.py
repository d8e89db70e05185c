"""Whatever a loop does: a row that says it is exact is, and one that is not says why."""

import re
from pathlib import Path

import pytest

from testbeds.loops.audit import Loop, Outcome, audit
from testbeds.loops.loops import LONG, LONG_STEPS, LOOPS

PENDING = "so far|until then|this is their mean|the run ended before another count|was not seen|were not seen"


QUICK = {loop.name for loop in [loop for loop in LOOPS if not loop.is_slow][::12]}
"""Every twelfth in `make test`, nearly all of them in CI."""

CAMPAIGN = {
    "accelerate", "compiled_in_place", "divergence_on_generated_text", "fabric", "grpo_with_ends", "length_curriculum",
    "lora_merged_on_the_way", "mixture_of_shapes", "pruned", "sft", "speech", "trainer_with_a_loss_of_its_own",
    "trainer_with_evaluation", "videos",
}  # fmt: skip
"""They take longest, and CI has another loop of their kind, or a test of their framework."""


def marks_of(loop: Loop) -> list[pytest.MarkDecorator]:
    marks = [] if loop.name in QUICK else [pytest.mark.slow]
    marks += [pytest.mark.campaign] if loop.name in CAMPAIGN else []
    return marks if loop.gap is None else [*marks, pytest.mark.xfail(strict=True, reason=loop.gap)]


every_loop = pytest.mark.parametrize("loop", [pytest.param(loop, id=loop.name, marks=marks_of(loop)) for loop in LOOPS])


every_long_loop = pytest.mark.parametrize(
    "loop",
    [pytest.param(each, id=each.name, marks=pytest.mark.campaign if each in LONG[3:] else ()) for each in LONG],
)


@every_loop
@pytest.mark.filterwarnings("ignore")  # of the frameworks; what flopwatch says is in the log
def test_every_row_of_a_loop_is_right_or_says_why_not(loop: Loop, tmp_path: Path) -> None:
    outcome = audit(loop, tmp_path)

    assert_no_exact_row_is_wrong(loop, outcome)
    first = outcome.first_exact()
    if loop.exact_from is not None and (first is None or first > loop.exact_from):
        # The loops are short: some end before enough of their steps were counted, and say so.
        assert all(re.search(PENDING, reason) for reason in outcome.reasons), outcome.reasons
    elif first is None:
        assert loop.told is not None
        assert outcome.is_told(loop.told), outcome.reasons


@pytest.mark.slow
@every_long_loop
def test_no_exact_row_of_three_hundred_steps_is_wrong(loop: Loop, tmp_path: Path) -> None:
    assert_no_exact_row_is_wrong(loop, audit(loop, tmp_path, steps=LONG_STEPS))


def assert_no_exact_row_is_wrong(loop: Loop, outcome: Outcome) -> None:
    """What is known to be wrong must be, so that whoever mends it takes it off the list."""
    assert outcome.rows
    assert [row for row in outcome.rows if row.is_wrong_and_exact] == []
    model_is_wrong = [row for row in outcome.rows if row.is_only_model_wrong_and_exact]
    assert (model_is_wrong != []) == (loop.model_gap is not None), model_is_wrong
    assert [row for row in outcome.rows if row.is_exact is False and not row.notes] == []
    assert outcome.errors == []
    assert outcome.is_same_training
