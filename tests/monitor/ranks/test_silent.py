"""Nothing is asked of the other ranks on an ordinary step, and little at the end of a window."""

from pathlib import Path

import pytest

from support.torchrun import torchrun

SCRIPT = Path(__file__).parents[1] / "scripts" / "count_messages.py"
STEPS, WINDOW_STEPS = 40, 10
WINDOWS = STEPS // WINDOW_STEPS


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return torchrun(SCRIPT, "bare", str(tmp_path_factory.mktemp("bare")), ranks=2)


@pytest.fixture(scope="module")
def monitored(tmp_path_factory):
    return torchrun(SCRIPT, "monitored", str(tmp_path_factory.mktemp("monitored")), ranks=2)


pytestmark = pytest.mark.slow


def test_the_training_asks_the_same_of_c10d_with_and_without_the_monitor(bare, monitored):
    assert [rank["asked"] for rank in monitored] == [rank["asked"] for rank in bare]
    assert bare[0]["asked"]["default_pg gloo:all_reduce [[4160]]"] == STEPS


@pytest.mark.requirement("R13")
def test_per_window_one_message_of_less_than_a_kilobyte_goes_up(monitored):
    root, other = (rank["messages"] for rank in monitored)

    # Windows that end at the same time go together; and one message says goodbye.
    assert 2 <= len(other) <= WINDOWS + 1
    assert sum(size for _, size, _, _ in other) < WINDOWS * 1024
    assert {kind for kind, *_ in root} == {"read"}
    assert {kind for kind, *_ in other} == {"write"}
    assert sum(reports for *_, reports, _ in root) == sum(reports for *_, reports, _ in other)


def test_the_trainings_thread_writes_and_reads_nothing(monitored):
    assert {thread for rank in monitored for *_, thread in rank["messages"]} == {"flopwatch-ranks"}


def test_on_ordinary_steps_the_trainings_thread_reads_writes_and_waits_for_nothing(monitored):
    ordinary = [step for step in range(1, STEPS) if (step + 1) % WINDOW_STEPS]
    for rank in monitored:
        # The logging rank makes its row on the step after the reports have come.
        busy = [step for step in ordinary if rank["forbidden"][str(step)]]
        assert busy == [], [(step, rank["forbidden"][str(step)]) for step in busy]
