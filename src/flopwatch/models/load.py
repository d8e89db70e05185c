"""Builds a model from a preset, a Hugging Face config file or a user's function, and a batch of zeros for it.

The networks of the presets need nothing but torch. The residual network (He et al., arXiv 1512.03385) has group
normalisation, so that DP-SGD can train it: batch norm mixes the samples of a batch, so no sample has its own gradient.
"""

import importlib
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from flopwatch.errors import InputError
from flopwatch.models.presets import (
    PRESETS,
    ImagePreset,
    Preset,
    check_model_name,
    config_file,
    image_preset,
    is_config,
)
from flopwatch.optional import require

__all__ = ["dummy_batch", "load_model"]


def load_model(spec: str, *, device: str = "meta") -> nn.Module:
    """Build a model in training mode; on the meta device it has shapes but no weights.

    Args:
        spec: `tiny`, `small`, `medium` or `1b`; `resnet20-gn` or `resnet18-gn` for images, or `resnet18-gn@64` for
            images with a side of 64 pixels; the path of a Hugging Face `config.json`; or `package.module:function`, a
            function without arguments that returns a module.
        device: The device on which the parameters are created.
    """
    check_model_name(spec)
    if spec in PRESETS:
        with torch.device(device):
            return Decoder(PRESETS[spec]).train()
    if (sizes := image_preset(spec)) is not None:
        with torch.device(device):
            return ResNet(sizes).train()
    if is_config(spec):
        return _from_config_file(config_file(spec), device)
    return _from_factory(spec, device)


def _from_config_file(file: Path, device: str) -> nn.Module:
    try:
        settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise InputError(f"{file} has no 'model_type', so it is not the config.json of a Hugging Face model")
    transformers = require("transformers", "hf")
    try:
        config = transformers.AutoConfig.for_model(**settings)
        names = [name for name in settings.get("architectures") or [] if hasattr(transformers, name)]
        build = getattr(transformers, names[0]) if names else transformers.AutoModelForCausalLM.from_config
        with torch.device(device):
            model: nn.Module = build(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"transformers {transformers.__version__} cannot build a model from {file}: {error}"
        ) from error
    return model.train()


def _from_factory(spec: str, device: str) -> nn.Module:
    module_name, _, function_name = spec.partition(":")
    sys.path.insert(0, "")  # so that imports find files in the working directory, as with `python -m`
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"cannot load the model {spec!r}: {error}; correct the name, run in the module's folder, or set PYTHONPATH"
        ) from error
    finally:
        sys.path.remove("")
    try:
        with torch.device(device):
            model = factory()
    except Exception as error:  # a function of the user
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"the function {spec!r} must work without arguments, but it raised {reason}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"the function {spec!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def dummy_batch(model: nn.Module, batch_size: int, seq_len: int) -> dict[str, Any]:
    """Return a batch of zeros on the CPU, with labels if the model takes them.

    Args:
        model: A text model or image classifier; its `forward` must take `input_ids` or `pixel_values`.
        batch_size: Samples.
        seq_len: Positions of each sample; not used for images, whose size is in the model's config.
    """
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a positive whole number, got {value!r}")
    takes = inspect.signature(model.forward).parameters
    if "input_ids" in takes:
        ids = torch.zeros(batch_size, seq_len, dtype=torch.long)
        return {"input_ids": ids, "labels": ids.clone()} if "labels" in takes else {"input_ids": ids}
    size = getattr(getattr(model, "config", None), "image_size", None)
    if "pixel_values" in takes and isinstance(size, int):
        channels = getattr(model.config, "num_channels", 3)
        labels = {"labels": torch.zeros(batch_size, dtype=torch.long)} if "labels" in takes else {}
        return {"pixel_values": torch.zeros(batch_size, channels, size, size), **labels}
    raise InputError(
        f"cannot make a batch for {type(model).__name__}, because its forward takes {', '.join(takes) or 'nothing'}; "
        "call flopwatch.count_flops(model, batch) with your own batch"
    )


class _CheckpointedNetwork(nn.Module):
    blocks: nn.ModuleList
    gradient_checkpointing = False

    def gradient_checkpointing_enable(self) -> None:
        """Keep only the blocks' inputs and run each block a second time in the backward pass."""
        self.gradient_checkpointing = True

    def _run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.gradient_checkpointing else block(x)
        return x


class Decoder(_CheckpointedNetwork):
    """A GPT-style decoder: token embeddings, sinusoidal positions (any length), pre-norm blocks, an untied head.

    Returns a dict with `logits`, and `loss` when labels are given.
    """

    def __init__(self, sizes: Preset) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab_size, sizes.width)
        self.blocks = nn.ModuleList(DecoderBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        x = self.tokens(input_ids)
        x = x + sinusoids(x.shape[1], x.shape[2], x.device).to(x.dtype)
        logits = self.head(self.norm(self._run_blocks(x)))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss}


class DecoderBlock(nn.Module):
    def __init__(self, sizes: Preset) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = CausalAttention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width), nn.GELU(), nn.Linear(4 * sizes.width, sizes.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class CausalAttention(nn.Module):
    def __init__(self, sizes: Preset) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.proj = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def sinusoids(length: int, width: int, device: torch.device) -> torch.Tensor:
    """Return sinusoidal position encodings, which have no parameters (Vaswani et al., arXiv 1706.03762, §3.5)."""
    places = torch.arange(length, device=device)[:, None]
    rates = 10_000 ** -(torch.arange(0, width, 2, device=device) / width)
    return torch.cat([torch.sin(places * rates), torch.cos(places * rates)], dim=1)


_CHANNELS_PER_GROUP = 8


class ResNet(_CheckpointedNetwork):
    """A residual network of blocks of two 3 x 3 convolutions, for images of any size (by default `config.image_size`).

    Returns a dict with `logits`, and `loss` when labels are given.
    """

    def __init__(self, sizes: ImagePreset) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=sizes.image_size, num_channels=3, num_labels=sizes.classes)
        self.stem = _stem(sizes)
        blocks = []
        width = sizes.widths[0]
        for stage, next_width in enumerate(sizes.widths):
            for place in range(sizes.blocks_per_stage):
                blocks.append(ResidualBlock(width, next_width, stride=2 if stage and not place else 1))
                width = next_width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, sizes.classes)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self._run_blocks(self.stem(pixel_values)).mean((2, 3)))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


class ResidualBlock(nn.Module):
    def __init__(self, width: int, next_width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, next_width, 3, stride, padding=1, bias=False)
        self.first_norm = _norm(next_width)
        self.second = nn.Conv2d(next_width, next_width, 3, padding=1, bias=False)
        self.second_norm = _norm(next_width)
        is_same_shape = stride == 1 and width == next_width
        self.shortcut = nn.Identity() if is_same_shape else nn.Conv2d(width, next_width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


def _stem(sizes: ImagePreset) -> nn.Sequential:
    """Return the first layers. They keep the resolution of small images and reduce that of large ones to a quarter."""
    width = sizes.widths[0]
    if not sizes.has_large_stem:
        return nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), _norm(width), nn.ReLU())
    convolution = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(convolution, _norm(width), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(width // _CHANNELS_PER_GROUP, width)
