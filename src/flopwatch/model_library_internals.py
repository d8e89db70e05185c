"""What counting uses of model libraries beyond their documented interfaces, and what happens without it.

It imports none of them: a library that is not loaded cannot be part of the model. Checked with transformers 5.22.2 and
Opacus 1.6.0.
"""

import sys
from typing import Any

OUTPUT_CAPTURING = "transformers.utils.output_capturing"
"""The module of the hooks that keep hidden states and attentions. Missing: such hooks count as unknown ones."""
CACHES = "transformers.cache_utils"
"""The module of key-value caches, in which a layer's index only selects the layer's own entry."""
SHARDED_FORWARDS = ("transformers.distributed.tensor_parallel", "transformers.distributed.expert_parallel")
"""Modules that replace `forward` on instances; the class still has the complete one. Missing: nothing is replaced."""


def outputs_are_captured() -> bool:
    """Whether transformers collects outputs of inner modules, which only exist if those modules run.

    Missing: False; a model whose outputs contain hidden states then fails in replay, and is traced in full.
    """
    collector = getattr(sys.modules.get(OUTPUT_CAPTURING), "_active_collector", None)
    return collector is not None and bool(collector.get())


def is_cache(value: Any) -> bool:
    """Whether this is a key-value cache of transformers. Missing: False, and layers that share one are not replayed."""
    cache_class = getattr(sys.modules.get(CACHES), "Cache", None)
    return cache_class is not None and isinstance(value, cache_class)


def attention_implementation(model: Any) -> str:
    """The attention that a transformers model was loaded with, such as `flash_attention_2`; the public argument of
    `from_pretrained` is kept in this private setting. Missing: empty, and packed documents count as one sequence.
    """
    return str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


def prepare_for_opacus(parameter: Any) -> None:
    """Give a new parameter the two attributes that Opacus's per-sample hooks expect on every parameter."""
    if not hasattr(parameter, "_forward_counter"):
        parameter._forward_counter, parameter.grad_sample = 0, None
