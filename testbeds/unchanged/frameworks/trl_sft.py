"""TRL's SFTTrainer with a tiny Llama of random weights; the first argument is the folder for its output."""

import hashlib
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
words = Tokenizer(models.WordLevel({str(number): number for number in range(64)}, unk_token="3"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", bos_token="1", eos_token="2", unk_token="3")
rows = [{"input_ids": torch.randint(4, 64, (5 + number % 8,)).tolist()} for number in range(80)]
arguments = SFTConfig(
    sys.argv[1],
    max_steps=40,
    per_device_train_batch_size=2,
    logging_steps=10,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = SFTTrainer(
    LlamaForCausalLM(config), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
)
trainer.remove_callback(PrinterCallback)  # it prints times
loss = trainer.train().training_loss
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())).hexdigest()
print(f"loss {loss!r}, parameters {digest}")
