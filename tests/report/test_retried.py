from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.report.problems import sweep_warnings


def result(name, **facts):
    return TrialResult(name, "key", TrialSpec("standard", "tiny", 1, 1), "ok", **facts)


def test_a_sweep_without_losses_says_nothing():
    assert not list(sweep_warnings([result("a"), result("b", evidence={"exit_code": 0})]))


def test_attempts_that_were_lost_are_told():
    (told,) = sweep_warnings([result("a"), result("b", earlier_attempts=({"outcome": "lost"},) * 2)])
    assert told == "1 trial needed more than one attempt: b; files of the earlier attempts (2) are in earlier/"
