"""A mixture of experts: a step costs the experts that its tokens use, not all experts that the model has.

python examples/mixture_of_experts.py
"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import flopwatch

BATCH, LENGTH, STEPS = 4, 64, 12

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=8,
    num_experts_per_tok=2,
)
model = MixtralForCausalLM(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with flopwatch.TrainingMonitor("runs/mixture_of_experts", model=model) as monitor:
    for _ in range(STEPS):
        ids = torch.randint(0, config.vocab_size, (BATCH, LENGTH))
        batch = {"input_ids": ids, "labels": ids}
        with monitor.step(batch) as step:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)

flops = monitor.summary.values["total/model_flops"] // STEPS
parameters = sum(weight.numel() for weight in model.parameters())
experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
rule_of_thumb = 6 * parameters * BATCH * LENGTH
print(f"A step needs {flops:,} FLOPs; every row is exact: {monitor.summary.exact}.")
print(f"The experts hold {experts / parameters:.0%} of the parameters, and a token uses 2 of 8 experts.")
print(f"6 x parameters x tokens would say {rule_of_thumb:,} FLOPs, {rule_of_thumb / flops:.2f} times as many.")
