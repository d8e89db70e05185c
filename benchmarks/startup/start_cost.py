"""What counting costs: in the first steps of a training, and when a count is asked for.

The first 50 steps of a small Llama with 24 layers are trained under the monitor, each time in a new process. A step
that is not counted costs the median of all steps; counting is what the 50 steps cost beyond 50 such steps, in CPU
seconds. With `--old`, a checkout of an earlier flopwatch takes turns with this one, and the ratio of both is printed:
`OMP_NUM_THREADS=1 python benchmarks/startup/start_cost.py [--repeats 3] [--old CHECKOUT]`.

`--laws` prints what `fit_flops_law` and one trace cost. These models are on the meta device,
so nothing but counting is measured: `python benchmarks/startup/start_cost.py --laws [model ...]`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import transformers
from torch import nn

from flopwatch.flops.fit import fit_flops_law
from flopwatch.flops.methods import count_by_trace
from flopwatch.flops.tracing.passes import CountOptions
from flopwatch.monitor.training_monitor import TrainingMonitor
from flopwatch.records.flops import FlopCount

SEQ_LEN = 2048
VOCABULARY = 32_000
STEPS = 50


def counting_seconds() -> float:
    """CPU seconds that counting takes in the first steps of a training, in this process."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=256, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=1024,
    )  # fmt: skip
    model = cast("Any", transformers.LlamaForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 2000, (2, 64))
    batch = {"input_ids": ids, "labels": ids.clone()}

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # torch's own first time
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        monitor = TrainingMonitor(folder, model=model, sinks=[], log_every=10, peak_flops_per_s=1e12)
        for _ in range(STEPS):
            began = time.process_time()
            with monitor.step(batch=batch):
                step()
            seconds.append(time.process_time() - began)
        monitor.close()
    return sum(seconds) - STEPS * median(seconds)


def first_steps(repeats: int, old: Path | None) -> None:
    trees = {"now": Path(__file__).parents[2], **({} if old is None else {"old": old})}
    found: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(repeats):
        for name, tree in trees.items():
            environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
            command = [sys.executable, __file__, "--one"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found[name].append(float(done.stdout.split()[-1]))
    for name, seconds in found.items():
        least, most = min(seconds), max(seconds)
        print(f"{name}: counting takes {median(seconds):.2f} s of CPU in {STEPS} steps ({least:.2f} to {most:.2f})")
    if old is not None:
        print(f"ratio of the medians: {median(found['now']) / median(found['old']):.2f}")


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


def trace(model: nn.Module, batch: Any) -> FlopCount:
    return count_by_trace(model, batch, CountOptions())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--laws", action="store_true")
    parser.add_argument("--old", type=Path, help="a checkout of an earlier flopwatch")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(counting_seconds())
    elif options.laws:
        laws(options)
    else:
        first_steps(options.repeats, options.old)


def laws(options: argparse.Namespace) -> None:
    ids = torch.randint(0, VOCABULARY, (1, SEQ_LEN))
    batch = {"input_ids": ids, "labels": ids.clone()}
    print("| model | layers | law, CPU s (min / median / max) | one trace |")
    print("| --- | --- | --- | --- |")
    for name in options.models:
        print(row(name, batch, options.repeats), flush=True)


def row(name: str, batch: Any, repeats: int) -> str:
    laws: list[float] = []
    for _ in range(repeats):
        model = MODELS[name]()
        seconds, _ = cpu_seconds(lambda model=model: fit_flops_law(model, batch))  # type: ignore[misc]
        laws.append(seconds)
    one, _ = cpu_seconds(lambda: trace(model, batch))
    layers = getattr(model.config, "num_hidden_layers", "")
    return f"| {name} | {layers} | {min(laws):.2f} / {median(laws):.2f} / {max(laws):.2f} | {one:.2f} |"


if __name__ == "__main__":
    main()
