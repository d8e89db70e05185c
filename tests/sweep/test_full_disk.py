"""A disk that is full for a while: trials wait for space, nothing finished is lost, nothing runs twice."""

import contextlib
import io
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from flopwatch.cli.streams import LastingStream
from flopwatch.files import write_json
from flopwatch.records.sweep_results import read_results
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.records.trial_files import log_file
from flopwatch.sweep.host.trial_log import TrialLog
from flopwatch.sweep.progress import Heartbeat, Progress, read_progress
from flopwatch.sweep.runner.observing import Follower
from flopwatch.sweep.supervisor.build_result import with_full_disk
from flopwatch.sweep.worker.exception_outcome import outcome_of
from testbeds.wait_until import wait_until

MOMENTS = 10 if os.environ.get("FLOPWATCH_LONG") else 3
STEPS = "for i in 1 2 3 4; do seq 400; sleep 0.4; done"
COMMAND = f"echo begin {{batch_size}} >> $LEDGER; {STEPS}; echo end {{batch_size}} >> $LEDGER"


@pytest.fixture
def disk(tmp_path):
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk):
    with contextlib.suppress(OSError), (disk / "filler").open("ab", buffering=0) as filler:
        while True:
            filler.write(bytes(512))
    assert os.statvfs(disk).f_bavail == 0


def free(disk):
    (disk / "filler").unlink(missing_ok=True)


