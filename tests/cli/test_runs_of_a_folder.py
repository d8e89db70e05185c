"""Commands on a folder of runs take the newest, or list them; `report --csv` exports the rows of a run."""

import os
import time

import pytest
import torch

from flopwatch import TrainingMonitor
from flopwatch.cli import main
from flopwatch.cli.run_logs.watch_screen import draw_frame
from flopwatch.records.run import Row, RunStart
from flopwatch.runs.state import WatchedRun


def test_a_folder_of_several_runs_is_listed_and_their_rows_are_exported(tmp_path, capsys):
    for name, loss in (("first", 2.5), ("second", 1.5)):
        with TrainingMonitor(tmp_path / name, model=torch.nn.Linear(8, 8), log_every=2) as monitor:
            for _ in range(4):
                with monitor.step(torch.ones(2, 8)) as step:
                    step.log(loss=loss)
    for arguments in (["watch", str(tmp_path), "--list"], ["report", str(tmp_path / "second"), "--csv", "-"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert not ended.value.code
    listed, _, table = capsys.readouterr().out.partition("step,")
    assert [word in listed for word in ("first", "second", "ended", "2.5", "1.5")] == [True] * 5
    header, *rows = f"step,{table}".splitlines()
    assert [row.split(",")[0] for row in rows] == ["1", "3"]
    assert rows[0].split(",")[header.split(",").index("training/loss")] == "1.5"


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    """A working folder with two runs in `flopwatch-runs`; the log of the one with the earlier name is newer."""
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a"):
        with TrainingMonitor(f"flopwatch-runs/{name}", model=torch.nn.Linear(8, 8), log_every=2) as monitor:
            for _ in range(8):
                with monitor.step(torch.ones(2, 8)):
                    monitor.summary  # noqa: B018
    os.utime("flopwatch-runs/b/training_log.jsonl", (1, 1))


@pytest.mark.parametrize("arguments", [(), ("flopwatch-runs",)])
@pytest.mark.parametrize("command", ["why", "explain", "report", "watch"])
def test_without_a_run_the_newest_is_taken_and_named(two_runs, flopwatch, command, arguments):
    status, out, err = flopwatch(command, *arguments, *(["--once"] if command == "watch" else []))
    assert status == 0
    assert "flopwatch-runs/a: the newest of 2 runs in flopwatch-runs" in err
    assert out


@pytest.mark.parametrize("command", ["why", "explain", "report", "watch"])
def test_without_any_run_it_is_said_where_they_were_looked_for(flopwatch, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    status, _, err = flopwatch(command)
    assert status == 2
    assert f"no run was named, and there is none in {tmp_path}/flopwatch-runs" in " ".join(err.split())


@pytest.mark.parametrize("command", ["why", "explain"])
def test_before_the_first_row_it_is_said_when_it_comes_and_what_is_known(flopwatch, tmp_path, command):
    monitor = TrainingMonitor(tmp_path, model=torch.nn.Linear(8, 8), log_every=30)
    with monitor.step(torch.ones(2, 8)):
        pass
    while not (tmp_path / "training_log.jsonl").exists() or not (tmp_path / "training_log.jsonl").read_text():
        time.sleep(0.01)
    status, out, _ = flopwatch(command, str(tmp_path))
    monitor.close()
    assert status == 0
    assert "first one is written after 30 steps or 10.0 s" in " ".join(out.split())
    assert "start-up" in out


@pytest.mark.parametrize("command", [(), ("why",), ("run",), ("sweep",), ("peak",)])
def test_h_is_help(flopwatch, command):
    assert flopwatch(*command, "-h") == flopwatch(*command, "--help")


@pytest.mark.parametrize("command", ["why", "report", "explain", "watch"])
def test_an_earlier_run_in_the_same_log_is_left_out_with_a_word(flopwatch, tmp_path, command):
    for steps in (60, 30):  # `flopwatch run` counts from 0 each time
        with TrainingMonitor(tmp_path, model=torch.nn.Linear(8, 8), log_every=10) as monitor:
            for number in range(steps):
                monitor.log_step(number, batch=torch.ones(2, 8))
    status, out, err = flopwatch(command, str(tmp_path), *(["--once"] if command == "watch" else []))
    assert status == 0, err
    assert "an earlier run, up to step 59" in " ".join(out.split())


def test_no_number_of_a_tile_is_cut_on_a_narrow_terminal():
    run = WatchedRun()
    run.add(RunStart("s", 0.0, "outputs"))
    run.add(Row(9, 0.0, {"perf/step_time": 0.5}, steps={"step": [9], "seconds": [0.512]}))
    for width in range(40, 100):
        words = draw_frame(run, "outputs", 0.0, width=width, height=24)[6].plain.replace("…", " ").split()
        assert {word for word in words if word[0].isdigit()} <= {"500.0"}, width
