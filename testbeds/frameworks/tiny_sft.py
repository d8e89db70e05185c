"""TRL's SFTTrainer on the tiny run."""

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from testbeds.frameworks import tiny_run

HIDDEN, INTERMEDIATE, KEY_VALUE, WORDS, LAYERS = 64, 96, 32, 128, 2
"""Sizes of the tiny Llama (`architectures.text_sizes`): 4 heads of 16, 2 of them for keys and values."""


def model_flops(*, lora_rank=0, input_gradients=True, unscored_positions=1):
    """What the tiny run needs in TRL, document by document: a product of m x k by k x n is 2mkn FLOPs.

    Args:
        lora_rank: Of adapters on `q_proj` and `v_proj`; everything else is frozen then.
        input_gradients: Whether embeddings ask for a gradient, so that the first layer's inputs need one. With
            adapters alone they need not.
        unscored_positions: Positions of a document that the head leaves out: in TRL the last, which predicts nothing.
    """
    flops = 0
    for length in map(len, tiny_run.rows()):
        per_input = HIDDEN * HIDDEN + 2 * HIDDEN * KEY_VALUE  # q, k, v: these read the layer's input
        inside = HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE  # o; gate, up, down
        linear = LAYERS * 2 * length * (per_input + inside)
        head = 2 * (length - unscored_positions) * HIDDEN * WORDS
        attention = LAYERS * 2 * (2 * length * length * HIDDEN)  # scores, and their product with the values
        # q's adapter is 64 x r x 64, v's is 64 x r x 32.
        adapters = LAYERS * 2 * length * lora_rank * (HIDDEN + HIDDEN + HIDDEN + KEY_VALUE)
        # Forward, the input's gradient and the weight's, which frozen weights have not. Both factors of attention's
        # products get a gradient. The head's product is needed once, though TRL's function computes it twice.
        flops += (2 if lora_rank else 3) * (linear + head) + 3 * (attention + adapters)
        if not input_gradients:
            # In the first layer q, k, v and two adapters have no input's gradient, and keys have no gradient at all:
            # `k_proj` is frozen, and what it reads asks for none.
            flops -= 2 * length * (per_input + lora_rank * 2 * HIDDEN) + 2 * length * length * HIDDEN
    return tiny_run.EPOCHS * flops


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
