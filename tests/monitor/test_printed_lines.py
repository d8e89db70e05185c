"""What a `TrainingMonitor` prints on its own: its folder, a line per window, the next command; once, to stderr."""

import pytest
import torch
from torch import nn

from flopwatch.monitor.training_monitor import TrainingMonitor


def train(folder, **options):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TrainingMonitor(folder, model=model, log_every=10, peak_flops_per_s=1e12, **options) as monitor:
        for batch in torch.randn(60, 4, 8):
            with monitor.step(batch) as step:
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                step.log(loss=loss)


def test_folder_a_line_per_window_and_the_next_command_are_printed_to_stderr(tmp_path, capsys):
    train(tmp_path)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"flopwatch: logging to {tmp_path}\n")
    assert len([line for line in err.splitlines() if line.startswith("step ") and "loss" in line]) == 6
    assert err.rstrip().endswith(f"Next: flopwatch why {tmp_path}")


@pytest.mark.parametrize("options", [{"quiet": True}, {"config": {"flopwatch": {"quiet": True}}}])
def test_a_quiet_monitor_prints_nothing(tmp_path, capsys, options):
    train(tmp_path, **options)
    assert capsys.readouterr() == ("", "")


def test_with_the_sink_console_lines_are_printed_once(tmp_path, capsys):
    train(tmp_path, sinks=["console"])
    out, err = capsys.readouterr()
    assert out.count(f"flopwatch: logging to {tmp_path}\n") == 1
    assert err == ""


def test_only_the_logging_rank_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    train(tmp_path)
    assert capsys.readouterr() == ("", "")
