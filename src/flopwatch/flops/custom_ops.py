"""Ops that people write in Python with `torch.library.custom_op`: their body says what they run."""

from collections.abc import Callable
from typing import Any

from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload


def python_body(func: OpOverload) -> Callable[..., Any] | None:
    """The function that computes this op on every device, if it is one of Python's."""
    definition: Any = OPDEFS.get(func._schema.name)
    if definition is None or set(definition._backend_fns) != {None}:
        return None
    body: Callable[..., Any] = definition._init_fn
    return body
