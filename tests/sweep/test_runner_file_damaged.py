"""`runner.json` says whom `flopwatch sweep stop` signals: damaged, it names nobody."""

import json
import os

import pytest

from flopwatch.process import start_ticks
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.sweep.folder import held_folder
from flopwatch.sweep.runner.observing import Follower, RunnerFile, find_runner
from flopwatch.testing import InProcessEngine
from support.sweeping import run_sweep

WHOLE = {"pid": os.getpid(), "host": "here", "start_ticks": start_ticks(os.getpid()), "running": {"a": 1.0}}


@pytest.fixture
def sweep(tmp_path):
    with held_folder(tmp_path / "s"):
        yield tmp_path / "s"


def test_what_a_runner_wrote_is_read_back_until_it_has_ended(sweep):
    with RunnerFile(sweep):
        state, holder = find_runner(sweep)
        assert (state.pid, holder.life) == (os.getpid(), "alive")
    assert find_runner(sweep) is None


def test_whoever_holds_the_folder_without_a_word_of_its_own_is_not_the_runner(sweep):
    """A fit, or a runner that has just begun, beside what an earlier runner wrote."""
    assert find_runner(sweep) is None
    (sweep / "runner.json").write_text(json.dumps({**WHOLE, "pid": 1}))
    assert find_runner(sweep) is None


@pytest.mark.parametrize(
    "change",
    [{"pid": "1"}, {"pid": -1}, {"pid": 10**30 + 1}, {"pid": True}, {"start_ticks": ""}, {"start_ticks": None},
     {"host": 3}, {"running": ["a"]}, {"running": {"a": "long"}}, {"waiting": "many"}],
)  # fmt: skip
def test_a_damaged_one_names_nobody(sweep, change):
    (sweep / "runner.json").write_text(json.dumps(WHOLE))
    assert find_runner(sweep)[0].running == {"a": 1.0}
    (sweep / "runner.json").write_text(json.dumps({**WHOLE, **change}))
    assert find_runner(sweep) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff\0", b"[" * 5000])
def test_one_that_is_no_record_names_nobody(sweep, content):
    (sweep / "runner.json").write_bytes(content)
    assert find_runner(sweep) is None


def test_a_follower_passes_over_lines_that_are_no_results(tmp_path):
    specs = [TrialSpec("standard", "tiny", 1, 64)]
    run_sweep(
        tmp_path / "s", specs, InProcessEngine(lambda trial: TrialResult(trial.name, trial.key, trial.spec, "ok"))
    )
    follower = Follower(tmp_path / "s")
    whole = (tmp_path / "s" / "results.jsonl").read_bytes()
    with (tmp_path / "s" / "results.jsonl").open("ab") as stream:
        stream.write(b"[" * 9999 + b'\n{}\n\xff\0\n{"format": 9}\n' + whole + b'{"half')
    assert [result.outcome for result in follower.new_results()] == ["ok"]
