"""`flopwatch sweep` and `flopwatch trial` as a user calls them, in their own processes, with commands as trials."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from flopwatch.records.sweep_results import read_results
from support.sweeping import left_behind
from support.warm_sweep import WITHOUT_TORCH, flopwatch_warm

pytestmark = pytest.mark.slow  # a second or two each, for a command line in a process of its own

FLOPWATCH = [sys.executable, "-m", "flopwatch"]


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    monkeypatch.setenv("COLUMNS", "100")


def flopwatch(*words, code=0):
    done = flopwatch_warm(*words, modules=WITHOUT_TORCH)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def outcomes(folder):
    return {name: result.outcome for name, result in read_results(folder).items()}


def test_a_sweep_of_commands_and_its_second_run(tmp_path):
    text = flopwatch(
        "sweep", "--command", "test {batch_size} -lt 4", "--batch-size=1,2,4", "--seq-len=8", "-o", "s", code=1
    )
    assert outcomes(tmp_path / "s") == {"Command_bs1_seq8": "ok", "Command_bs2_seq8": "ok", "Command_bs4_seq8": "error"}
    assert "Command_bs4_seq8 error: left with exit code 1" in text
    assert "flopwatch report s" in text
    again = flopwatch(
        "sweep", "--command", "test {batch_size} -lt 4", "--batch-size=1,2,4", "--seq-len=8", "-o", "s", code=1
    )
    assert "1 trial failed in an earlier run; run them again with: --only failed" in again


@pytest.mark.requirement("R25")
def test_logs_and_runs_lie_where_the_documents_say(tmp_path):
    flopwatch("sweep", "--command", "echo hello", "--batch-size=4", "--seq-len=512", "-o", "s")
    assert (tmp_path / "s" / "logs" / "Command_bs4_seq512.log").read_text() == "hello\n"


@pytest.mark.requirement("R27")
def test_a_matrix_from_a_file(tmp_path):
    trainers = "trainer: [{label: quick, command: 'true'}, {label: other, command: 'exit 3'}]"
    (tmp_path / "sweep.yaml").write_text(f"{trainers}\nbatch_size: [1, 2]\nseq_len: 8\n")
    flopwatch("sweep", "sweep.yaml", "-o", "s", code=1)
    assert outcomes(tmp_path / "s") == {
        "quick_bs1_seq8": "ok", "quick_bs2_seq8": "ok", "other_bs1_seq8": "error", "other_bs2_seq8": "error",
    }  # fmt: skip


def test_a_dry_run_writes_nothing(tmp_path):
    text = flopwatch("sweep", "--trainer", "standard,ghost", "--batch-size", "4,8", "--dry-run", "-o", "s")
    assert "DPGhostClippingTrainer_bs8_seq1024" in text
    assert "8 trials, 8 to run" in text
    assert not (tmp_path / "s").exists()


def test_a_dry_run_predicts_from_what_ran(tmp_path):
    words = ["sweep", "--command", "sleep 0.2", "--seq-len=8", "-o", "s"]
    flopwatch(*words, "--batch-size=1,2")
    text = flopwatch(*words, "--batch-size=1,2,3,4", "--dry-run")
    assert "4 trials, 2 to run" in text
    assert "estimated from 2 trials in this folder" in " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--trainer", "gost"], "did you mean 'ghost'"),
        (
            ["--trainer", "standard", "--model", "smal"],
            "must be a preset (tiny, small, medium, 1b, resnet20-gn, resnet18-gn)",
        ),
        (["--trainer", "ghost", "--model", "none.json", "--dry-run"], "config file none.json does not exist"),
        (["--batch-size=0"], "greater than or equal to 1, got '0'"),
        (["one.yaml", "two.yaml"], "name only one YAML file"),
        (["none.yaml"], "cannot read the matrix none.yaml"),
        (["--engine", "cloud"], "there is no engine 'cloud'"),
        (["--engine", "local", "--engine-option", "speed=9"], "does not take 'speed'; there are "),
        (["--only", "bad"], "--only must be one of failed, oom, missing"),
        (["--limit", "9:2"], "is not a slice of the trials"),
        (["--jobs", "4000"], "each trial needs a core"),
        (["--exclude", "speed>1"], "cannot name 'speed'"),
        (["--memory", "much"], "not an amount of memory"),
        (["-o", "/proc/nowhere/s"], "cannot write to"),
    ],
)
def test_wrong_input_ends_with_what_to_do_and_writes_nothing(tmp_path, words, told):
    text = flopwatch("sweep", "--command", "true", *words, code=2)
    assert told in text
    assert "Traceback" not in text
    assert not list((tmp_path / "flopwatch-sweep").glob("trials/*"))


def test_a_name_that_would_leave_the_folder_is_refused(tmp_path):
    (tmp_path / "sweep.yaml").write_text("trainer: [{label: ../../evil, command: 'true'}]\n")
    assert "cannot be part of a file name" in flopwatch("sweep", "sweep.yaml", code=2)
    assert not list(tmp_path.parent.glob("evil*"))


@pytest.mark.parametrize("words", [["sweep", "--dry-run"], ["trial"], ["fit"]], ids=lambda words: words[0])
def test_an_empty_command_is_refused_and_no_other_trainer_runs_in_its_place(tmp_path, words):
    assert "the command of a trainer is empty" in flopwatch(*words, "--command", "", "-o", "s", code=2)


def test_a_slice_without_trials_is_refused(tmp_path):
    words = ["sweep", "--command", "true", "--batch-size=1,2", "--seq-len=8", "-o", "s", "--limit", "5:9"]
    assert "--limit '5:9' selects none of the 2 trials" in flopwatch(*words, code=2)


def test_a_changed_spec_is_refused(tmp_path):
    words = ["sweep", "--command", "true", "--batch-size=1", "--seq-len=8", "-o", "s"]
    flopwatch(*words)
    assert "is already in s with another configuration" in flopwatch(*words, "--steps=99", code=2)
    assert outcomes(tmp_path / "s") == {"Command_bs1_seq8": "ok"}


def test_a_trial_that_was_planned_and_never_begun_may_be_planned_with_other_settings(tmp_path):
    words = ["sweep", "--command", "true", "--seq-len=8", "-o", "s"]
    flopwatch(*words, "--batch-size=1,2", "--limit", "1")
    assert outcomes(tmp_path / "s") == {"Command_bs1_seq8": "ok"}
    flopwatch(*words, "--batch-size=2", "--steps=99")
    assert outcomes(tmp_path / "s") == {"Command_bs1_seq8": "ok", "Command_bs2_seq8": "ok"}
    assert "steps was 10, is 99" in flopwatch(*words, "--batch-size=1", "--steps=99", code=2)


def start_sweep(stdout, seconds):
    words = [
        "sweep",
        "--command",
        f"sleep {seconds}; echo done",
        "--batch-size=1,2,3",
        "--seq-len=8",
        "-o",
        "s",
    ]
    return subprocess.Popen([*FLOPWATCH, *words], stdout=stdout, stderr=subprocess.STDOUT)


def until(holds, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def test_one_interrupt_finishes_what_runs(tmp_path):
    process = start_sweep(subprocess.PIPE, 3)
    until(lambda: left_behind(tmp_path / "s"))
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 130
    assert outcomes(tmp_path / "s") == {"Command_bs1_seq8": "ok"}
    assert "2 trials left; run the same command again to resume." in text


def test_two_interrupts_end_it(tmp_path):
    process = start_sweep(subprocess.PIPE, 300)
    until(lambda: left_behind(tmp_path / "s"))
    process.send_signal(signal.SIGINT)
    # Two signals that a process has not looked at yet are one.
    line = process.stdout.readline()
    while b"Ctrl-C again ends them" not in line:
        assert line, "it ended"
        line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=120)[0].decode()
    assert "3 trials left" in text
    assert outcomes(tmp_path / "s") == {"Command_bs1_seq8": "cancelled"}
    assert left_behind(tmp_path / "s") == []


def test_a_terminal_sees_a_live_table(tmp_path):
    main, other = pty.openpty()
    process = start_sweep(other, 0.7)
    os.close(other)
    seen = b""
    while True:
        try:
            seen += os.read(main, 65536)
        except OSError:
            break
    process.wait(timeout=120)
    os.close(main)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    for words in ("Command_bs1_seq8  run", "0 of 3", "[3/3]", "ok 2"):
        assert words in text, text[-2000:]


def test_a_trial_of_a_command(tmp_path):
    text = flopwatch("trial", "--command", "echo working; exit 5", "-o", "s", code=1)
    assert "error (left with exit code 5)" in text
    assert "working" in text
    spec = tmp_path / "s" / "trials" / "Command_bs4_seq512" / "spec.json"
    assert f"run again: flopwatch trial --spec {spec}" in text
    content = json.loads(flopwatch("trial", "--spec", str(spec), "--json", code=1))
    assert content["evidence"]["exit_code"] == 5
    assert (tmp_path / "s" / "earlier" / "Command_bs4_seq512.1" / "log.txt").read_text() == "working\n"


def test_a_trial_of_a_command_that_is_ok_says_so_with_what_the_command_reported(tmp_path):
    text = flopwatch("trial", "--command", "echo '{\"samples_per_s\": 7.5}' > {trial_dir}/metrics.json", "-o", "s")
    assert "Command_bs4_seq512 ok" in text
    assert re.search(r"samples/s +7.5", text)


def test_a_spec_that_is_none_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    assert "is not the spec.json of a trial" in flopwatch("trial", "--spec", "x.json", code=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_trial_that_is_asked_to_end_leaves_nothing_behind(tmp_path, number):
    words = ["trial", "--command", "sleep 300 & wait", "-o", "t"]
    process = subprocess.Popen([*FLOPWATCH, *words], stdout=subprocess.PIPE)
    until(lambda: left_behind(tmp_path / "t"))
    process.send_signal(number)
    process.communicate(timeout=30)
    assert left_behind(tmp_path / "t") == []
    assert list(outcomes(tmp_path / "t").values()) == ["cancelled"]


@pytest.mark.requirement("R23", "R24")
def test_a_real_trial_is_measured(tmp_path):
    words = [
        "--trainer",
        "StandardTrainer",
        "--batch-size",
        "2",
        "--seq-len",
        "32",
        "--model-size",
        "tiny",
        "--steps",
        "3",
    ]
    content = json.loads(subprocess.check_output([*FLOPWATCH, "trial", *words, "-o", "s", "--json"], text=True))
    measured = content["measured"]
    from flopwatch import count_flops
    from flopwatch.models.load import dummy_batch, load_model

    model = load_model("tiny", device="cpu")
    assert measured["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert measured["cost"]["model_flops"] == count_flops(model, dummy_batch(model, 2, 32)).model_flops
    peak = measured["cost"]["peak"]["flops_per_s"]
    expected = measured["cost"]["model_flops"] / (measured["steps"]["median"] * peak)
    assert measured["cost"]["mfu"] == pytest.approx(expected)
    assert measured["tokens_per_s"] == pytest.approx(2 * 32 / measured["steps"]["median"])
    assert set(measured["memory"]["by_phase"]) == {"build", "forward", "backward", "optimizer"}
    assert measured["memory"]["host_bytes"] * 1.05 >= max(measured["memory"]["by_phase"].values())
    assert (tmp_path / "s" / measured["trace"]).stat().st_size > 1000
    assert list((tmp_path / "s" / "runs" / "StandardTrainer_bs2_seq32").glob("events.out.tfevents*"))
    assert {"torch", "cpu", "threads", "host"} <= set(content["environment"])


def test_a_sweep_that_waits_for_a_slot_says_for_whose(tmp_path):
    from contextlib import closing

    from flopwatch.sweep.engines.local import SlotPool

    with closing(SlotPool((), 1, tmp_path / "other")) as pool:
        assert pool.take(0) is not None
        process = start_sweep(subprocess.PIPE, 0)
        line = process.stdout.readline().decode()
        holder = re.escape(f"(pid {os.getpid()}, sweep in {tmp_path / 'other'})")
        assert re.fullmatch(rf"waiting for core \d+ {holder}\n", line)
    assert process.wait(timeout=30) == 0
    process.stdout.close()


def test_square_brackets_in_a_reason_are_shown(capsys):
    """rich would take them for markup."""
    from rich.console import Console

    from flopwatch.cli.trials.trial_run import print_result
    from flopwatch.records.trial import TrialResult, TrialSpec

    reason = 'pip install "flopwatch[dp]"'
    print_result(TrialResult("one", "key", TrialSpec("ghost", "tiny", 1, 8), "invalid", reason), Console(width=100))
    assert f"invalid ({reason})" in capsys.readouterr().out


def test_finished_trials_that_run_again_because_a_file_has_changed_are_announced(tmp_path):
    (tmp_path / "job.sh").write_text("true\n")
    words = ["sweep", "--command", "sh job.sh {batch_size}", "--batch-size=1,2", "--seq-len=8", "-o", "s"]
    assert "run again" not in flopwatch(*words)
    assert "run again" not in flopwatch(*words, "--dry-run")
    (tmp_path / "job.sh").write_text("true; true\n")
    for more in (["--dry-run"], []):
        assert "warning: 2 finished trials will run again: job.sh has changed since" in flopwatch(*words, *more)
