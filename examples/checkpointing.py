"""Activation checkpointing: MFU counts what a step needs, HFU also what it computes a second time to save memory.

python examples/checkpointing.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flopwatch

BATCH, LENGTH, STEPS = 4, 64, 12

torch.manual_seed(0)
sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "use_cache": False}
for kind in ("plain", "checkpointed"):
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, attn_implementation="eager")).train()
    if kind == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with flopwatch.TrainingMonitor(f"runs/checkpointing/{kind}", model=model) as monitor:
        for _ in range(STEPS):
            ids = torch.randint(0, 512, (BATCH, LENGTH))
            batch = {"input_ids": ids, "labels": ids}
            with monitor.step(batch) as step:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss)
    values = monitor.summary.values
    needed, executed = values["total/model_flops"] // STEPS, values["total/hardware_flops"] // STEPS
    print(f"{kind}: a step needs {needed:,} FLOPs and executes {executed:,}.")
    if "perf/mfu" in values:  # absent if the peak of this device is unknown
        print(f"{kind}: MFU {values['perf/mfu']:.2%}, HFU {values['perf/hfu']:.2%}.")

print(f"Checkpointing executes {executed / needed:.3f} times the FLOPs that a step needs; MFU ignores the excess.")
