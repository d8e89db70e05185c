"""Nothing is asked of the other ranks on an ordinary step, and little at the end of a window."""

from collections import Counter
from pathlib import Path

import pytest

from flopwatch.monitor.ranks.reports import REPORT_BYTES
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
def test_per_window_one_report_of_at_most_512_bytes_goes_up_and_what_was_counted_comes_down_once(monitored):
    root, other = ([(kind, size) for kind, size, _ in rank["messages"]] for rank in monitored)
    reports = Counter(other)[("send", REPORT_BYTES)]
    down = [size for kind, size in other if kind == "recv"]

    assert REPORT_BYTES <= 512
    assert reports == WINDOWS + 1  # and one to say goodbye
    assert len(down) == 3  # the proof that the parent belongs to the run, the length of the plan, and the plan
    assert next(size for kind, size in other if kind == "send") < 100  # the greeting, which the parent reads in pieces
    assert Counter(root) == Counter(("recv" if kind == "send" else "send", size) for kind, size in other[1:])


def test_the_trainings_thread_sends_and_receives_nothing(monitored):
    assert {thread for rank in monitored for _, _, thread in rank["messages"]} == {"flopwatch-ranks"}


def test_on_ordinary_steps_the_trainings_thread_reads_writes_and_waits_for_nothing(monitored):
    ordinary = [step for step in range(1, STEPS) if (step + 1) % WINDOW_STEPS]
    for rank in monitored:
        # The logging rank makes its row on the step after the reports have come.
        busy = [step for step in ordinary if rank["forbidden"][str(step)]]
        assert busy == [], [(step, rank["forbidden"][str(step)]) for step in busy]
