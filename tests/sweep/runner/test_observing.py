"""Whoever looks at a sweep cannot end it."""

import pytest
from rich.errors import MarkupError

from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.sweep.folder import held_folder
from flopwatch.sweep.runner.observing import RunnerFile, Stop, find_runner
from flopwatch.testing import InProcessEngine
from support.sweeping import Listener, run_sweep

SPECS = [TrialSpec("standard", "tiny", batch, 64) for batch in (1, 2, 4)]
ERRORS = [
    MarkupError("closing tag '[/data]' doesn't match any open tag"),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
    BrokenPipeError(32, "Broken pipe"),
    OSError(28, "No space left on device"),
    SystemExit(1),  # what rich raises for a closed pipe
    RecursionError(),
]


class Failing(Listener):
    def __init__(self, call, error):
        super().__init__()
        self.calls = 0

        def fail(*facts):
            self.calls += 1
            raise error

        setattr(self, call, fail)


@pytest.mark.parametrize("call", ["started", "ended", "ticked"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_observer_that_fails_is_told_of_once_and_the_sweep_goes_on(tmp_path, capsys, call, error):
    listener = Failing(call, error)
    engine = InProcessEngine(lambda trial: TrialResult(trial.name, trial.key, trial.spec, "ok"))
    results = run_sweep(tmp_path / "s", SPECS, engine, listener=listener)
    assert [result.outcome for result in results.values()] == ["ok"] * 3
    assert listener.calls == 1
    told = capsys.readouterr().err
    assert told.count("the sweep continues without a display") == 1
    assert type(error).__name__ in told


def test_a_display_that_fails_does_not_hide_the_runner_from_others(tmp_path):
    """`flopwatch watch` reads runner.json, whatever the runner's own terminal does."""
    with held_folder(tmp_path / "s"):
        noted = RunnerFile(tmp_path / "s", clock=iter(range(0, 1000, 5)).__next__)
        noted.passing_to(Failing("ticked", MarkupError("x")), Stop())
        noted.tell("ticked", {}, 7, "first")
        noted.tell("ticked", {}, 6, "second")
        state, holder = find_runner(tmp_path / "s")
        assert (state.waiting, holder.life, holder.is_here) == (6, "alive", True)
