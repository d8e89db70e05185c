"""In a framework, too, the numbers are those of all ranks."""

import pickle
from pathlib import Path

import pytest

import flopwatch
from flopwatch.automatic.session import WatchedProcess
from support.torchrun import torchrun
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


def test_the_callback_of_flopwatch_run_can_be_sent_to_the_process_that_trains(tmp_path):
    callback = WatchedProcess(tmp_path, False, {"log_every": 2}).make_callback("lightning")
    assert pickle.loads(pickle.dumps(callback)).monitor is None
