"""A torchrun job of which a worker is killed and one is stopped: one log, right totals, right goodput."""

import pytest

from flopwatch.records.metrics import LOST
from ranks.elastic_job import KILLS, LAST_STEP, STOP, TOKENS_PER_STEP, run_elastic
from ranks.elastic_worker import CHECKPOINT_EVERY

KILLED = KILLS[:1]
"""All three by `python benchmarks/ranks/elastic_job.py`; each start of two ranks takes 10 s and more."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return run_elastic(tmp_path_factory.mktemp("elastic"), kills=KILLED)


def test_the_log_is_one_run_of_two_sessions(outcome):
    starts = outcome.log.starts
    checkpoints = [step // CHECKPOINT_EVERY * CHECKPOINT_EVERY - 1 for _, step in KILLED]
    assert [start.resumed_after_step for start in starts] == [None, *checkpoints]
    assert [start.environment["torchelastic"]["restart_count"] for start in starts] == [0, 1]
    assert len({start.ledger["first_start_unix_time"] for start in starts}) == 1
    assert outcome.log.torn_lines <= len(KILLED)


def test_every_step_is_there_once(outcome):
    assert [step for row in outcome.log.rows for step in row.steps["step"]] == list(range(LAST_STEP))


def test_the_totals_are_those_of_a_run_that_was_never_killed(outcome):
    values = outcome.log.summary.values
    assert values["total/steps"] == LAST_STEP
    assert values["total/tokens"] == LAST_STEP * TOKENS_PER_STEP


def skip_if_the_machine_stalled(outcome):
    """A busy machine stalls steps by itself, and what is a stall then hangs on the median of which steps."""
    if outcome.truth["stall"] > STOP[2] + 0.5:
        pytest.skip(f"steps stalled for {outcome.truth['stall']:.1f} s on this machine")


def test_goodput_is_what_the_operating_systems_clock_says_within_2_percent(outcome):
    skip_if_the_machine_stalled(outcome)
    logged, truth = outcome.logged, outcome.truth
    in_steps = logged["productive"] + logged.get("between", 0.0)  # the worker computes outside of modules, too
    error = (in_steps + counted_steps_seconds(outcome)) / logged["wall"] / truth["goodput"] - 1
    assert abs(error) <= 0.02, (logged, truth)


def counted_steps_seconds(outcome):
    """What steps took longer that were counted as they ran: the diary has it in its steps, the log among counting."""
    return outcome.logged["count"] - outcome.truth["count"]


def test_the_classes_add_up_to_the_wall_time_and_are_those_of_the_diary(outcome):
    skip_if_the_machine_stalled(outcome)
    logged, truth = outcome.logged, outcome.truth
    whole = logged["productive"] + logged["other"] + sum(logged.get(name, 0.0) for name in (*LOST, "between"))
    assert whole == pytest.approx(logged["wall"], abs=1e-3)
    assert truth["stall"] > 0.9 * STOP[2], "a worker was stopped"
    allowed = 0.02 * truth["wall"]
    assert -allowed <= counted_steps_seconds(outcome) <= 0.05 * truth["productive"]
    for name in ("wall", "start_up", "compile", "stall", "checkpoint"):
        assert abs(logged.get(name, 0.0) - truth[name]) <= allowed, name
    # Steps after a killed session's last row are in no log: what the diary calls run again, the log calls restart.
    lost = ("rerun", "restart", "other")
    assert abs(sum(logged.get(name, 0.0) for name in lost) - sum(truth[name] for name in lost)) <= allowed
    assert logged.get("rerun", 0.0) <= truth["rerun"] + allowed
