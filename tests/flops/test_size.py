"""Models far larger than this machine: on the meta device, within bounds of memory, never a weight."""

import json
import subprocess
import sys

import pytest

LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
SCRIPT = """
import json, resource, sys, torch, transformers, flopwatch
config = transformers.LlamaConfig(vocab_size=32000, **json.loads(sys.argv[1]))
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config)
ids = torch.zeros(2, 4096, dtype=torch.long)
count = flopwatch.count_flops(model, {"input_ids": ids, "labels": ids})
peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps([count.model_flops, count.method, peak_gib]))
"""


@pytest.mark.slow
@pytest.mark.requirement("R14")
@pytest.mark.parametrize(("sizes", "gib"), [(LLAMA_7B, 1.5), (LLAMA_70B, 1.5)])
def test_a_large_model_is_counted_without_its_weights(sizes: dict[str, int], gib: float) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(sizes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    flops, method, peak_gib = json.loads(done.stdout.splitlines()[-1])

    assert (flops, method) == (_closed_formula(**sizes), "trace")
    assert peak_gib < gib


def _closed_formula(
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int | None = None,
) -> int:
    """Three times the forward pass of a Llama, written out: projections, MLP, attention, head."""
    samples, length = 2, 4096
    narrow = hidden_size * (num_key_value_heads or num_attention_heads) // num_attention_heads
    weights = 2 * hidden_size * (hidden_size + narrow) + 3 * hidden_size * intermediate_size
    head = hidden_size * 32000
    linear = samples * length * (num_hidden_layers * weights + head)
    attention = num_hidden_layers * samples * 2 * length * length * hidden_size
    return 3 * 2 * (linear + attention)
