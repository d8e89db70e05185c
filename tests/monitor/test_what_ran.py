"""The log says what ran, no other sink does, and finding it out cannot disturb a training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flopwatch import TrainingMonitor
from flopwatch.cli import main
from flopwatch.records.what_ran import git_state
from flopwatch.testing import RecordingSink


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print()\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q", "-b", "trunk"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder


@pytest.fixture
def started(monkeypatch, repository):
    """The process looks as if it had been started with these arguments, by Slurm, in a repository."""
    monkeypatch.chdir(repository)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr=3e-4", "--hf-token", "hunter2", "--max-tokens", "512"])
    monkeypatch.setenv("SLURM_JOB_ID", "4711_beta")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "rendezvous")
    monkeypatch.setenv("SLURM_JWT", "hunter3")
    monkeypatch.setenv("LOGNAME", "ada")
    return repository


def train(folder, **settings):
    """A training of 20 steps; its first record in the log, and the records of another sink."""
    model = torch.nn.Linear(4, 4)
    sink = RecordingSink()
    with TrainingMonitor(
        folder, model=model, sinks=[sink], strict=True, log_every=5, quiet=True, **settings
    ) as monitor:
        for _ in range(20):
            batch = torch.randn(2, 4)
            with monitor.step(batch):
                model(batch).sum().backward()
    lines = (folder / "training_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["type"] for line in lines].count("row") == 4
    return json.loads(lines[0]), sink.records


def test_the_log_says_what_ran(started, tmp_path):
    what = train(tmp_path / "run")[0]["what_ran"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert what["script"] == "train.py"
    assert what["arguments"] == ["--lr=3e-4", "--hf-token", "***", "--max-tokens", "512"]
    assert what["folder"] == str(started)
    assert what["git"] == {"commit": commit, "branch": "trunk", "dirty": False}
    assert what["user"] == "ada"
    assert what["job"]["SLURM_JOB_ID"] == "4711_beta"
    assert what["job"]["TORCHELASTIC_RUN_ID"] == "rendezvous"
    assert what["packages"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert "hunter" not in (tmp_path / "run" / "training_log.jsonl").read_text()


def test_other_sinks_do_not_get_it(started, tmp_path):
    _, records = train(tmp_path / "run")
    assert "4711_beta" not in json.dumps([record.to_json() for record in records])


def test_explain_and_the_page_show_it(started, tmp_path, capsys):
    train(tmp_path / "run")
    page = tmp_path / "run.html"
    for command in (["explain", str(tmp_path / "run")], ["report", str(tmp_path / "run"), "--html", str(page)]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert not ended.value.code
    for shown in (capsys.readouterr().out, page.read_text()):
        assert "SLURM_JOB_ID 4711_beta" in " ".join(shown.split())
        assert "--max-tokens 512" in shown
        assert "(trunk)" in shown
        assert "hunter2" not in shown


def test_a_changed_file_makes_the_commit_dirty_and_a_new_file_does_not(repository):
    (repository / "notes.txt").write_text("new")
    assert git_state(str(repository))["dirty"] is False
    (repository / "train.py").write_text("print(1)\n")
    assert git_state(str(repository))["dirty"] is True


def test_git_writes_nothing_into_the_repository(repository):
    # A file with another time makes `git status` refresh its index, unless it is told not to.
    os.utime(repository / "train.py", (1.0, 1.0))
    index = repository / ".git" / "index"
    before = index.read_bytes(), index.stat().st_mtime_ns
    assert git_state(str(repository))["dirty"] is False
    assert (index.read_bytes(), index.stat().st_mtime_ns) == before


def fake_git(folder, content):
    folder.mkdir()
    (folder / "git").write_text(f"#!/bin/sh\n{content}\n")
    (folder / "git").chmod(0o755)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("git", ["hangs", "missing", "fails"])
def test_a_training_ends_and_is_logged_without_git(started, tmp_path, monkeypatch, git):
    contents = {"hangs": "exec sleep 600", "fails": "exit 128"}
    path = fake_git(tmp_path / "bin", contents[git]) if git in contents else str(tmp_path)
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin" if git == "hangs" else path)
    what = train(tmp_path / "run")[0]["what_ran"]
    assert "git" not in what
    assert what["script"] == "train.py"


def test_outside_of_a_repository_and_in_one_without_a_commit_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(str(tmp_path)) is None
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    assert git_state(str(tmp_path)) is None
    assert git_state(str(Path(tmp_path) / "gone")) is None
