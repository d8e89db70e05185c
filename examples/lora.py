"""LoRA: the gradients of frozen weights are not computed, so a step needs fewer FLOPs than full fine-tuning.

python examples/lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import flopwatch

BATCH, LENGTH, STEPS = 4, 64, 12


def flops_of_a_step(name: str, model: torch.nn.Module) -> int:
    """Train a few steps under the monitor, and return the model FLOPs of one of them."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    with flopwatch.TrainingMonitor(f"runs/lora/{name}", model=model) as monitor:
        for _ in range(STEPS):
            ids = torch.randint(0, 512, (BATCH, LENGTH))
            batch = {"input_ids": ids, "labels": ids}
            with monitor.step(batch) as step:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss)
    return int(monitor.summary.values["total/model_flops"]) // STEPS


torch.manual_seed(0)
sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).train()
full = flops_of_a_step("full", model)

adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
lora = flops_of_a_step("adapters", adapted)

trainable, parameters = adapted.get_nb_trainable_parameters()
print(f"Full fine-tuning needs {full:,} FLOPs per step.")
print(f"LoRA trains {trainable / parameters:.1%} of the parameters and needs {lora:,} FLOPs per step.")
print(f"That is {lora / full:.1%} of full fine-tuning: the backward pass still goes through the frozen weights.")
