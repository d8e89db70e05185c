"""The table of `flopwatch run`: each row is shown by a training, and a pair without a row cannot happen."""

import ast

import pytest

from flopwatch.automatic.watcher import ROWS, Event, Seen
from flopwatch.runs.reading import read_log
from support.warm_python import start_warm
from testbeds.unchanged.scripts import FOLDER, SCRIPTS
from testbeds.unchanged.short import SHORT

FILES = {script.name: script.file for script in SCRIPTS}
BEFORE = (Seen.NOTHING, Seen.EVALUATED, Seen.MAYBE)
MEASURED = (Seen.BETWEEN, Seen.OPEN, Seen.ENDS, Seen.BEGINS)
OF_FIRST_STEP = (Event.EVALUATED_CALL, Event.LOSS_CALL, Event.MAYBE_EVALUATION)
CALLS = (Event.GRAD_CALL, Event.PLAIN_CALL, Event.EVALUATION, *OF_FIRST_STEP)
FIRST_IS_KNOWN = (Seen.FIRST, Seen.TOO_MANY)
WITHOUT_ROW = {
    "once an optimizer was made, this stays known": ([*Seen][1:-1], [Event.EARLY_CALL]),
    "only models that are remembered are evaluated again": ([Seen.NOTHING], [Event.EVALUATION, Event.EVALUATED_CALL]),
    "calls that are left out are forgotten": ([Seen.NOTHING, Seen.EVALUATED], [Event.TOO_MANY_CALLS]),
    "nothing listens to calls any longer": ([Seen.TOO_MANY], [*CALLS, Event.TOO_MANY_CALLS]),
    "that a call comes has changed the state": ([Seen.ENDS, Seen.BEGINS], CALLS),
    "these calls are told apart before and in the first step": ([Seen.BETWEEN, Seen.OPEN], OF_FIRST_STEP),
    "only the calls of the first step are limited": (MEASURED, [Event.TOO_MANY_CALLS]),
}
IGNORED = {
    "no step waits for the call": ([*BEFORE, *FIRST_IS_KNOWN, Seen.BETWEEN, Seen.OPEN], [Event.CALL_COMES]),
    "the call was no evaluation before the first step": (
        [Seen.NOTHING, *FIRST_IS_KNOWN, *MEASURED],
        [Event.RETURNED],
    ),
    "flopwatch is off": ([Seen.OFF], [*Event]),
}


def pairs_of(reasons):
    return {(state, event) for states, events in reasons.values() for state in states for event in events}


def test_every_pair_has_one_row_or_a_reason_why_it_has_none():
    in_rows = [(state, event) for row in ROWS for state in row.states for event in row.events]
    without = pairs_of(WITHOUT_ROW) | pairs_of(IGNORED)
    assert len(in_rows) == len(set(in_rows)), "two rows for one pair"
    assert not set(in_rows) & without
    assert set(in_rows) | without == {(state, event) for state in Seen for event in Event}


def test_every_row_names_a_training_that_exists():
    assert {row.shown_by for row in ROWS} <= FILES.keys() | SHORT.keys()
    assert all(path.is_file() for path in FILES.values())
    assert {row.shown_by for row in ROWS} >= SHORT.keys(), "each of them is there for a row"


SHOWN = """
from flopwatch.automatic import session
from flopwatch.automatic.watcher import TABLE, Watcher
from flopwatch.cli import main

pairs, handle = set(), Watcher.handle

def noted(self, event, *what):
    pairs.add((self.state.name, event.name))
    handle(self, event, *what)

Watcher.handle = noted
main()
session._active.stop()
print("PAIRS", sorted(pairs))
"""


def pairs_taken(folder, *command):
    """The pairs of state and event that happen in a training under `flopwatch run`."""
    process = start_warm(SHOWN, "run", "--quiet", "--output-dir", str(folder / "run"), *command, cwd=folder)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return {(Seen[state], Event[event]) for state, event in ast.literal_eval(out.rpartition("PAIRS ")[2])}


def check_rows(name, taken):
    for row in ROWS:
        if row.shown_by == name:
            assert taken & {(state, event) for state in row.states for event in row.events}, row
    assert not taken & pairs_of(WITHOUT_ROW)


@pytest.mark.parametrize("name", SHORT)
def test_a_short_training_shows_its_rows(name, tmp_path):
    check_rows(name, pairs_taken(tmp_path, str(FOLDER / "short.py"), name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({row.shown_by for row in ROWS} & FILES.keys()))
def test_a_script_shows_its_rows(name, tmp_path):
    check_rows(name, pairs_taken(tmp_path, str(FILES[name]), str(tmp_path / "own")))


def test_a_training_whose_only_optimizer_steps_inside_of_the_backward_pass_is_measured(tmp_path):
    pairs_taken(tmp_path, str(FOLDER / "short.py"), "one_in_backward")
    summary = read_log(tmp_path / "run" / "training_log.jsonl").summary
    # Two layers; the input of the first needs no gradient.
    assert summary.values["total/model_flops"] == 5 * (2 + 3) * (2 * 4 * 8 * 8)
    assert summary.values["total/samples"] == 5 * 4
    assert summary.exact
