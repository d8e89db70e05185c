import pytest

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
        ({"signal": "SIGKILL", "host": "n7"}, "its supervisor was killed by SIGKILL (n7)"),
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
