"""What a training logs to W&B itself must look as it would without us: as the same script without our sink."""

import subprocess
import sys

import pytest

from support.sinks.fresh_python import fresh_environment
from support.sinks.wandb_file import read_history, read_kind, read_step_metrics, read_summary

pytestmark = pytest.mark.slow

ROWS = 1000
OURS_EVERY = 10

SCRIPT = """
import sys, time
from pathlib import Path
import wandb
from flopwatch.records.run import Row, RunStart, Summary
from flopwatch.sinks.thread import SinkThread
from flopwatch.sinks.wandb import WandbSink

folder, with_ours, opened_first, rows, ours_every = Path(sys.argv[1]), sys.argv[2] == "1", sys.argv[3] == "1", 1000, 10
failures = []
thread = None

def open_ours():
    global thread
    if with_ours:
        sink = WandbSink(folder / "ours")
        sink.gather_seconds = 0.0
        thread = SinkThread(sink, lambda name, error: failures.append(str(error)))
        thread.put(RunStart("s", 1.0, "outputs"))

def ours(step):
    # Written at once, from the sink's thread: between two of the user's rows.
    if thread is not None:
        thread.put(Row(step, 1.0 + step, {"training/loss": -float(step), "perf/mfu": step / 1e4}))
        assert thread.flush(60), failures

if opened_first:
    open_ours()
    ours(0)
run = wandb.init(dir=folder / "mine", project="mine", mode="offline", INIT)
if not opened_first:
    open_ours()
for step in range(1, rows + 1):
    LOG
    if step % ours_every == 0:
        ours(step)
    AFTER
if thread is not None:
    thread.put(Summary(rows, 2000.0, {"total/steps": rows}))
    assert thread.close(60) and not failures, failures
run.finish()
"""

WAYS = {
    "with a step": ('wandb.log({"loss": 1 / step, "training/loss": 1.0 * step, "global_step": step}, step=step)', ""),
    "with a step below ours": ('run.log({"loss": 1 / step}, step=step // 3)', ""),
    "without a step": ('wandb.log({"loss": 1 / step, "training/loss": 1.0 * step})', ""),
    "in two parts": ('wandb.log({"loss": 1 / step}, commit=False)', 'wandb.log({"accuracy": step / 1e3})'),
    "in two parts with a step": (
        'wandb.log({"loss": 1 / step}, step=2 * step)',
        'wandb.log({"accuracy": step / 1e3}, step=2 * step)',
    ),
}


TRUTHS = {}
"""By way of logging, the user's rows without us: one run of it for all tests."""


@pytest.fixture
def logged(tmp_path):
    """Runs the script with or without our sink; gives the user's file and the others."""

    def run(way, *, with_ours=True, opened_first=False, init="", **environment):
        folder = tmp_path / ("with" if with_ours else "without")
        (folder / "mine").mkdir(parents=True)
        log, after = WAYS[way]
        code = SCRIPT.replace("LOG", log).replace("AFTER", after).replace("INIT", init)
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder), str(int(with_ours)), str(int(opened_first))],
            capture_output=True,
            text=True,
            timeout=300,
            env=fresh_environment(WANDB_MODE="offline", WANDB_ERROR_REPORTING="false", **environment),
        )
        assert done.returncode == 0, done.stderr
        assert "must be monotonically increasing" not in done.stderr
        return folder

    return run


def files(folder):
    """The user's file and ours."""
    found = {}
    for path in folder.glob("*/wandb/offline-run-*/run-*.wandb"):
        is_ours = path.parents[2].name == "ours" or path.stem.endswith("-flopwatch")
        assert found.setdefault("flopwatch" if is_ours else "user", path) == path
    return found


def rows_of(path):
    """Every row without the clock's columns, in the order of the file."""
    clocks = ("_timestamp", "_runtime")
    return [{key: value for key, value in row.items() if key not in clocks} for row in read_history(path)]


IN_CI = {("without a step", False), ("with a step below ours", True), ("in two parts with a step", False)}


@pytest.mark.parametrize(
    ("way", "opened_first"),
    [
        pytest.param(
            way,
            opened_first,
            id=f"{way}, ours opened {'before' if opened_first else 'after'}",
            marks=[] if (way, opened_first) in IN_CI else pytest.mark.campaign,
        )
        for way in WAYS
        for opened_first in (False, True)
    ],
)
def test_the_users_rows_are_as_without_us_and_ours_are_complete(logged, way, opened_first):
    truth = TRUTHS.get(way) or rows_of(files(logged(way, with_ours=False))["user"])
    TRUTHS[way] = truth
    found = files(logged(way, opened_first=opened_first))
    assert rows_of(found["user"]) == truth
    ours = rows_of(found["flopwatch"])
    steps = [0] * opened_first + list(range(OURS_EVERY, ROWS + 1, OURS_EVERY))
    assert [row["global_step"] for row in ours] == steps
    assert [row["training/loss"] for row in ours] == [-float(step) for step in steps]
    assert read_step_metrics(found["flopwatch"])["perf/mfu"] == "global_step"
    if way != "with a step below ours":
        assert len(truth) == ROWS


@pytest.mark.parametrize(
    "opened_first",
    [
        pytest.param(False, id="ours opened after"),
        pytest.param(True, id="ours opened before", marks=pytest.mark.campaign),
    ],
)
def test_a_run_id_in_the_environment_stays_the_users(logged, opened_first):
    environment = {"WANDB_RUN_ID": "chosen", "WANDB_RESUME": "allow"}
    found = files(logged("with a step", opened_first=opened_first, **environment))
    ids = {kind: read_kind(path, "run")[0].run.run_id for kind, path in found.items()}
    assert ids == {"user": "chosen", "flopwatch": "chosen-flopwatch"}


def test_ours_lies_beside_the_users_run_in_its_project_and_group_and_the_users_summary_names_it(logged):
    found = files(logged("with a step", init='group="sizes", name="wide"'))
    mine, ours = (read_kind(found[kind], "run")[-1].run for kind in ("user", "flopwatch"))
    assert found["flopwatch"].parents[1] == found["user"].parents[1]  # one `wandb sync` takes both
    assert (ours.project, ours.run_group, ours.display_name) == ("mine", "sizes", "wide (flopwatch)")
    summary = read_summary(found["user"])["flopwatch"]
    assert summary["run"] == f"{mine.run_id}-flopwatch"
    assert summary["values"] == {"total/steps": ROWS}
