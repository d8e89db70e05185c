"""A model of the same architecture, small enough to be tried on a CPU in a moment."""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flopwatch.models.load import load_model
from flopwatch.models.presets import PRESETS, ImagePreset, Preset, image_preset
from flopwatch.models.resnet import ResNet
from flopwatch.models.transformer import Decoder

MOST_PARAMETERS = 20_000_000
"""What is larger than this is not run here: a step of it would take seconds and hundreds of megabytes."""

_HEADS, _HEAD_WIDTH, _VOCABULARY, _EXPERTS, _PATCH = 4, 8, 96, 4, 4
_CHANNELS, _SIDE = 8, 32
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_INNER = (
    "intermediate_size",
    "moe_intermediate_size",
    "n_inner",
    "d_ff",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
_ATTENTION_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_NUMBER_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "cls_token_id", "sep_token_id")

Settings = dict[str, Any]


def tiny_copies(model: str) -> Iterator[nn.Module]:
    """Copies on the CPU to try one after the other, the smallest first; none when all are too large.

    Shrinking a config may break it, so the caller takes the first that an ordinary training step runs on.

    Args:
        model: As `load_model` takes it. What `package.module:function` makes is tried as it is.
    """
    if model in PRESETS:
        yield Decoder(_small_preset(PRESETS[model])).train()
        return
    if (sizes := image_preset(model)) is not None:
        yield ResNet(_small_image_preset(sizes)).train()
        return
    path = Path(model)
    if path.suffix == ".json" or path.is_dir():
        settings = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        for smaller in (with_small_width(settings), with_few_layers(settings), settings):
            copy = _built(smaller)
            if copy is not None:
                yield copy
    elif _parameters(load_model(model)) <= MOST_PARAMETERS:
        yield load_model(model, device="cpu").train()


def _small_preset(sizes: Preset) -> Preset:
    heads = min(sizes.heads, _HEADS)
    return Preset(min(sizes.vocab_size, _VOCABULARY), heads * _HEAD_WIDTH, min(sizes.layers, 2), heads)


def _small_image_preset(sizes: ImagePreset) -> ImagePreset:
    """As many stages and classes, one block in each: labels of the user's own batch must fit."""
    widths = tuple(_CHANNELS * 2**stage for stage in range(len(sizes.widths)))
    return replace(sizes, image_size=_SIDE, widths=widths, blocks_per_stage=1)


def with_few_layers(settings: Settings) -> Settings:
    """Two layers, or as many as it takes to have one of each kind, and few tokens."""
    small = _parts(settings, with_few_layers)
    kinds = settings.get("layer_types")
    count = 2
    if isinstance(kinds, list):
        count = max([2, *(kinds.index(kind) + 1 for kind in kinds)])
        small["layer_types"] = kinds[:count]
    _limit(small, _LAYERS, count)
    _limit(small, ("vocab_size",), _VOCABULARY)
    for name in _TOKENS:
        if isinstance(small.get(name), int) and small[name] >= _VOCABULARY:
            small[name] = None if name != "decoder_start_token_id" else 0
    return small


def with_small_width(settings: Settings) -> Settings:
    """Few layers, few tokens, few and narrow heads, few experts, small images."""
    small = with_few_layers(_parts(settings, with_small_width))
    heads: int = next((small[name] for name in _ATTENTION_HEADS if isinstance(small.get(name), int)), _HEADS)
    groups = small.get("num_key_value_heads")
    if isinstance(groups, int):
        small["num_key_value_heads"] = max(1, min(heads, _HEADS) * groups // heads)
    _limit(small, _ATTENTION_HEADS, _HEADS)
    _limit(small, _WIDTH, min(heads, _HEADS) * _HEAD_WIDTH)
    _limit(small, _INNER, 2 * _HEADS * _HEAD_WIDTH)
    _limit(small, ("head_dim", "d_kv"), _HEAD_WIDTH)
    _limit(small, _NUMBER_OF_EXPERTS, _EXPERTS)
    _limit(small, ("num_experts_per_tok",), 2)
    if isinstance(small.get("image_size"), int) and isinstance(small.get("patch_size"), int):
        small["image_size"], small["patch_size"] = 4 * _PATCH, _PATCH
    return small


def _parts(settings: Settings, shrink: Callable[[Settings], Settings]) -> Settings:
    """A config of text and images holds a config for each."""
    return {
        key: shrink(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in settings.items()
    }


def _limit(settings: Settings, names: tuple[str, ...], most: int) -> None:
    for name in names:
        if isinstance(settings.get(name), int):
            settings[name] = min(settings[name], most)


def _built(settings: Settings) -> nn.Module | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(settings))
        try:
            if _parameters(load_model(str(file))) > MOST_PARAMETERS:
                return None
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return load_model(str(file), device="cpu")
        except Exception:  # whatever a config that was shrunk wrongly makes transformers raise
            return None


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
