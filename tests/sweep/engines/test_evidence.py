from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as some

from flopwatch.records.trial import Outcome
from flopwatch.sweep.engines.protocol import ending_from_evidence, outcome_known_to_engine


@pytest.mark.parametrize(
    ("evidence", "outcome"),
    [
        ({"state": "TIMEOUT", "signal": 15}, "timeout"),
        ({"state": "DEADLINE"}, "timeout"),
        ({"state": "OUT_OF_MEMORY", "signal": 125}, "oom_host"),
        (
            {"state": "FAILED", "signal": 9, "log": "slurmstepd: error: StepId=3.batch exceeded memory limit"},
            "oom_host",
        ),
        (
            {"state": "COMPLETED", "exit_code": 0, "log": "slurmstepd: error: Detected 1 oom_kill event in StepId=3"},
            "oom_host",
        ),
        ({"state": "FAILED", "signal": 9, "log": "no oom-kill, says a supervisor"}, "lost"),
        ({"exit_code": 1, "log": "slurmstepd: error: exceeded memory limit, under Ray"}, "lost"),
        ({"state": "CANCELLED by 1000"}, "cancelled"),
        ({"state": "CANCELLED+"}, "cancelled"),
        ({"state": "NODE_FAIL", "exit_code": 1}, "lost"),
        ({"state": "PREEMPTED"}, "lost"),
        ({"state": "BOOT_FAIL"}, "lost"),
        ({"state": "FAILED", "signal": 9}, "lost"),
        ({"state": "COMPLETED", "exit_code": 0}, "lost"),
        ({"error": "OutOfMemoryError"}, "oom_host"),
        ({"error": "NodeDiedError"}, "lost"),
        ({"error": "WorkerCrashedError"}, "lost"),
        ({"error": "TaskCancelledError", "signal": 9}, "cancelled"),
        ({"error": "ModuleNotFoundError", "detail": "No module named 'flopwatch'"}, "lost"),
        ({"signal": 9}, "lost"),
        ({"exit_code": 1}, "lost"),
        ({}, "lost"),
    ],
)
def test_the_outcome_follows_what_the_engine_saw(evidence, outcome):
    assert ending_from_evidence(evidence)[0] == outcome


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        ({"signal": 9}, "its supervisor was killed by signal 9"),
        ({"signal": 9, "host": "n7"}, "its supervisor was killed by signal 9 (n7)"),
        ({"exit_code": 1}, "its supervisor left with exit code 1 and wrote no result"),
        ({"state": "COMPLETED", "exit_code": 0}, "its supervisor wrote no result; Slurm reports the state COMPLETED"),
        (
            {"exit_code": 1, "log": "Traceback\nOSError: disk full\n\n"},
            "its supervisor left with exit code 1 and wrote no result; its last output line: OSError: disk full",
        ),
        (
            {"error": "ModuleNotFoundError", "detail": "No module named 'flopwatch'"},
            "its supervisor could not be run: ModuleNotFoundError: No module named 'flopwatch'",
        ),
        ({}, "its supervisor ended without a result, for an unknown reason"),
    ],
)
def test_the_reason_says_what_is_known_and_where(evidence, reason):
    assert ending_from_evidence(evidence)[1] == reason


def test_a_ray_out_of_memory_says_that_another_trial_may_be_the_cause():
    assert "perhaps because of another trial" in ending_from_evidence({"error": "OutOfMemoryError"})[1]


@pytest.mark.parametrize(
    ("evidence", "outcome"),
    [
        ({"state": "TIMEOUT"}, "timeout"),
        ({"state": "PREEMPTED"}, "lost"),
        ({"error": "OutOfMemoryError"}, "oom_host"),
        ({"error": "WorkerCrashedError"}, "lost"),
        ({"state": "CANCELLED by 0"}, "cancelled"),
        ({"signal": 9}, "lost"),  # the guard above the supervisor was killed
    ],
)
def test_the_engine_knows_why_a_supervisor_was_told_to_stop(evidence, outcome):
    assert outcome_known_to_engine(evidence)[0] == outcome


def test_an_engine_that_saw_nothing_explains_nothing():
    told = ({}, {"exit_code": 0}, {"state": "COMPLETED"}, {"signal": 15})
    assert [outcome_known_to_engine(evidence) for evidence in told] == [None] * 4


def test_a_folder_the_node_cannot_write_to_is_named_as_the_cause():
    assert "folder that all nodes share" in ending_from_evidence({"state": "FAILED", "signal": 53})[1]


STATES = ["", "TIMEOUT", "OUT_OF_MEMORY", "CANCELLED by 0", "FAILED", "COMPLETED", "UNKNOWN"]
EVIDENCE = some.fixed_dictionaries(
    {},
    optional={
        "state": some.sampled_from(STATES),
        "error": some.sampled_from(["", "OutOfMemoryError", "NodeDiedError", "ModuleNotFoundError"]),
        "detail": some.sampled_from(["", "words with {braces}"]),
        "signal": some.sampled_from([None, 9, 15, 53]),
        "exit_code": some.sampled_from([None, 0, 1]),
        "log": some.sampled_from(["", "one\n two {x}\n\n", "slurmstepd: error: oom-kill event\n"]),
        "host": some.sampled_from(["", "n1"]),
        "job": some.just("5_0"),
    },
)


@given(EVIDENCE)
def test_every_evidence_has_one_outcome_and_a_reason_in_one_line(evidence):
    outcome, reason = ending_from_evidence(evidence)
    assert outcome in get_args(Outcome)
    assert reason
    assert "\n" not in reason


@given(EVIDENCE)
def test_a_cause_holds_also_if_the_supervisor_wrote_that_it_was_cancelled(evidence):
    known = outcome_known_to_engine(evidence)
    assert known in (None, ending_from_evidence(evidence), ("lost", "the trial's guard process was killed by SIGKILL"))
    assert known is not None or ending_from_evidence(evidence)[0] == "lost"


@given(EVIDENCE, some.sampled_from(["NodeDiedError", "OutOfMemoryError"]))
def test_slurms_memory_goes_before_its_state_and_before_what_ray_says(evidence, error):
    over_memory = {"state": "TIMEOUT", "error": error, "log": "slurmstepd: error: exceeded memory limit"}
    assert ending_from_evidence({**evidence, **over_memory})[0] == "oom_host"
