"""Models far larger than this machine: on the meta device, within bounds of memory, never a weight."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from accuracy.model_size import BATCH_SIZE, LLAMAS, SEQ_LEN, VOCAB_SIZE

SCRIPT = Path(__file__).with_name("model_size.py")


@pytest.mark.slow
@pytest.mark.requirement("R14")
@pytest.mark.parametrize("name", [pytest.param("7b", marks=pytest.mark.campaign), "70b"])
def test_a_large_model_is_counted_without_its_weights(name: str) -> None:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    facts = json.loads(done.stdout.splitlines()[-1])

    assert (facts["model_flops"], facts["method"]) == (_closed_formula(**LLAMAS[name]), "trace")
    assert facts["peak_gib"] < 1.5


def _closed_formula(
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int | None = None,
) -> int:
    """Three times the forward pass of a Llama, written out: projections, MLP, attention, head."""
    tokens = BATCH_SIZE * SEQ_LEN
    narrow = hidden_size * (num_key_value_heads or num_attention_heads) // num_attention_heads
    weights = 2 * hidden_size * (hidden_size + narrow) + 3 * hidden_size * intermediate_size
    linear = tokens * (num_hidden_layers * weights + hidden_size * VOCAB_SIZE)
    attention = num_hidden_layers * 2 * tokens * SEQ_LEN * hidden_size
    return 3 * 2 * (linear + attention)
