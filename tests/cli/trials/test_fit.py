"""`flopwatch fit` as typed, with a command as its trainer: real processes under a real limit."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from flopwatch.cli.trials.trial_run import probe_line, sentences
from flopwatch.sweep.fit import Found, Probe
from support.sweeping import TESTS


@pytest.fixture
def fit(tmp_path, monkeypatch, flopwatch):
    """Runs `flopwatch fit` on a command that holds 8 MiB a sample."""
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))
    monkeypatch.chdir(tmp_path)
    shutil.copy(TESTS / "holding.py", tmp_path)

    def run(*arguments):
        return flopwatch("fit", "device=cpu", "--command", "python3 holding.py {batch_size}", *arguments)

    return run


@pytest.mark.slow
def test_a_fit_says_the_largest_and_the_fastest_batch(fit):
    status, printed, errors = fit("--memory", "200MiB")
    assert (status, errors) == (0, "")
    lines = printed.splitlines()
    assert lines[0].startswith("batch 1: ok, ")
    assert any("oom_host" in line for line in lines)
    said = next(line for line in lines if line.startswith("Largest batch that fits: "))
    largest, too_large = map(int, re.fullmatch(r".*: (\d+) \((\d+) does not; 200 MiB limit\)\.", said).groups())
    assert 15 <= largest <= 25, "200 MiB, 8 MiB for each sample"
    assert largest >= 0.95 * (too_large - 1)
    assert any(line.startswith("Fastest: ") and "samples/s" in line for line in lines)
    assert lines[-1] == "flopwatch report flopwatch-fit"


@pytest.mark.slow
def test_a_second_call_answers_from_the_folder_also_as_json(fit, tmp_path):
    _, printed, _ = fit("--memory", "200MiB")
    began = {file: file.stat().st_mtime_ns for file in tmp_path.glob("flopwatch-fit/trials/*/started.json")}
    status, content, _ = fit("--memory", "200MiB", "--json")
    assert status == 0
    found = json.loads(content)
    assert f"Largest batch that fits: {found['largest']} " in printed
    assert found["is_largest_known"] is True
    assert len(found["probes"]) == len(began)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("flopwatch-fit/trials/*/started.json")} == began


@pytest.mark.slow
def test_the_report_reads_the_folder_of_a_fit(fit, flopwatch):
    fit("--memory", "200MiB", "--max-batch", "2")
    status, printed, _ = flopwatch("report", "flopwatch-fit")
    assert status == 0
    assert "Command" in printed


@pytest.mark.slow
def test_without_a_limit_the_available_memory_is_taken_and_said(fit):
    status, printed, _ = fit("--max-batch", "2")
    assert status == 0
    assert "available on this host, less a margin" in printed.splitlines()[0]
    assert "No limit found up to 2: a batch of 2 fits." in printed


def test_a_limit_below_a_batch_of_one_says_that_nothing_fits(fit):
    status, printed, _ = fit("--memory", "8MiB")
    assert status == 1
    assert "No batch fits: even a batch of 1 runs out of memory: 8.00 MiB limit." in printed


def test_a_failing_trial_is_told_with_its_reason(fit, tmp_path):
    (tmp_path / "holding.py").write_text("raise SystemExit(3)")
    status, printed, _ = fit("--memory", "200MiB")
    assert status == 1
    assert "The search stopped at batch 1: error: " in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--max-batch", "0"), "--max-batch must be 1 or more, got 0"),
        (("seed=1,2", "--memory", "1GiB"), "`flopwatch fit` tries one configuration, but these settings make 2"),
        (("--memory", "much"), "is not an amount of memory"),
    ],
)
def test_input_that_makes_no_sense_is_explained(fit, arguments, said):
    status, _, errors = fit(*arguments)
    assert status != 0
    assert said in errors


def test_a_smaller_limit_in_the_same_folder_is_refused(fit):
    fit("--memory", "300MiB", "--max-batch", "1")
    status, _, errors = fit("--memory", "200MiB", "--max-batch", "1")
    assert status != 0
    assert "--output" in errors


@pytest.mark.slow
def test_ctrl_c_ends_the_trial_and_keeps_what_was_found(tmp_path):
    (tmp_path / "slow.py").write_text("import sys, time; time.sleep(600 if int(sys.argv[1]) > 1 else 0)")
    words = ("fit", "device=cpu", "--memory", "200MiB", "--command", "python3 slow.py {batch_size}")
    environment = {**os.environ, "FLOPWATCH_SLOT_DIR": str(tmp_path / "slots")}
    process = subprocess.Popen(
        [sys.executable, "-c", f"from flopwatch.cli import main; main({words!r})"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("flopwatch-fit/trials/Command_bs2_*/started.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "The search stopped at batch 2: cancelled" in printed
    assert "Largest batch seen to fit: 1. The search is not finished." in printed


def found_with(probes, **known):
    facts = {"largest": None, "too_large": None, "is_largest_known": True, "fastest": None, "as_fast": None}
    return Found(**{**facts, **known}, probes=tuple(probes))


def test_a_batch_that_fits_after_retries_is_told_to_fit_barely():
    bare = Probe(93, True, "ok", "", 2 << 30, 2 << 30, samples_per_s=410.0, is_bare=True)
    found = found_with([bare, Probe(94, False, "oom_device")], largest=93, too_large=94, fastest=93)
    assert probe_line(bare) == "batch 93: ok, barely fits, 2.00 GiB, 410 samples/s"
    assert sentences(found, 4096) == [
        "Largest batch that fits, barely: 93 (94 does not; 2.00 GiB of the device).",
        "Fastest: 93, 410 samples/s.",
    ]


def test_the_smaller_of_two_equally_fast_batches_is_named():
    probes = [Probe(size, True, "ok", "", 1, 2 << 30, samples_per_s=410.0) for size in (32, 64)]
    found = found_with(probes, largest=64, fastest=32, as_fast=64)
    assert sentences(found, 64) == [
        "No limit found up to 64: a batch of 64 fits.",
        "Fastest: 32, 410 samples/s (64 is not measurably faster).",
    ]
