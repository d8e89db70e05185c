"""Results of different code, and figures that cannot be, are marked."""

import json
from dataclasses import replace

import pytest

from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.report.problems import group_warnings
from flopwatch.sweep.host.environment import fingerprint
from flopwatch.sweep.host.memory import HostPeak
from flopwatch.sweep.supervisor.build_result import collect_measurements


def result(number, **environment):
    spec = TrialSpec("mine:Plain", "tiny", number, 8)
    return TrialResult(f"t{number}", str(number), spec, "ok", environment=environment)


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"sources": {"mine:Plain": "aaa"}}, {"sources": {"mine:Plain": "bbb"}}, "different code of mine:Plain"),
        ({"git": "0a46"}, {"git": "77fe+"}, "different git"),
        ({"flopwatch": "0.1.0"}, {"flopwatch": "0.2.0"}, "different flopwatch"),
    ],
)
def test_results_of_different_code_are_marked(one, other, told):
    assert told in " ".join(group_warnings([result(1, **one), result(2, **other)]))
    assert not list(group_warnings([result(1, **one), result(2, **one)]))


@pytest.mark.parametrize("odd", [{"sources": "x"}, {"sources": {1: [2]}}, {"sources": None}, {"git": ["a"]}])
def test_odd_environments_are_no_trouble(odd):
    list(group_warnings([result(1, **odd), result(2)]))


def test_an_edit_during_the_sweep_is_seen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seconds = iter((0.0, 100.0))
    monkeypatch.setattr("flopwatch.sweep.host.environment.monotonic_seconds", lambda: next(seconds))
    versions = []
    for text in ("first", "second"):
        (tmp_path / "job.sh").write_text(text)
        versions.append(fingerprint(TrialSpec("command", "tiny", 1, 8, command="sh job.sh"))["sources"]["job.sh"])
    assert versions[0] != versions[1]


@pytest.mark.parametrize(("mfu", "kept"), [(0.45, 0.45), (1.0, 1.0), (7.5, None), (-0.1, None), (45, None)])
def test_a_reported_mfu_that_cannot_be_is_left_out_and_said(tmp_path, mfu, kept):
    (tmp_path / "metrics.json").write_text(json.dumps({"mfu": mfu, "samples_per_s": 3}))
    spec = TrialSpec("command", "tiny", 1, 8, command="true")
    measured = collect_measurements(tmp_path, spec, HostPeak()).measured
    assert measured.cost.mfu == kept
    assert measured.extra["mfu"] == mfu, "what it said is still there"
    assert measured.samples_per_s == 3
    warnings = " ".join(group_warnings([replace(result(1), measured=measured)]))
    assert (f"the command reported mfu = {mfu:g}" in warnings) is (kept is None)
