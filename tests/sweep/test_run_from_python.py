"""`flopwatch.sweep.run`: a sweep from Python, with the same results and the same folder as the command's."""

import json
from pathlib import Path
from typing import Any

import pytest

import flopwatch
from flopwatch.errors import InputError

MATRIX: dict[str, Any] = {
    "trainer": [{"label": "fine", "command": "true"}, {"label": "broken", "command": "exit 3"}],
    "batch_size": [1, 2],
    "seq_len": [8],
}
OUTCOMES = {"fine_bs1_seq8": "ok", "fine_bs2_seq8": "ok", "broken_bs1_seq8": "error", "broken_bs2_seq8": "error"}


@pytest.fixture(autouse=True)
def own_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))


def outcomes(results: dict[str, Any]) -> dict[str, str]:
    return {name: result.outcome for name, result in results.items()}


@pytest.mark.slow
def test_a_matrix_runs_and_its_results_come_back_by_name(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching:
        def started(self, trial: Any) -> None: ...

        def ended(self, result: Any) -> None:
            seen.append(result.name)

        def ticked(self, running: Any, waiting: int, engine_state: str) -> None: ...

    results = flopwatch.sweep.run(MATRIX, tmp_path / "sweep", engine_options={"jobs": 1}, observer=Watching())

    assert outcomes(results) == OUTCOMES
    assert sorted(seen) == sorted(OUTCOMES)
    summary = flopwatch.report.summarise(tmp_path / "sweep")
    assert dict(summary.totals.by_outcome) == {"ok": 2, "error": 2}
    assert len(flopwatch.report.load(tmp_path / "sweep")) == 4


@pytest.mark.slow
def test_a_second_call_runs_nothing_and_a_yaml_file_is_the_same_matrix(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps(MATRIX))
    first = flopwatch.sweep.run(file, tmp_path / "sweep", limit="2")
    began = {name: result.unix_time for name, result in first.items()}

    again = flopwatch.sweep.run(MATRIX, str(tmp_path / "sweep"))

    assert outcomes(first) == dict(list(OUTCOMES.items())[:2])
    assert outcomes(again) == OUTCOMES
    assert {name: again[name].unix_time for name in began} == began


def test_what_cannot_be_used_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no setting 'trainerz'"):
        flopwatch.sweep.run({"trainerz": ["standard"]}, tmp_path / "sweep")
    with pytest.raises(InputError, match="there is no engine 'locale'"):
        flopwatch.sweep.run(MATRIX, tmp_path / "sweep", engine="locale")
    assert not (tmp_path / "sweep").exists()
