"""One sample of a batch that can be made longer, shorter, more, and given other images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.batches import FLAT_IMAGES, images_of_row, named
from flopwatch.flops.layout import SAMPLES, Layout, resized
from flopwatch.flops.structure import describe, map_tensors, tensors_of

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of one image or video."""
_TOKEN_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


@dataclass(frozen=True)
class Sample:
    """One sample of a batch without its padding.

    Attributes:
        one: The sample as a batch of its own.
        layout: Says which of its sizes can be changed.
        image_tokens: Placeholders of images. Their number stays whatever the length, because the model checks it
            against the pixels it gets.
        merge: Patches per side that the vision tower merges into one placeholder.
    """

    one: Any
    layout: Layout
    image_tokens: tuple[int, ...] = ()
    merge: int = 1

    @property
    def grids(self) -> tuple[Grid, ...]:
        return grids_of(self.one)

    @property
    def shortest(self) -> int:
        """The length below which placeholders would be cut off."""
        ids = tensors_of(self.one).get("input_ids")
        if ids is None or not self.image_tokens or ids.dim() != 2:
            return 1
        placeholders = torch.isin(ids[0].cpu(), torch.tensor(self.image_tokens)).nonzero()
        return int(placeholders.max()) + 2 if placeholders.numel() else 1

    def batch(self, values: Mapping[str, int]) -> Any:
        """A batch in which the layout's variables have these values: so many copies, so long."""
        return resized(self.one, self.layout, values)

    def with_layout(self, layout: Layout) -> "Sample":
        return replace(self, layout=layout)

    def with_grids(self, grids: Sequence[Grid], length: int) -> Any:
        """The same sample with other images: patches and placeholders made to match, as a batch of one."""
        tensors = named(self.one)
        per_patch = tensors["pixel_values"].shape[1]
        counts = [prod(grid) // self.merge**2 for grid in grids]
        text = int(tensors["input_ids"][0, -1])
        ids = [text]
        for count in counts:
            ids += [self.image_tokens[0]] * count + [text]
        row = torch.tensor([ids + [text] * (length - len(ids))])
        pixels = torch.empty(sum(map(prod, grids)), per_patch, device="meta")
        other = {
            **self.batch({SAMPLES: 1, "s": row.shape[1]}),
            "input_ids": row,
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor(list(grids)),
        }
        for name, value in other.items():
            if name.endswith("token_type_ids"):
                other[name] = (row == self.image_tokens[0]).to(value.dtype)
        return other


def repeated(batch: Mapping[str, Any], times: int) -> dict[str, Any]:
    """The samples of a batch several times over, images included."""
    return {
        name: torch.cat([value] * times) if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in batch.items()
    }


def grids_of(batch: Any) -> tuple[Grid, ...]:
    grid = batch.get("image_grid_thw") if isinstance(batch, Mapping) else None
    return tuple((t, h, w) for t, h, w in grid.tolist()) if isinstance(grid, torch.Tensor) else ()


def take_sample(model: nn.Module, batch: Any, layout: Layout, index: int = 0) -> Sample:
    """One sample of the batch without its padding."""
    config = getattr(model, "config", None)
    tokens = [getattr(config, name, None) for name in _TOKEN_NAMES]
    merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
    return Sample(
        without_padding(one_sample(batch, layout, index), layout),
        layout,
        image_tokens=tuple(token for token in tokens if isinstance(token, int)),
        merge=merge if isinstance(merge, int) else 1,
    )


def one_sample(batch: Any, layout: Layout, index: int) -> Any:
    """One sample of everything that has one per sample; what is shared stays as it is."""
    if SAMPLES not in layout.sizes:
        return batch
    factors = {
        slot.path: factor
        for slot, variable, factor in zip(layout.slots, layout.variables, layout.factors, strict=True)
        if variable == SAMPLES
    }
    lists = {slot.path for slot in layout.slots if slot.dim is None and slot.path in factors}
    row = _one_of_lists(batch, lists, index)

    def cut(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if path not in factors or path in lists:
            return tensor
        return tensor[index * factors[path] : (index + 1) * factors[path]]

    taken = map_tensors(row, cut)
    if isinstance(batch, Mapping) and any(pixels in batch and grid in batch for pixels, grid in FLAT_IMAGES.items()):
        taken = dict(taken)
        for pixels, grid in FLAT_IMAGES.items():
            if pixels in batch and grid in batch:
                of_row = images_of_row(batch[pixels], batch[grid], layout.sizes[SAMPLES], index)
                taken[pixels], taken[grid] = of_row
    return taken


def _one_of_lists(batch: Any, lists: set[str], index: int) -> Any:
    if not lists:
        return batch
    if isinstance(batch, Mapping):
        return {name: [item[index]] if name in lists else item for name, item in batch.items()}
    items = [[item[index]] if str(position) in lists else item for position, item in enumerate(batch)]
    return tuple(items) if isinstance(batch, tuple) else items


def mask_variable(layout: Layout, mask: str = "attention_mask") -> str | None:
    """The length that this mask runs over."""
    pairs = zip(layout.slots, layout.variables, strict=True)
    return next((own for slot, own in pairs if slot.path == mask and slot.dim == 1 and slot.rank == 2), None)


def without_padding(sample: Any, layout: Layout, mask: str = "attention_mask") -> Any:
    """One sample without the positions its mask calls padding, in all tensors that run along the mask."""
    variable = mask_variable(layout, mask)
    values = sample.get(mask) if isinstance(sample, Mapping) else None
    if variable not in layout.lengths or not isinstance(values, torch.Tensor) or values.device.type == "meta":
        return sample
    if bool((values != 0).all()):
        return sample
    columns = (values[0] != 0).nonzero()[:, 0]
    if not columns.numel():
        raise InputError(f"{mask} calls every position of a row padding")
    return select_positions(sample, layout, variable, columns)


def select_positions(sample: Any, layout: Layout, variable: str | None, columns: torch.Tensor) -> Any:
    """Keep these positions in every dimension that follows the variable."""
    dims: dict[str, list[int]] = {}
    for slot, own in zip(layout.slots, layout.variables, strict=True):
        if own == variable and slot.dim is not None:
            dims.setdefault(slot.path, []).append(slot.dim)

    def cut(path: str, tensor: torch.Tensor) -> torch.Tensor:
        for dim in dims.get(path, ()):
            tensor = tensor.index_select(dim, columns.to(tensor.device))
        return tensor

    return map_tensors(sample, cut)


def belongs(layout: Layout, batch: Any) -> dict[str, int] | None:
    """The layout's variables in this batch, None when it is of another kind."""
    return layout.match(describe(batch))
