"""In a framework, too, the numbers are those of all ranks."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import flopwatch
from flopwatch.automatic.session import WatchedProcess
from support.torchrun import outputs_of_ranks, torchrun
from testbeds.architectures import BY_NAME

SCRIPT = Path(__file__).parent / "scripts" / "trainer_on_ranks.py"
LIGHTNING = SCRIPT.with_name("lightning_on_ranks.py")
STEPS, BATCH_SIZE, SEQ_LEN, RANKS = 20, 2, 16, 2


@pytest.mark.slow
def test_the_trainer_on_two_ranks_has_the_tokens_and_flops_of_both(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    monkeypatch.setenv("FLOPWATCH_PEAK_TFLOPS", "1")
    logging_rank, other = torchrun(SCRIPT, str(tmp_path), ranks=RANKS)
    architecture = BY_NAME["llama"]
    one_batch = flopwatch.count_flops(architecture.build(), architecture.batch(BATCH_SIZE, SEQ_LEN)).model_flops

    assert other["values"] is None
    assert logging_rank["values"]["total/tokens"] == STEPS * RANKS * BATCH_SIZE * SEQ_LEN
    assert logging_rank["values"]["total/model_flops"] == STEPS * RANKS * one_batch
    assert logging_rank["values"]["ranks/reporting"] == RANKS
    # The values of a window arrive after its row, so a row has those of the newest window that is known.
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tokens = {event.step: event.value for event in events.Scalars("train/total/tokens")}
    known = [count / (RANKS * BATCH_SIZE * SEQ_LEN) for count in tokens.values()]
    assert known == sorted(known)
    assert all(0 < steps <= at and steps.is_integer() for at, steps in zip(tokens, known, strict=True))
    assert {15, 20} <= set(tokens) <= {5, 10, 15, 20}


@pytest.mark.slow
def test_flopwatch_run_measures_the_ranks_that_lightning_starts_itself(tmp_path):
    command = [sys.executable, "-m", "flopwatch", "run", "--output-dir", "log", str(LIGHTNING)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLOPWATCH_PEAK_TFLOPS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    results = [json.loads(line.partition("RESULT ")[2]) for line in ended.stdout.splitlines() if "RESULT " in line]
    assert sorted((result["rank"], result["steps"]) for result in results) == [(0, 12), (1, 12)]
    values = of_summary(tmp_path / "log")
    assert values["ranks/reporting"] == RANKS
    assert values["total/samples"] == 2 * 60
    assert "no monitor of rank" not in ended.stderr


@pytest.mark.slow
def test_lightning_trains_when_only_rank_0_has_the_callback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outputs = outputs_of_ranks(LIGHTNING, "one callback", "launched", ranks=RANKS, seconds=120)
    assert all('"steps": 12' in output for output in outputs)


def test_the_callback_of_flopwatch_run_can_be_sent_to_the_process_that_trains(tmp_path):
    callback = WatchedProcess(tmp_path, False, {"log_every": 2}).make_callback("lightning")
    assert pickle.loads(pickle.dumps(callback)).monitor is None


def of_summary(folder):
    records = map(json.loads, (folder / "training_log.jsonl").read_text().splitlines())
    return [record for record in records if record["type"] == "summary"][-1]["values"]
