"""The options of the built-in trainers. Loads neither torch nor pydantic, because the runner of a sweep checks them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import isfinite
from typing import Any

from flopwatch.errors import InputError


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """The `options` of a trial with a built-in trainer. The standard trainer does not clip and adds no noise."""

    lr: float = 1e-3
    max_grad_norm: float = 1.0  # the gradient of every sample is clipped to this norm
    noise_multiplier: float = 1.0  # standard deviation of the noise divided by `max_grad_norm`


def read_options(options: Mapping[str, Any]) -> TrainerOptions:
    """Check the options. Each built-in trainer accepts all of them, because a sweep gives every trainer the same ones.

    >>> read_options({"max_grad_norm": 0.1}).max_grad_norm
    0.1
    """
    known = [field.name for field in fields(TrainerOptions)]
    for name, value in options.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise InputError(f"the built-in trainers have no option {name!r}; they have {', '.join(known)}{hint}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
            raise InputError(f"option {name} must be a number of at least 0, got {value!r}")
    if options.get("max_grad_norm") == 0:
        raise InputError("option max_grad_norm must be above 0, because 0 would clip every gradient to zero")
    return TrainerOptions(**options)
