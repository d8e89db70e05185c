"""Which architectures `make test` and CI try; `make campaign` tries them all."""

import os
from collections.abc import Iterable

import pytest

from testbeds.architectures import ARCHITECTURES, Architecture

QUICK = {"llama", "mixtral", "resnet", "qwen2_vl"}
"""One of each kind: dense, experts, convolutions, images with a grid."""

VARIED = QUICK | {
    "gpt2", "gemma3", "deepseek_v3", "gpt_oss", "mamba2", "qwen3_next", "bert", "t5", "clip", "whisper", "convnext"
}  # fmt: skip
"""One of each kind of layer. Variants of the other architectures (frozen, recomputed, replayed …) repeat these."""


def varied() -> list[Architecture]:
    """The architectures of which variants are tested: all of them in `make campaign`."""
    return [item for item in ARCHITECTURES if item.name in VARIED or "FLOPWATCH_LONG" in os.environ]


def for_each(architectures: Iterable[Architecture] = ARCHITECTURES) -> pytest.MarkDecorator:
    """Parametrise a test over architectures, those that are not quick marked slow."""
    marked = [pytest.param(item, marks=() if item.name in QUICK else pytest.mark.slow) for item in architectures]
    return pytest.mark.parametrize("architecture", marked, ids=lambda item: item.name)
