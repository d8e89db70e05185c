"""In a framework, too, the numbers are those of all ranks."""

from pathlib import Path

import pytest

import flopwatch
from support.torchrun import torchrun
from testbeds.architectures import BY_NAME

SCRIPT = Path(__file__).parent / "scripts" / "trainer_on_ranks.py"
STEPS, BATCH_SIZE, SEQ_LEN, RANKS = 20, 2, 16, 2


@pytest.mark.slow
def test_the_trainer_on_two_ranks_has_the_tokens_and_flops_of_both(tmp_path):
    logging_rank, other = torchrun(SCRIPT, str(tmp_path), ranks=RANKS)
    architecture = BY_NAME["llama"]
    one_batch = flopwatch.count_flops(architecture.build(), architecture.batch(BATCH_SIZE, SEQ_LEN)).model_flops

    assert other["values"] is None
    assert logging_rank["values"]["total/tokens"] == STEPS * RANKS * BATCH_SIZE * SEQ_LEN
    assert logging_rank["values"]["total/model_flops"] == STEPS * RANKS * one_batch
    assert logging_rank["values"]["ranks/reporting"] == RANKS
