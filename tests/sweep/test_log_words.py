"""What a command prints about memory is shown, and decides nothing: not its outcome, and not what is left out."""

import json

import pytest

from flopwatch.records.trial import Limits, TrialSpec
from flopwatch.report.capture import capture_sweep
from flopwatch.report.summary import summarise
from flopwatch.sweep.engines.local import LocalEngine
from support.sweeping import run_sweep

BASE = {"device": "cpu", "trace": False, "limits": Limits(60.0, None)}


@pytest.fixture(autouse=True)
def own_slots(monkeypatch, tmp_path):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))


def specs(command):
    return [TrialSpec("command", "tiny", batch, 8, command=command, **BASE) for batch in (1, 2)]


def test_a_word_in_a_log_leaves_nothing_out_and_is_shown(tmp_path):
    command = "echo 'CUDA out of memory in optional autotune'; exit 1"
    results = run_sweep(tmp_path / "s", specs(command), LocalEngine())
    assert [result.outcome for result in results.values()] == ["error", "error"], "the larger one is run too"
    assert all(result.evidence["hint"] == "CUDA out of memory in optional autotune" for result in results.values())
    (failure,) = summarise(capture_sweep(tmp_path / "s")).failures
    assert "log mentions memory" in failure.cause
    assert any("CUDA out of memory in optional autotune" in line for line in failure.advice)
    assert any("metrics.json" in line for line in failure.advice)


def test_a_command_may_say_itself_that_it_was_out_of_memory(tmp_path):
    told = json.dumps({"outcome": "oom_device"})
    command = f"echo '{told}' > $FLOPWATCH_TRIAL_DIR/metrics.json; exit 3"
    results = run_sweep(tmp_path / "s", specs(command), LocalEngine())
    assert sorted(result.outcome for result in results.values()) == ["oom_device", "oom_inferred"]
