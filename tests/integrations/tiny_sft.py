"""TRL's SFTTrainer on the tiny run."""

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from integrations import tiny_run


def sft_trainer(folder, *callbacks, model=None, peft_config=None, **more):
    words = {str(number): number for number in range(128)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="3")),
        pad_token=str(tiny_run.PAD),
        bos_token="1",
        eos_token="2",
        unk_token="3",
    )
    return SFTTrainer(
        model or tiny_run.model(),
        SFTConfig(**tiny_run.training_arguments(folder, **({"bf16": False, "max_length": None} | more))),
        train_dataset=Dataset.from_list(tiny_run.dataset()),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        peft_config=peft_config,
    )
