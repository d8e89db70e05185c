"""`flopwatch sweep --wandb/--mlflow`: trials are logged as they end, and nothing of it reaches the sweep."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from flopwatch.report.capture import follow_results
from sinks.conftest import untouched_by_this_machine  # noqa: F401
from support.sinks.fresh_python import fresh_environment
from support.sinks.servers import wait_until
from support.sinks.small_sweep import sweep, wandb_files
from testbeds.made_up_sweep import example_specs, make_result, write_sweep

RESULTS = [make_result(spec, with_accidents=False) for spec in example_specs()[:6]]


def append(folder, results):
    with (folder / "results.jsonl").open("a") as stream:
        stream.writelines(json.dumps(result.to_json()) + "\n" for result in results)


def test_what_was_there_before_is_left_out_and_what_is_written_before_the_end_is_not(tmp_path):
    folder = write_sweep(tmp_path / "s", RESULTS[:2])
    offset = (folder / "results.jsonl").stat().st_size
    append(folder, RESULTS[2:4])
    asked = []

    def is_over():
        asked.append(1)
        if len(asked) == 2:
            append(folder, RESULTS[4:])
        return len(asked) > 1

    assert [result.name for result in follow_results(folder, offset, is_over)] == [one.name for one in RESULTS[2:]]


def test_torn_and_foreign_lines_are_left_out_and_a_line_in_two_pieces_is_read(tmp_path):
    folder = write_sweep(tmp_path / "s", [])
    line = json.dumps(RESULTS[0].to_json()).encode()
    pieces = [b'{}\nnot json\n[1]\n{"format": 99}\n' + line[:50], line[50:] + b"\n", b""]

    def is_over():
        with (folder / "results.jsonl").open("ab") as stream:
            stream.write(pieces.pop(0) if pieces else b"")
        return not pieces

    assert [result.name for result in follow_results(folder, 0, is_over)] == [RESULTS[0].name]


def test_a_list_that_is_written_anew_is_read_from_its_beginning(tmp_path):
    folder = write_sweep(tmp_path / "s", RESULTS)
    offset = (folder / "results.jsonl").stat().st_size
    write_sweep(folder, RESULTS[:2])
    assert [result.name for result in follow_results(folder, offset, lambda: True)] == [one.name for one in RESULTS[:2]]


@pytest.mark.slow
def test_a_service_that_is_away_leaves_the_sweep_as_it_is_and_is_told_once_with_what_to_do(tmp_path):
    folder = tmp_path / "s"
    environment = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    done = sweep(folder, "--mlflow", "it's", **environment)
    assert done.returncode == 1  # as without it: one trial failed
    assert len((folder / "results.jsonl").read_text().splitlines()) == 3
    assert done.stderr.count("nothing was logged") == 1
    assert f"""flopwatch report {folder} --mlflow 'it'"'"'s'""" in done.stderr


@pytest.mark.slow
def test_a_follower_ends_with_a_runner_that_is_killed_and_has_logged_what_ended(tmp_path):
    folder = tmp_path / "s"
    command = [sys.executable, "-m", "flopwatch", "sweep", "--command", "sleep $(({batch_size} * 100 - 100))"]
    environment = fresh_environment(FLOPWATCH_SLOT_DIR=str(tmp_path / "slots"))
    runner = subprocess.Popen(
        [*command, "batch_size=1,2", "seq_len=8", "--in-order", "--wandb", "p", "-o", str(folder)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    try:
        wait_until(lambda: wandb_files(folder), "the first trial is logged")
        assert len(followers_of(folder)) == 1
        assert runner.poll() is None
    finally:
        os.kill(runner.pid, signal.SIGKILL)
        runner.wait()
    wait_until(lambda: not followers_of(folder), "the follower has ended")
    assert len(wandb_files(folder)) == 1


def followers_of(folder):
    """Process ids of followers of this folder, by their command line."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as stream:
                words = stream.read().split(b"\0")
        except (OSError, ValueError):
            continue
        if b"flopwatch.cli.trials.tracking" in words and str(folder).encode() in words:
            found.append(int(entry))
    return found


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_package_that_is_not_there_is_told_before_the_first_trial(flopwatch, tmp_path, monkeypatch, package):
    monkeypatch.setattr("flopwatch.cli.trials.tracking.find_spec", lambda name: None)
    folder = tmp_path / "s"
    status, _, err = flopwatch("sweep", "--command", "true", "-o", str(folder), f"--{package}", "x")
    assert status == 2
    assert f'pip install "flopwatch[{package}]"' in err
    assert not folder.exists()


def test_waiting_for_a_follower_that_hangs_has_an_end(tmp_path, monkeypatch, capsys):
    from flopwatch.cli.trials import tracking as sweep_tracking

    (tmp_path / "hanging_follower.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for name, value in (("FOLLOWER", "hanging_follower"), ("_PATIENCE_SECONDS", 0.2), ("_SILENT_SECONDS", 0.1)):
        monkeypatch.setattr(sweep_tracking, name, value)
    began = time.monotonic()
    with sweep_tracking.tracked(tmp_path, "x", None):
        pass
    assert time.monotonic() - began < 60
    assert "logging the trials was ended after" in capsys.readouterr().err


def test_a_follower_that_is_killed_is_told(tmp_path, monkeypatch, capsys):
    from flopwatch.cli.trials import tracking as sweep_tracking

    (tmp_path / "killed_follower.py").write_text(
        "import os\nprint('all is well', flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(sweep_tracking, "FOLLOWER", "killed_follower")
    with sweep_tracking.tracked(tmp_path, "x", None):
        pass
    assert "was ended by signal 9" in capsys.readouterr().err


def test_an_error_inside_the_block_is_the_one_that_is_raised(tmp_path, monkeypatch):
    from flopwatch.cli.trials import tracking as sweep_tracking

    monkeypatch.setattr(sweep_tracking, "FOLLOWER", "no_such_module_at_all")
    with pytest.raises(ZeroDivisionError), sweep_tracking.tracked(tmp_path, "x", None):
        raise ZeroDivisionError


def test_a_follower_that_cannot_be_started_is_told_and_the_trials_run(tmp_path, monkeypatch, capsys):
    from flopwatch.cli.trials import tracking as sweep_tracking

    monkeypatch.setattr(sweep_tracking.sys, "executable", str(tmp_path / "no-such-python"))
    ran = []
    with sweep_tracking.tracked(tmp_path, "x", None):
        ran.append("trial")
    assert ran
    assert "the process that logs trials could not be started" in capsys.readouterr().err
