"""Replace a method on one object, never on its class, and put it back."""

import functools
from collections.abc import Callable
from typing import Any

_ABSENT = object()


def replace_method(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Let `owner.name` be what `make` makes of it; returns a function that puts it back.

    Where somebody has replaced it again since, theirs stays: it calls ours, which must not mind.

    >>> class Trainer:
    ...     def training_step(self):
    ...         return 1
    >>> trainer = Trainer()
    >>> put_back = replace_method(trainer, "training_step", lambda original: lambda: original() + 1)
    >>> trainer.training_step(), Trainer().training_step()
    (2, 1)
    >>> put_back()
    >>> vars(trainer)
    {}
    """
    original = getattr(owner, name)
    before = vars(owner).get(name, _ABSENT)
    replacement = functools.wraps(original)(make(original))
    setattr(owner, name, replacement)

    def put_back() -> None:
        if vars(owner).get(name) is not replacement:
            return
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return put_back
