"""What of a command's files enters a trial's identity: regular files, up to a size, and never what waits for ever."""

import os
import socket
import subprocess
import sys

import pytest

from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.host import environment


def sources(command):
    environment._source_digest.cache_clear()
    return environment.fingerprint(TrialSpec("command", "none", 1, 8, command=command)).get("sources", {})


@pytest.fixture
def fifo(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def dry_run(command, folder):
    """In a process of its own, which a fingerprint that reads for ever must not outlive."""
    words = [
        sys.executable,
        "-m",
        "flopwatch",
        "sweep",
        "--command",
        command,
        "--batch-size=1",
        "--seq-len=8",
        "--dry-run",
    ]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["/dev/zero", "FIFO", "/proc/kmsg"])
def test_a_dry_run_of_a_command_that_names_an_endless_file_returns(tmp_path, fifo, word):
    done = dry_run(f"head -c 10 {word.replace('FIFO', str(fifo))}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 trial, 1 to run" in done.stdout


def test_devices_fifos_sockets_and_the_kernels_files_are_no_sources(tmp_path, fifo, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is at most 107 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        os.symlink("/dev/zero", "link")
        os.symlink("loop", "loop")
        assert sources(f"cat {fifo} socket link loop /proc/self/stat .") == {}


def test_a_file_of_more_than_16_mib_is_known_by_its_size_and_time_and_not_read(tmp_path):
    data = tmp_path / "data.bin"
    with data.open("wb") as stream:
        stream.truncate(10**12)  # a terabyte of nothing: whoever reads it is not done today
    os.utime(data, (1000, 1000))
    first = sources(f"train {data}")
    assert list(first) == [str(data)]
    assert sources(f"train {data}") == first
    os.utime(data, (1000, 1001))
    assert sources(f"train {data}") != first
    with data.open("r+b") as stream:
        stream.truncate(10**12 + 1)
    os.utime(data, (1000, 1000))
    assert sources(f"train {data}") != first


def test_a_small_file_is_known_by_its_content_alone(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass")
    first = sources(f"python {script}")
    os.utime(script, (1000, 1000))
    assert sources(f"python {script}") == first
    script.write_text("None")
    assert sources(f"python {script}") != first
