from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.report.problems import sweep_warnings


def result(name, **facts):
    return TrialResult(name, "key", TrialSpec("standard", "tiny", 1, 1), "ok", **facts)


def test_a_sweep_without_losses_says_nothing():
    assert not list(sweep_warnings([result("a"), result("b", evidence={"exit_code": 0})]))


def test_attempts_that_were_lost_are_told():
    (told,) = sweep_warnings([result("a"), result("b", earlier_attempts=({"outcome": "lost"},) * 2)])
    assert told == "1 trial needed more than one attempt: b; files of the earlier attempts (2) are in earlier/"


def test_files_that_stayed_on_a_node_are_named():
    files = [f"trials/a/file{number}" for number in range(7)]
    (told,) = sweep_warnings([result("a", evidence={"left_on_the_node": files})])
    assert told.startswith("files of a are still on their node, because they were too large to copy: trials/a/file0, ")
    assert told.endswith("and 2 more")


def test_odd_evidence_is_survived():
    assert not list(sweep_warnings([result("a", evidence={"left_on_the_node": "everything"})]))
