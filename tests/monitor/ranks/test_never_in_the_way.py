"""Whatever happens to a rank or to its monitor, the training behaves as it would without the monitor.

Each case is a DDP training of two gloo ranks, run with and without the monitor; `testbeds.disturbed_training`
runs them.
"""

import os

import pytest

from flopwatch.monitor import run as core
from testbeds.disturbed_training import (
    DISTURBED_STEP,
    GONE,
    STEPS,
    TO_THE_MONITOR,
    TO_THE_TRAINING,
    WINDOW_STEPS,
    disturbed,
    outcome,
)
from testbeds.slow_link import need_slow_link, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RECOVERS = ("stopped", "cut")
UNCLOSED = ("killed_0", "never_closed", "forgotten_while_the_other_dies")

IN_CAMPAIGN = {
    "raises_on_1",
    *(f"{what}_on_1" for what in ("made_only", "note_step_raises", "thread_raises", "thread_never_starts")),
    *("no_connection_on_1", "closed_early_on_0"),
}
"""The same happens to the other rank in CI."""


def each(cases):
    marks = {True: [pytest.mark.campaign], False: []}
    return pytest.mark.parametrize("case", [pytest.param(case, marks=marks[case in IN_CAMPAIGN]) for case in cases])


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    cases = [
        *(f"{case}:{mode}" for case in TO_THE_TRAINING for mode in ("bare", "monitored")),
        *(f"{case}:monitored" for case in TO_THE_MONITOR),
        "undisturbed:bare",
    ]
    possible = [case for case in cases if why_not() is None or not case.startswith("cut")]
    if "FLOPWATCH_LONG" not in os.environ:
        possible = [case for case in possible if case.partition(":")[0] not in IN_CAMPAIGN]
    records = disturbed(possible, tmp_path_factory.mktemp("disturbed"), at_once=6)
    return {(record["case"], record["mode"]): record for record in records}


def with_and_without(trainings, case):
    if case == "cut":
        need_slow_link()
    bare = trainings["undisturbed" if case in TO_THE_MONITOR else case, "bare"]
    return trainings[case, "monitored"]["ranks"], bare["ranks"]


@each(TO_THE_TRAINING + TO_THE_MONITOR)
def test_the_training_ends_as_without_the_monitor(trainings, case):
    for monitored, bare in zip(*with_and_without(trainings, case), strict=True):
        assert outcome(monitored) == outcome(bare), monitored["errors"]


@each(TO_THE_TRAINING + TO_THE_MONITOR)
def test_every_process_ends_by_itself_and_close_does_not_wait_for_long(trainings, case):
    for monitored, bare in zip(*with_and_without(trainings, case), strict=True):
        assert bare["exit_code"] is not None, "the training hangs without us"
        assert monitored["exit_code"] is not None, monitored["errors"]
        if monitored["result"] is not None:
            assert monitored["result"]["close_seconds"] < 4 * core.CLOSE_RANKS_SECONDS


@pytest.mark.parametrize("victim", [0, 1])
def test_the_survivor_of_a_killed_rank_sees_the_error_of_the_training(trainings, victim):
    ranks, _ = with_and_without(trainings, f"killed_{victim}")
    assert ranks[victim]["exit_code"] == -9
    assert ranks[1 - victim]["result"]["error"] == {"type": "RuntimeError", "message": GONE, "call": "backward"}
    assert ranks[1 - victim]["result"]["steps_done"] == DISTURBED_STEP


def test_a_training_that_gives_up_on_a_stopped_rank_does_so_with_the_monitor_too(trainings):
    ranks, _ = with_and_without(trainings, "stopped_too_long")
    assert "Timed out" in ranks[0]["result"]["error"]["message"]
    assert ranks[1]["result"]["error"]["message"] == GONE


@pytest.mark.parametrize("case", RECOVERS)
def test_after_a_disturbance_that_passes_no_step_and_no_rank_is_missing(trainings, case):
    ranks, _ = with_and_without(trainings, case)
    assert [rank["result"]["steps_done"] for rank in ranks] == [STEPS, STEPS]
    rows = trainings[case, "monitored"]["rows"]
    assert rows[-1] == [STEPS - 1, 2]
    assert {reporting for _, reporting in rows} == {2}


def test_monitors_that_nobody_closes_are_closed_at_the_end_and_still_tell_of_all_ranks(trainings):
    with_and_without(trainings, "never_closed")
    assert trainings["never_closed", "monitored"]["rows"][-1] == [STEPS - 1, 2]


@each(case for case in TO_THE_TRAINING if case not in ("cut", *UNCLOSED))
def test_before_the_disturbance_both_ranks_were_in_the_log(trainings, case):
    """Else nothing would have been tried. A log that nobody closed may end earlier."""
    rows = [row for row in trainings[case, "monitored"]["rows"] if row[0] < DISTURBED_STEP]
    # A rank may be killed before its first report was on its way.
    assert rows[0] == [WINDOW_STEPS - 1, 2] or case.startswith("killed")


@pytest.mark.parametrize(
    ("case", "codes"),
    [
        ("note_step_raises_on_0", ["part_failed:log_step"]),
        ("thread_raises_on_0", ["ranks_lost"]),
        ("no_connection_on_0", ["ranks_lost"]),
        ("made_only_on_0", ["ranks_absent", "ranks_missing"]),
        ("closed_early_on_1", ["ranks_missing"]),
    ],
)
def test_a_monitor_that_fails_says_so_once(trainings, case, codes):
    ranks, _ = with_and_without(trainings, case)
    told = [code for code in ranks[0]["result"]["told"] if code not in ("not_exact", "stalled")]
    assert told == codes
