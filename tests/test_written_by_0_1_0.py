"""Folders that 0.1.0 wrote are read, reported and continued by today's code; tests/data/written_by_0_1_0 has them."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flopwatch
from flopwatch.cli import main

WRITTEN = Path(__file__).parent / "data/written_by_0_1_0"
# By make.py beside the folders: six steps, then four, of 2 x (16 + number) tokens.
TOKENS_OF_STEP = [2 * (16 + number) for number in range(10)]
LABEL = {"sweep": "out_of_memory", "fit": "Command"}
OUTCOMES = {
    "ok_bs1_seq16": "ok",
    "error_bs1_seq16": "error",
    "out_of_memory_bs1_seq16": "oom_host",
    "timeout_bs1_seq16": "timeout",
    "StandardTrainer_bs1_seq16": "ok",
}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folders, on the machine they were written on as far as a trial's key knows it."""
    copy = tmp_path / "written"
    shutil.copytree(WRITTEN, copy)
    facts = json.loads((WRITTEN / "machine.json").read_text())
    monkeypatch.setattr("flopwatch.sweep.host.environment.machine", lambda: facts)
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command in this process and returns what it prints."""

    def run(*arguments: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        printed = capsys.readouterr()
        assert (end.value.code or 0) == status, printed.out + printed.err
        return printed.out

    return run


def rows_of(log: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return [record for record in records if record["type"] == "row"]


def test_report_shows_every_trial_and_how_it_ended(written: Path, command: Callable[..., str]) -> None:
    trials = json.loads(command("report", "sweep", "--json"))["trials"]

    assert {trial["name"]: trial["outcome"] for trial in trials} == OUTCOMES
    text = command("report", "sweep")
    assert "5 trials: 2 ok" in text
    assert "left with exit code 3" in text
    assert "damaged" not in text


def test_report_writes_every_format_for_a_sweep_and_a_fit(written: Path, command: Callable[..., str]) -> None:
    for folder in ("sweep", "fit"):
        command(
            "report", folder, "--html", "page.html", "--md", "page.md", "--csv", "page.csv", "--output", "page.json"
        )
        for file in ("page.html", "page.md", "page.csv", "page.json"):
            assert LABEL[folder] in Path(file).read_text(), (folder, file)


def test_compare_reads_runs_and_sweeps(written: Path, command: Callable[..., str]) -> None:
    runs = json.loads(command("compare", "run", "other_run", "--json"))
    steps = next(line for line in runs["lines"] if line["label"] == "steps in all")
    assert (steps["a"], steps["b"]) == (10, 10)
    assert runs["differences"] == []

    assert "5 trials: 2 ok, 1 error, 1 oom_host, 1 timeout" in command("compare", "sweep", "sweep")


def test_explain_takes_a_step_of_any_session_apart(written: Path, command: Callable[..., str]) -> None:
    columns = {
        step: row["steps"] for row in rows_of(WRITTEN / "run/training_log.jsonl") for step in row["steps"]["step"]
    }
    for step in (2, 7):
        told = json.loads(command("explain", "run", "--step", str(step), "--json"))
        at = columns[step]["step"].index(step)
        assert str(columns[step]["model_flops"][at]) in json.dumps(told)
        assert str(TOKENS_OF_STEP[step]) in json.dumps(told)
    assert "MFU" in command("explain", "ranks")


@pytest.mark.parametrize(("folder", "progress"), [("run", "10 of 10 steps"), ("ranks", "step 7")])
def test_watch_draws_a_frame(folder: str, progress: str, written: Path, command: Callable[..., str]) -> None:
    frame = command("watch", folder, "--once")

    assert progress in frame
    assert "MFU" in frame


def test_a_resumed_sweep_runs_nothing_twice(written: Path, command: Callable[..., str]) -> None:
    before = {file: file.read_bytes() for file in Path("sweep").rglob("*") if file.is_file()}

    command("sweep", "sweep.yaml", "-o", "sweep", "--no-preflight", status=1)  # of trials that failed then

    after = {file: file.read_bytes() for file in before}
    changed = {str(file) for file in before if before[file] != after[file]}
    assert changed <= {"sweep/sweep.json", "sweep/lock"}
    assert not Path("sweep/earlier").exists()


def test_a_resumed_fit_runs_no_trial_twice(written: Path, command: Callable[..., str]) -> None:
    before = {file: file.read_bytes() for file in Path("fit/trials").rglob("*") if file.is_file()}
    results = Path("fit/results.jsonl").read_text()
    spec = json.loads(Path("fit/trials/Command_bs1_seq8/spec.json").read_text())["spec"]

    wanted = ("--command", spec["command"], "--memory", "130MiB", "--max-batch", "8", "--seq-len", "8")
    found = json.loads(command("fit", *wanted, "-o", "fit", "--no-preflight", "--json"))

    assert (found["largest"], found["too_large"]) == (6, 7)
    assert {file: file.read_bytes() for file in before} == before
    # The search has changed since: it may try a batch that 0.1.0 did not need.
    assert Path("fit/results.jsonl").read_text().startswith(results)


@pytest.mark.parametrize("first", [6, 10])
def test_a_resumed_run_continues_its_totals(first: int, written: Path) -> None:
    """From the state of a checkpoint after six steps, and without one from the log of ten."""
    with flopwatch.TrainingMonitor("run", peak_flops_per_s=320e9) as monitor:
        if first == 6:
            monitor.load_state_dict(json.loads(Path("run/state.json").read_text()))
        for number in (first, first + 1):
            ids = torch.zeros(2, 50, dtype=torch.long)
            monitor.log_step(number, loss=1.0, batch={"input_ids": ids, "labels": ids})

    assert monitor.summary is not None
    values = monitor.summary.values
    assert values["total/steps"] == first + 2
    assert values["total/tokens"] == sum(TOKENS_OF_STEP[:first]) + 2 * 2 * 50
    ledger = next(row["ledger"] for row in rows_of(WRITTEN / "run/training_log.jsonl") if row["step"] == first - 1)
    assert values["total/model_flops"] == ledger["totals"]["model_flops"]  # today's steps have no model
    assert values["time/wall_seconds"] >= ledger["seconds"]["wall"]
