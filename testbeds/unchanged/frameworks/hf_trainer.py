"""The Hugging Face Trainer with a tiny Llama of random weights; the first argument is the folder for its output."""

import hashlib
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (160, 12))]
arguments = TrainingArguments(
    sys.argv[1],
    max_steps=40,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
trainer.remove_callback(PrinterCallback)  # it prints times
loss = trainer.train().training_loss
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())).hexdigest()
print(f"loss {loss!r}, parameters {digest}")
