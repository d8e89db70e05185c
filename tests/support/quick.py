"""Which architectures `make test` tries; `make test-all` tries them all."""

from collections.abc import Iterable

import pytest

from testbeds.architectures import ARCHITECTURES, Architecture

QUICK = {"llama", "mixtral", "resnet", "qwen2_vl"}
"""One of each kind: dense, experts, convolutions, images with a grid."""


def for_each(architectures: Iterable[Architecture] = ARCHITECTURES) -> pytest.MarkDecorator:
    """Parametrise a test over architectures, those that are not quick marked slow."""
    marked = [pytest.param(item, marks=() if item.name in QUICK else pytest.mark.slow) for item in architectures]
    return pytest.mark.parametrize("architecture", marked, ids=lambda item: item.name)
