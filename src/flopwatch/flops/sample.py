"""One sample of a batch that can be made longer, shorter, more, and given other images."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from flopwatch.flops.batches import follows_sequence, named, read_shape, real_lengths, unpadded_row

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of one image or video."""


@dataclass(frozen=True)
class Sample:
    """The tensors of one row, and what is known of their layout.

    `positional` says that the batch was a tuple or a tensor. Placeholders of images keep their number whatever the
    length, because the model checks it against the pixels it gets.
    """

    tensors: dict[str, Any]
    positional: bool
    seq_len: int | None
    image_tokens: tuple[int, ...] = ()
    merge: int = 1
    """Patches per side that the vision tower merges into one placeholder."""

    @property
    def grids(self) -> tuple[Grid, ...]:
        grid = self.tensors.get("image_grid_thw")
        return tuple((t, h, w) for t, h, w in grid.tolist()) if isinstance(grid, torch.Tensor) else ()

    @property
    def shortest(self) -> int:
        """The length below which placeholders would be cut off."""
        placeholders = self._placeholders()
        return int(placeholders.max()) + 2 if placeholders.numel() else 1

    def batch(self, batch_size: int, seq_len: int | None = None) -> Any:
        """So many copies at this length, in the form the batch had."""
        tensors = {name: self._copies(name, value, batch_size, seq_len) for name, value in self.tensors.items()}
        return tuple(tensors.values()) if self.positional else tensors

    def with_grids(self, grids: Sequence[Grid]) -> "Sample":
        """The same sample with other images: patches and placeholders made to match."""
        per_patch = self.tensors["pixel_values"].shape[1]
        counts = [prod(grid) // self.merge**2 for grid in grids]
        text = int(self.tensors["input_ids"][0, -1])
        ids = [text]
        for count in counts:
            ids += [self.image_tokens[0]] * count + [text]
        length = max(len(ids), self.seq_len or 0)
        row = torch.tensor([ids + [text] * (length - len(ids))])
        pixels = torch.empty(sum(map(prod, grids)), per_patch, device="meta")
        grid = torch.tensor(list(grids))
        tensors = {**self.batch(1, length), "input_ids": row, "pixel_values": pixels, "image_grid_thw": grid}
        for name, value in tensors.items():
            if name.endswith("token_type_ids"):
                tensors[name] = (row == self.image_tokens[0]).to(value.dtype)
        return Sample(tensors, False, length, self.image_tokens, self.merge)

    def _placeholders(self) -> torch.Tensor:
        ids = self.tensors.get("input_ids")
        if not isinstance(ids, torch.Tensor) or not self.image_tokens:
            return torch.empty(0)
        return torch.isin(ids[0].cpu(), torch.tensor(self.image_tokens)).nonzero()

    def _copies(self, name: str, value: Any, batch_size: int, length: int | None) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        if length is not None and self.seq_len is not None and follows_sequence(name, value, self.seq_len):
            value = _stretched(value, length)
        return torch.cat([value] * batch_size)


def first_sample(model: nn.Module, batch: Any) -> Sample:
    """The batch's first row without padding."""
    tensors = named(batch)
    read_shape(tensors)
    real_lengths(tensors)
    row = unpadded_row(tensors, 0)
    config = getattr(model, "config", None)
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    tokens = [getattr(config, name, None) for name in names]
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
    return Sample(
        row,
        positional=not hasattr(batch, "keys"),
        seq_len=read_shape(row).seq_len,
        image_tokens=tuple(token for token in tokens if isinstance(token, int)),
        merge=merge if isinstance(merge, int) else 1,
    )


def _stretched(value: torch.Tensor, length: int) -> torch.Tensor:
    """Cut at the end, or repeat the last column."""
    have = value.shape[1]
    if length <= have:
        return value[:, :length]
    return torch.cat([value, value[:, -1:].expand(-1, length - have, *value.shape[2:])], dim=1)
