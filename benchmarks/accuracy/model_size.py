"""How long and how much memory counting a large model takes, without its weights.

python benchmarks/accuracy/model_size.py 7b 70b
"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers

import flopwatch

LLAMAS = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
BATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 2, 4096, 32000


def measure(name: str) -> dict[str, object]:
    """Build the model on the meta device and count one training step."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB_SIZE, **LLAMAS[name]))
    ids = torch.zeros(BATCH_SIZE, SEQ_LEN, dtype=torch.long)
    start = time.perf_counter()
    count = flopwatch.count_flops(model, {"input_ids": ids, "labels": ids})
    seconds = time.perf_counter() - start
    # Not ru_maxrss: Linux carries that of the parent over fork and exec, so a large parent would be measured.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_gib = int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) / 2**20
    facts = {"model": name, "model_flops": count.model_flops, "method": count.method}
    return {**facts, "seconds": seconds, "peak_gib": peak_gib}


if __name__ == "__main__":
    for size in sys.argv[1:] or LLAMAS:
        print(json.dumps(measure(size)))
