"""What the count costs that a first step pays: CPU seconds of a law, and of one trace with replay and in full.

Models are on the meta device, so nothing but counting is measured. Run:
`OMP_NUM_THREADS=1 python benchmarks/startup/start_cost.py [--repeats 3] [model ...]`.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any, cast

import torch
import transformers
from torch import nn

from flopwatch.flops.fit import fit_flops_law
from flopwatch.flops.methods import count_by_trace
from flopwatch.flops.tracing.replay import ReplayMemory
from flopwatch.records.flops import FlopCount

SEQ_LEN = 2048
VOCABULARY = 32_000


def llama(**sizes: Any) -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes)
    with torch.device("meta"):
        return cast("nn.Module", transformers.LlamaForCausalLM(config).to(torch.bfloat16))


def llama_7b() -> nn.Module:
    """Touvron et al., LLaMA, arXiv 2302.13971, table 2."""
    return llama(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)


def llama_70b() -> nn.Module:
    """Touvron et al., Llama 2, arXiv 2307.09288: 80 layers, 8 key-value heads."""
    return llama(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )


def mixture_of_128() -> nn.Module:
    """Qwen3-30B-A3B (Qwen3 technical report, arXiv 2505.09388): 48 layers, 8 of 128 experts."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    )
    with torch.device("meta"):
        return cast("nn.Module", transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16))


def llama_7b_recomputed() -> nn.Module:
    model: Any = llama_7b()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return cast("nn.Module", model)


def llama_7b_adapted() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=16, target_modules="all-linear")
    return cast("nn.Module", peft.get_peft_model(llama_7b(), config))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama-7B": llama_7b,
    "Llama-70B": llama_70b,
    "128 experts": mixture_of_128,
    "Llama-7B, checkpointing": llama_7b_recomputed,
    "Llama-7B, LoRA": llama_7b_adapted,
}


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def trace(model: nn.Module, batch: Any, **options: Any) -> FlopCount:
    return count_by_trace(model, batch, attention="full", loss_fn=None, training=True, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    ids = torch.randint(0, VOCABULARY, (1, SEQ_LEN))
    batch = {"input_ids": ids, "labels": ids.clone()}
    print("| model | layers | law, CPU s (min / median / max) | first trace | later trace | full trace | equal |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in options.models:
        print(row(name, batch, options.repeats), flush=True)


def row(name: str, batch: Any, repeats: int) -> str:
    """The law is fitted on a new model each time, so nothing is remembered of the layers."""
    laws: list[float] = []
    for _ in range(repeats):
        model = MODELS[name]()
        seconds, law = cpu_seconds(lambda model=model: fit_flops_law(model, batch))  # type: ignore[misc]
        laws.append(seconds)
    memory = ReplayMemory()
    first_seconds, count = cpu_seconds(lambda: trace(model, batch, memory=memory))
    later_seconds, _ = cpu_seconds(lambda: trace(model, batch, memory=memory))
    full_seconds, in_full = cpu_seconds(lambda: trace(model, batch, replay=False))
    predicted = law.model_flops(batch_size=1, seq_len=SEQ_LEN)
    equal = count == in_full and predicted == in_full.model_flops and law.exact
    layers = model.config.num_hidden_layers  # type: ignore[union-attr]
    return (
        f"| {name} | {layers} | {min(laws):.2f} / {median(laws):.2f} / {max(laws):.2f} "
        f"| {first_seconds:.2f} | {later_seconds:.2f} | {full_seconds:.2f} | {'yes' if equal else 'NO'} |"
    )


if __name__ == "__main__":
    main()
