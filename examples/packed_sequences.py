"""Packed sequences: the same documents as a padded batch and as one packed row need the same model FLOPs.

python examples/packed_sequences.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flopwatch

STEPS = 12
LENGTHS = [128, 17, 40, 71]


def padded(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in documents], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.cat(documents)[None]
    # Positions that start again at 0 show where a document begins; Llama then masks attention between documents.
    positions = torch.cat([torch.arange(len(text)) for text in documents])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


torch.manual_seed(0)
sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
totals = {}
for layout in (padded, packed):
    with flopwatch.TrainingMonitor(f"runs/packed_sequences/{layout.__name__}", model=model) as monitor:
        for _ in range(STEPS):
            batch = layout([torch.randint(0, 512, (length,)) for length in LENGTHS])
            with monitor.step(batch) as step:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss)
    totals[layout.__name__] = monitor.summary.values

for name, values in totals.items():
    needed, executed = values["total/model_flops"] // STEPS, values["total/hardware_flops"] // STEPS
    positions = values["total/tokens"] // STEPS
    print(f"{name}: {positions} positions per step; the documents need {needed:,} FLOPs, {executed:,} are executed.")
saved = 1 - totals["packed"]["total/hardware_flops"] / totals["padded"]["total/hardware_flops"]
print(f"Packing executes {saved:.1%} fewer FLOPs for the same documents.")