def start(tmp_path, disk, *words, **environment):
    places = {"LEDGER": str(tmp_path / "ledger"), "FLOPWATCH_SLOT_DIR": str(tmp_path / "slots")}
    return subprocess.Popen(
        [sys.executable, "-m", "flopwatch", "sweep", *words, "-o", str(disk / "s")],
        env={**os.environ, **places, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(runner, seconds=300):
    try:
        return runner.communicate(timeout=seconds)[0]
    finally:
        if runner.poll() is None:
            runner.send_signal(signal.SIGTERM)
            runner.wait(60)


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_runs_twice_while_the_disk_is_full_at_random_moments(tmp_path, disk):
    dice = random.Random(os.environ.get("FLOPWATCH_SEED", "24"))
    trials = 2 * MOMENTS
    sizes = ",".join(map(str, range(1, trials + 1)))
    runner = start(tmp_path, disk, "--command", COMMAND, f"--batch-size={sizes}", "--seq-len=8")
    is_over = threading.Event()
    fulls = []

    def trouble():
        while not (tmp_path / "ledger").exists() and not is_over.is_set():
            time.sleep(0.05)
        for _ in range(MOMENTS):
            if is_over.wait(dice.uniform(0.0, 3.0)):
                return
            fill(disk)
            fulls.append(time.monotonic())
            is_over.wait(dice.uniform(0.5, 6.0))
            free(disk)

    troubler = threading.Thread(target=trouble)
    troubler.start()
    try:
        output = ended(runner)
    finally:
        is_over.set()
        troubler.join()
        free(disk)
    assert runner.returncode == 0, output
    lines = (tmp_path / "ledger").read_text().split("\n")[:-1]
    numbers = range(1, trials + 1)
    assert sorted(lines) == sorted(f"{what} {number}" for what in ("begin", "end") for number in numbers)
    results = read_results(disk / "s")
    assert {result.outcome for result in results.values()} == {"ok"}
    assert len(results) == trials
    assert not list((disk / "s").rglob(".*.json.*")), "no half of a file is left"
    assert len(fulls) > 1
    waited = sum("full_disk" in result.evidence for result in results.values())
    sys.stderr.write(f"the disk was full {len(fulls)} times; {trials} trials ran once, {waited} waited for space\n")


@pytest.mark.slow
def test_a_trainer_is_not_blamed_for_rows_that_found_no_space(tmp_path, disk):
    words = ["--trainer", "slow:Slow", "--model", "tiny", "--batch-size", "1", "--seq-len", "8", "--steps", "60"]
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "from flopwatch.sweep.trainers.builtin import StandardTrainer\n"
        "class Slow(StandardTrainer):\n"
        "    def update(self):\n"
        "        super().update()\n"
        "        open(os.environ['LEDGER'], 'a').write('step\\n')\n"
        "        print('x' * 1000)\n"
        "        time.sleep(0.05)\n"
    )
    words += ["trace=false", "no_progress=20"]
    runner = start(tmp_path, disk, *words, PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    ledger = tmp_path / "ledger"
    try:
        deadline = time.monotonic() + 120
        while not ledger.exists() or len(ledger.read_text().split()) < 3:
            assert runner.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        fill(disk)
        time.sleep(25.0)  # longer than the trial may go without progress
        phase = next((disk / "s/trials").glob("*/heartbeat.json"))
        assert "No space left on device" in read_progress(phase.parent).text
        done_in_vain = len(ledger.read_text().split())
    finally:
        free(disk)
    output = ended(runner)
    assert runner.returncode == 0, output
    (result,) = read_results(disk / "s").values()
    assert (result.outcome, result.earlier_attempts) == ("ok", ())
    assert done_in_vain < 60, "it waited in the middle of its steps"
    assert result.measured.steps.count == 60


@pytest.mark.slow
def test_a_supervisor_that_waits_for_space_is_seen_in_the_output_and_by_a_viewer(tmp_path, disk):
    command = f"touch {tmp_path}/began; while ! test -e {tmp_path}/full; do sleep 0.05; done; seq 9000"
    runner = start(tmp_path, disk, "--command", command, "--batch-size=1", "--seq-len=8")
    try:
        wait_until((tmp_path / "began").exists, "the trial has begun")
        follower = Follower(disk / "s")
        wait_until(lambda: follower.running(follower.runner()), "a viewer sees the trial")
        fill(disk)
        (tmp_path / "full").touch()
        told = runner.stdout.readline() if select.select([runner.stdout], [], [], 20.0)[0] else ""
        wait_until(lambda: "no space is left" in follower.runner().engine_state, "a viewer sees that it waits", 20.0)
    finally:
        free(disk)
    output = ended(runner)
    assert runner.returncode == 0, output
    assert told == f"waiting: no space is left on the disk of {disk}/s; trials go on when there is\n"
    assert "no space" not in output


def test_output_to_a_file_on_a_full_disk_goes_on_when_there_is_space(disk):
    said = io.StringIO()
    with (disk / "runner.log").open("w") as file:
        fill(disk)
        stream = LastingStream(file, said)
        for line in ("while it is full\n", "after it\n"):
            stream.write(line)
            stream.flush()
            assert ((disk / "runner.log").stat().st_size == 0) == line.startswith("while")
            free(disk)
    assert (disk / "runner.log").read_text() == "while it is full\nafter it\n"
    assert said.getvalue() == ""


@pytest.mark.slow
def test_a_sweep_that_starts_on_a_full_disk_runs_nothing_and_says_so(tmp_path, disk):
    fill(disk)
    runner = start(tmp_path, disk, "--command", "true", "--batch-size=1", "--seq-len=8")
    output = ended(runner)
    assert runner.returncode == 2, output
    assert "No space left on device; free some space, or choose another folder" in output


def test_a_failure_on_a_full_disk_is_lost_and_names_it():
    failed = TrialResult("a", "key", TrialSpec("command", "tiny", 1, 8), "error", "left with exit code 1")
    blamed = with_full_disk(failed, "No space left on device")
    assert (blamed.outcome, blamed.evidence["full_disk"]) == ("lost", "No space left on device")
    assert "No space left on device" in blamed.reason
    assert "left with exit code 1" in blamed.reason
    assert with_full_disk(failed, "") == failed
    assert outcome_of(OSError(28, "No space left on device", "checkpoint.pt")) == "lost"


def test_a_worker_says_in_its_heartbeat_that_it_waits(tmp_path):
    heartbeat, tries = Heartbeat(tmp_path), []
    heartbeat.beat("measure", 3)

    def write():
        tries.append(read_progress(tmp_path))
        if len(tries) < 3:
            raise OSError(28, "No space left on device")

    heartbeat.written(write)
    assert tries[-1] == Progress("measure", 3, "No space left on device")
    assert read_progress(tmp_path) == Progress("measure", 3)
    with pytest.raises(PermissionError):
        heartbeat.written(lambda: (_ for _ in ()).throw(PermissionError(13, "no")))


def test_a_file_that_found_no_space_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "result.json", {})
    assert list(tmp_path.iterdir()) == []


def test_a_long_log_keeps_its_beginning_and_its_end_and_says_how_much_is_left_out(tmp_path):
    kept, file = 1000, tmp_path / "one.log"
    log = TrialLog(file, kept)
    log.start()
    lines = [f"line {number}\n".encode() for number in range(20_000)]
    largest = 0
    for line in lines:
        os.write(log.handle, line)
        largest = max(largest, file.stat().st_size)
    log.close(pytest.fail)
    whole, content = b"".join(lines), file.read_bytes()
    before, _, after = content.partition(b"\n[flopwatch: ")
    said, _, after = after.partition(b" bytes are left out here: the log keeps its first and last ")
    after = after.partition(b"]\n")[2]
    assert (before, after) == (whole[:kept], whole[-kept:])
    assert int(said.replace(b",", b"")) == len(whole) - 2 * kept
    assert largest < 3 * kept + 70_000
    assert log.received_bytes == len(whole)


@pytest.mark.slow
def test_a_trial_that_prints_without_end_leaves_a_short_log(tmp_path, monkeypatch):
    runner = start(
        tmp_path,
        tmp_path,
        "--command",
        "echo first; yes | head -c 60000000; echo last",
        "--batch-size=1",
        "--seq-len=8",
    )
    output = ended(runner)
    assert runner.returncode == 0, output
    content = log_file(tmp_path / "s", "Command_bs1_seq8").read_bytes()
    assert len(content) < 9 << 20
    assert content.startswith(b"first\n")
    assert content.endswith(b"last\n")
