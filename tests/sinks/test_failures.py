"""One part of a run fails, in a real process: the others get everything, it is told once, and the process ends."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.sinks.failing_run import ROWS
from support.sinks.fresh_python import fresh_environment
from support.sinks.sample_run import summary

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path):
    def run_scenario(name):
        done = subprocess.run(
            [sys.executable, str(TESTS / "support" / "sinks" / "failing_run.py"), name, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=300,
            env=fresh_environment(),
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr, "the process did not end quietly"
        report = SimpleNamespace(**json.loads(done.stdout.rpartition("report: ")[2]))
        assert_others_got_everything(report, tmp_path)
        return report

    return run_scenario


def assert_others_got_everything(report, folder):
    assert report.good == list(range(1, ROWS + 1))
    lines = [json.loads(line) for line in (folder / "good.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["type"] == "row"] == report.good
    assert (report.dropped["good"], report.closed["good"]) == (0, True)


def the_only_failure(report):
    ((name, message),) = report.failures
    return name, message


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small disk; test_jsonl limits the file size instead")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_log_on_a_disk_that_is_full_for_a_while_lacks_nothing(run, small_disk):
    report = run("disk_full_for_a_while")
    assert report.failures == []
    lines = [json.loads(line) for line in (small_disk / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["type"] == "row"] == list(range(1, ROWS + 1))
    assert lines[-1]["type"] == "summary"


def test_a_disk_that_stays_full_is_told_and_tears_one_line_at_most(run, small_disk):
    report = run("disk_full")
    assert {name for name, _ in report.failures} == {"jsonl", "tensorboard"}
    assert all("No space left on device" in message for _, message in report.failures)
    assert any("rows and the end of the run" in message for _, message in report.failures)
    *whole, _last = (small_disk / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["type"] for line in whole[:3]] == ["run", "provenance", "row"]
    assert all(json.loads(line) for line in whole)


TRAINING = """
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained to its end")
"""


def test_a_training_on_a_full_disk_runs_to_its_end_and_the_last_line_says_what_its_log_lacks(tmp_path, small_disk):
    (tmp_path / "train.py").write_text(TRAINING)
    command = [sys.executable, "-m", "flopwatch", "run", "--output-dir", str(small_disk / "run"), "--log-every", "1"]
    done = subprocess.run([*command, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "trained to its end\n")
    assert "its newest rows are kept in memory until there is space" in done.stderr
    assert done.stderr.rstrip().endswith("rows and the end of the run")
    assert "Traceback" not in done.stderr


def test_a_deleted_folder_is_made_again(run, tmp_path):
    report = run("folder_deleted")
    assert report.failures == []
    lines = [json.loads(line) for line in (tmp_path / "logs" / "log.jsonl").read_text().splitlines()]
    assert [line["type"] for line in lines[:3]] == ["run", "provenance", "notice"]
    assert lines[2]["code"] == "log_recreated"
    steps = [line["step"] for line in lines if line["type"] == "row"]
    assert steps == list(range(steps[0], ROWS + 1))
    assert steps[0] <= ROWS // 2 + 1
    (event_file,) = (tmp_path / "logs" / "tensorboard" / "flopwatch").iterdir()
    again = [step for step in steps_of_event_file(event_file) if step]
    assert again == [*range(again[0], ROWS + 1), summary().step]
    assert again[0] <= ROWS // 2 + 1


def steps_of_event_file(path):
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    return [Event.FromString(event).step for event in RawEventFileLoader(str(path)).Load()]


@pytest.mark.parametrize(
    "when",
    ["halfway", *(pytest.param(when, marks=pytest.mark.campaign) for when in ("at_the_end", "while_it_finishes"))],
)
def test_wandb_that_is_killed_is_reported_and_does_not_hold_up_the_end(run, when):
    name, message = the_only_failure(run(f"wandb_killed_{when}"))
    assert name == "wandb"
    assert "wandb-core" in message


def test_mlflow_down_from_the_start_is_reported_at_once(run):
    name, message = the_only_failure(run("mlflow_down_from_the_start"))
    assert name == "mlflow"
    assert "http://127.0.0.1:" in message
    assert "MLFLOW_TRACKING_URI" in message


def test_a_prometheus_port_that_is_taken_is_named(run):
    name, message = the_only_failure(run("prometheus_port_taken"))
    assert name == "prometheus"
    assert "is taken by another program" in message


def test_a_sink_that_raises_is_reported_once(run):
    report = run("sink_raises")
    assert report.failures == [["bad", "out of paper"]]
    assert report.closed["bad"]


def test_a_sink_that_hangs_loses_rows_alone_and_does_not_hold_up_the_end(run):
    report = run("sink_hangs")
    assert report.failures == []
    assert report.dropped["bad"] > 0
    assert not report.closed["bad"]


def test_a_slow_sink_loses_rows_alone_and_does_not_hold_up_the_end(run):
    report = run("sink_is_slow")
    assert report.failures == []
    assert report.dropped["bad"] > 0
    assert not report.closed["bad"]
