from flopwatch.records.trial import Measured, StepTimes, TrialResult, TrialSpec
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


def repeated(name, low, high, *, unstable):
    steps = StepTimes(6, 1.0, low, high, low, high, high, 1.0, unstable)
    return result(name, measured=Measured(steps=steps, run_medians=(1.0, 1.0, 1.0)))


def test_a_trial_whose_repeats_left_a_wide_interval_is_not_called_narrow():
    (narrow,) = sweep_warnings([repeated("a", 0.99, 1.01, unstable=False)])
    both, wide = sweep_warnings([repeated("a", 0.99, 1.01, unstable=False), repeated("b", 0.86, 1.14, unstable=True)])

    assert narrow.startswith("1 trial ran 3 times in all to narrow the interval: a;")
    assert both.startswith("2 trials ran 6 times in all to narrow the interval: a, b;")
    assert wide.startswith(
        "repeats stopped at a wide interval: b ±14 % after 3 runs; to narrow it, raise --max-repeats"
    )
