"""The private names of transformers and Opacus that counting uses, and what happens in a release that lacks them.

The libraries are looked up in `sys.modules`, because a library that is not loaded cannot be part of the model. Checked
with transformers 5.22.2 and Opacus 1.6.0.
"""

import sys
from typing import Any

OUTPUT_CAPTURING = "transformers.utils.output_capturing"
"""The module of the hooks that collect hidden states. If it is missing, they are treated like unknown hooks."""
CACHES = "transformers.cache_utils"
"""The module of key-value caches."""
SHARDED_FORWARDS = ("transformers.distributed.tensor_parallel", "transformers.distributed.expert_parallel")
"""Modules whose functions replace `forward` on sharded instances, so that counting uses the `forward` of the class."""


def outputs_are_captured() -> bool:
    """Whether transformers is collecting hidden states or attentions, so that every layer must really run.

    If the private name is missing: False. Skipping layers that are equal then fails, and every layer is traced.
    """
    collector = getattr(sys.modules.get(OUTPUT_CAPTURING), "_active_collector", None)
    return collector is not None and bool(collector.get())


def is_cache(value: Any) -> bool:
    """Whether `value` is a key-value cache. If the class is missing: False, and layers that share a cache all run."""
    cache_class = getattr(sys.modules.get(CACHES), "Cache", None)
    return cache_class is not None and isinstance(value, cache_class)


def attention_implementation(model: Any) -> str:
    """The attention implementation of a transformers model, such as `flash_attention_2`.

    `from_pretrained` stores its public argument in this private setting. If it is missing, the result is empty, and
    documents that are packed into one sequence are counted as one document.
    """
    return str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


def prepare_for_opacus(parameter: Any) -> None:
    """Set the two attributes on a new parameter that Opacus's per-sample gradient hooks expect."""
    if not hasattr(parameter, "_forward_counter"):
        parameter._forward_counter, parameter.grad_sample = 0, None
