"""Which architectures `make test` and CI try; `make campaign` tries them all."""

from collections.abc import Container, Iterable

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
