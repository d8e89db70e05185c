"""`flopwatch watch` lists the runs of a folder and says what to change; `report --csv` exports the rows of a run."""

import pytest
import torch

from flopwatch import TrainingMonitor
from flopwatch.cli import main
from flopwatch.cli.run_logs.watch_screen import draw_frame
from flopwatch.records.run import Row, RunStart, Summary
from flopwatch.runs.state import WatchedRun
from flopwatch.sinks.console import summary_lines


def test_a_folder_of_several_runs_is_listed_and_their_rows_are_exported(tmp_path, capsys):
    for name, loss in (("first", 2.5), ("second", 1.5)):
        with TrainingMonitor(tmp_path / name, model=torch.nn.Linear(8, 8), log_every=2) as monitor:
            for _ in range(4):
                with monitor.step(torch.ones(2, 8)) as step:
                    step.log(loss=loss)
    for arguments in (["watch", str(tmp_path)], ["report", str(tmp_path / "second"), "--csv", "-"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert not ended.value.code
    listed, _, table = capsys.readouterr().out.partition("step,")
    assert [word in listed for word in ("first", "second", "ended", "2.5", "1.5")] == [True] * 5
    header, *rows = f"step,{table}".splitlines()
    assert [row.split(",")[0] for row in rows] == ["1", "3"]
    assert rows[0].split(",")[header.split(",").index("training/loss")] == "1.5"


def test_a_run_that_waits_for_input_is_told_what_to_change():
    sentence = "67 % of the step waits for input: raise num_workers of the DataLoader"
    values = {"perf/input_wait_percent": 67.2, "perf/padding_percent": 40.0}
    assert ("advice", sentence) in summary_lines(Summary(9, 0.0, values))
    run = WatchedRun()
    run.add(RunStart("s", 0.0, "outputs"))
    run.add(Row(9, 0.0, values))
    assert sentence in "".join(text.plain for text in draw_frame(run, "outputs", 0.0, width=80, height=24))
