"""A sweep outlives whatever its output goes to."""

import os
import pty
import subprocess
import sys

import pytest

from flopwatch.records.sweep_results import read_results

pytestmark = pytest.mark.slow  # command lines in processes of their own

HOSTILE = "no shards in [/data/shards] \\033[31m \\355\\240\\200 [bold] {x} %s"
SWEEP = ["sweep", "--command", f"printf '{HOSTILE}\\n'; exit {{batch_size}}", "--batch-size=1,2", "--seq-len=8", "-o"]


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))


def start(*words, **streams):
    return subprocess.Popen([sys.executable, "-m", "flopwatch", *words], **streams)


def exit_codes(folder):
    return sorted(result.evidence["exit_code"] for result in read_results(folder).values())


def test_a_closed_pipe(tmp_path):
    process = start(*SWEEP, "s", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    with process.stderr as stream:
        errors = stream.read().decode()
    assert process.wait() == 1
    assert exit_codes(tmp_path / "s") == [1, 2]
    assert errors == ""


def test_a_full_disk(tmp_path):
    with open("/dev/full", "w") as full:
        process = start(*SWEEP, "s", stdout=full, stderr=subprocess.PIPE)
        errors = process.communicate()[1].decode()
    assert process.returncode == 1
    assert exit_codes(tmp_path / "s") == [1, 2]
    assert errors.count("No space left on device") == 1
    assert "Traceback" not in errors


def test_a_terminal_that_goes_away(tmp_path):
    child, main = pty.fork()  # as a shell in a window: the terminal is its own, and its end sends SIGHUP
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "flopwatch", *SWEEP, "s"])
    os.read(main, 10)  # it has begun to draw
    os.close(main)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert exit_codes(tmp_path / "s") == [1, 2]


def test_a_folder_named_like_markup(tmp_path):
    process = start(*SWEEP, "s [/w] [red]", "--dry-run", stdout=subprocess.PIPE)
    assert "to run in s [/w] [red]." in process.communicate()[0].decode()
    assert process.returncode == 0


def test_a_report_that_cannot_be_written_is_no_success(tmp_path):
    start(*SWEEP, "s", stdout=subprocess.DEVNULL).wait()
    with open("/dev/full", "w") as full:
        process = start("report", "s", stdout=full, stderr=subprocess.PIPE)
        errors = process.communicate()[1].decode()
    assert process.returncode == 1
    assert errors == "cannot write the output: No space left on device\n"
