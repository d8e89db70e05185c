"""Which architectures and which other cases `make test` and CI try; `make campaign` tries them all."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

from testbeds.architectures import ARCHITECTURES, BY_NAME, Architecture

QUICK = {"llama", "mixtral", "resnet", "qwen2_vl"}
"""One of each kind: dense, experts, convolutions, images with a grid."""

VARIED = QUICK | {"gemma3", "mamba2", "t5"}
"""And one with two kinds of attention, a state space, an encoder with a decoder. Variants of the other architectures
(frozen, recomputed, replayed …) repeat these, so they run in `make campaign`."""


def for_each(
    architectures: Iterable[Architecture] = ARCHITECTURES, *, in_ci: Container[str] = frozenset(BY_NAME)
) -> pytest.MarkDecorator:
    """Parametrise a test over architectures, those that are not quick marked slow, those not `in_ci` campaign."""

    def marks(name: str) -> list[pytest.MarkDecorator]:
        slow = [] if name in QUICK else [pytest.mark.slow]
        return slow if name in in_ci else [*slow, pytest.mark.campaign]

    marked = [pytest.param(item, marks=marks(item.name)) for item in architectures]
    return pytest.mark.parametrize("architecture", marked, ids=lambda item: item.name)


def one_in(every: int, cases: Iterable[Any], name: Callable[[Any], str | None] = lambda case: None) -> list[Any]:
    """Cases of one kind, of which CI tries every so many, and `make campaign` all."""
    return [
        pytest.param(case, id=name(case), marks=[pytest.mark.campaign] if number % every else [])
        for number, case in enumerate(cases)
    ]
