"""Which tokens a module sees: text, the two sides of an encoder-decoder, patches of images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from flopwatch.flops.batches import real_lengths


@dataclass
class Stream:
    """Positions that flow through a part of a model.

    `size` is the picture's extent a convolution sees next; it shrinks as the strides go by, in the order in which the
    modules are listed.
    """

    batch_size: int
    positions: int
    attended: int
    size: list[int] = field(default_factory=list)
    _before: list[int] = field(default_factory=list)

    @property
    def attended_now(self) -> int:
        """Positions that attend to each other, after the strides so far."""
        return prod(self.size) if self._before else self.attended

    def linear_positions(self, path: str) -> int:
        """Positions a matrix meets: all, those that pooling left, or those the strides have left."""
        if self.size and path.rpartition(".")[2] in _AFTER_POOLING:
            return self.batch_size
        return self.batch_size * prod(self.size) if self._before else self.positions

    def conv_positions(self, path: str, module: nn.Module) -> int:
        """Positions a convolution's or pooling's kernel is placed at, per sample."""
        dims = len(self.size)
        kernel, stride, padding, dilation = (
            _sides(module, name, dims) for name in ("kernel_size", "stride", "padding", "dilation")
        )
        if not dims or len(kernel) != dims:
            return max(1, self.positions // max(1, self.batch_size))
        # A shortcut stands beside the path that is listed next to it: it sees the same input.
        is_shortcut = any(word in path for word in ("shortcut", "downsample.0", "residual"))
        entering = self._before if is_shortcut and self._before else self.size
        leaving = [
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(entering, kernel, stride, padding, dilation, strict=True)
        ]
        if not is_shortcut and all(side > 0 for side in leaving):
            self._before, self.size = self.size, leaving
        return max(1, prod(leaving))


_AFTER_POOLING = {"classifier", "fc", "head", "visual_projection"}


def read_streams(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Stream]:
    """The streams a batch feeds; `text`, `image` and `merged` always have an entry."""
    text = _text_stream(batch)
    image = _image_stream(model, batch, text)
    streams = {"text": text, "image": image, "merged": _merged(model, image)}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        target = batch.get("decoder_input_ids", batch.get("labels"))
        streams["encoder"] = image if "input_features" in batch else text
        if isinstance(target, torch.Tensor):
            streams["decoder"] = Stream(target.shape[0], target.numel(), target.shape[1])
    return streams


def stream_of(path: str, streams: Mapping[str, Stream]) -> str:
    """The stream a module belongs to, by its place in the tree."""
    parts = path.lower().split(".")
    if any(word in part for part in parts for word in ("merger", "projector")):
        return "merged"
    if any(
        word in part for part in parts for word in ("vision", "visual", "image", "patch", "vit", "resnet", "convnext")
    ):
        return "image"
    if "decoder" in streams:
        return "encoder" if "encoder" in parts else "decoder"
    return "text" if streams["text"].positions else "image"


def _text_stream(batch: Mapping[str, Any]) -> Stream:
    ids = batch.get("input_ids", batch.get("inputs_embeds"))
    if ids is None:
        ids = next((value for name, value in batch.items() if name != "labels" and _are_ids(value)), None)
    if not isinstance(ids, torch.Tensor) or ids.dim() < 2:
        return Stream(0, 0, 0)
    lengths = real_lengths(batch) or [ids.shape[1]] * ids.shape[0]
    # Pairs of a ragged batch: the root mean square length attends to as many.
    attended = round((sum(length**2 for length in lengths) / len(lengths)) ** 0.5)
    return Stream(ids.shape[0], sum(lengths), attended)


def _image_stream(model: nn.Module, batch: Mapping[str, Any], text: Stream) -> Stream:
    grid = batch.get("image_grid_thw")
    if isinstance(grid, torch.Tensor):
        patches = [prod(sides) for sides in grid.tolist()]
        return Stream(len(patches), sum(patches), round((sum(p**2 for p in patches) / len(patches)) ** 0.5))
    floats = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    pixels = batch.get("pixel_values", floats[0] if floats else None)
    if not isinstance(pixels, torch.Tensor) or pixels.dim() < 2:
        return Stream(text.batch_size or 1, 0, 0)
    if pixels.dim() < 4:
        return Stream(pixels.shape[0], prod(pixels.shape[:-1]), pixels.shape[-1], [pixels.shape[-1]])
    config = getattr(model, "config", None)
    side = getattr(getattr(config, "vision_config", config), "patch_size", None)
    size = list(pixels.shape[2:])
    patches_per_image = prod(extent // side for extent in size) if isinstance(side, int) else 1
    return Stream(pixels.shape[0], pixels.shape[0] * patches_per_image, patches_per_image, size)


def _merged(model: nn.Module, image: Stream) -> Stream:
    """Patches as they enter the language model: merged side by side, where the vision tower does that."""
    side = getattr(getattr(getattr(model, "config", None), "vision_config", None), "spatial_merge_size", 1)
    share = side**2 if isinstance(side, int) else 1
    return Stream(image.batch_size, image.positions // share, image.attended // share)


def _are_ids(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()


def _sides(module: nn.Module, name: str, dims: int) -> list[int]:
    value = getattr(module, name, 1)
    if isinstance(value, str):  # padding="same" or "valid"
        return [0] * dims
    return [value] * dims if isinstance(value, int) else list(value)
