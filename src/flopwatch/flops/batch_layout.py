"""Finds which sizes of a batch vary together, and resizes one sample of the batch.

Every size of a batch is a slot: one dimension of a tensor, or the length of a list. A layout gives some slots a
variable (`n` is the number of samples, `s` the length of the main sequence, `t` and `u` are lengths of other sequences)
and fixes all other slots at their size in the example batch. Layouts are guessed from argument names and equal sizes,
so `fit.py` verifies them by counting the FLOPs of batches with other values of the variables.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import (
    FLAT_IMAGES,
    MAIN_SEQUENCE,
    Description,
    describe,
    inside,
    map_tensors,
    named,
    read_shape,
    tensors_of,
)

SAMPLES = "n"
LENGTHS = ("s", "t", "u")
"""The variables for sequence lengths; the first one belongs to the main sequence."""


@dataclass(frozen=True, slots=True)
class LayoutSlot:
    """One size of a batch: dimension `dim` of the tensor at `path`, or the length of a list there if `dim` is None.

    The size is fixed if it has no `variable`; otherwise it is the variable's value times `factor`, such as 3 for three
    images per sample.
    """

    path: str
    dim: int | None
    size: int
    is_integer: bool = False
    rank: int = 0
    variable: str | None = None
    factor: int = 1

    @property
    def name(self) -> str:
        return self.path.partition(".")[0]


@dataclass(frozen=True)
class Layout:
    """Says which sizes of a batch can vary, and with which variable: `n` (samples) or `s`, `t`, `u` (lengths).

    Attributes:
        slots: All sizes of the example batch, in the order of `Description.sizes`.
        sizes: The values of the variables in the example batch.
    """

    structure: Any
    slots: tuple[LayoutSlot, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def other_lengths(self) -> dict[str, int]:
        return {name: self.sizes[name] for name in self.lengths if name != "s"}

    @property
    def lengths(self) -> tuple[str, ...]:
        return tuple(name for name in LENGTHS if name in self.sizes)

    def match(self, batch: Description) -> dict[str, int] | None:
        if batch.structure != self.structure or len(batch.sizes) != len(self.slots):
            return None
        found: dict[str, int] = {}
        for size, slot in zip(batch.sizes, self.slots, strict=True):
            value, rest = divmod(size, slot.factor)
            if slot.variable is None:
                if size != slot.size:
                    return None
            elif rest or found.setdefault(slot.variable, value) != value:
                return None
        return found

    def paths_along(self, variable: str) -> list[str]:
        return list(dict.fromkeys(slot.path for slot in self.slots if slot.variable == variable))


def _pieces(value: Any, structure: Any) -> list[tuple[Any, Any, Any]]:
    """Return the name, the value and the structure of everything in a container; of equal items, only of the first."""
    kind = structure[0]
    if kind == "dict":
        return [(name, item, inner) for (name, item), (_, inner) in zip(value.items(), structure[1], strict=True)]
    if kind == "items":
        return [(0, value[0], structure[1])]
    if kind == "list":
        return [(index, *each) for index, each in enumerate(zip(value, structure[1], strict=True))]
    if kind == "parts":
        return [(name, vars(value)[name], inner) for name, inner in structure[2]]
    return []


def _add_slots(value: Any, path: str, found: list[LayoutSlot], structure: Any) -> None:
    if structure[0] == "tensor":
        is_integer = not (value.is_floating_point() or value.is_complex())
        found += [LayoutSlot(path or "0", dim, size, is_integer, value.dim()) for dim, size in enumerate(value.shape)]
    elif structure[0] == "items":
        found.append(LayoutSlot(path, None, len(value)))
    for name, item, inner in _pieces(value, structure):
        _add_slots(item, inside(path, name), found, inner)


def suggest_layouts(batch: Any) -> list[Layout]:
    """Return guesses at which sizes of a batch vary, from the guess with the most variables to that with the fewest."""
    structure, shape = describe(batch).structure, read_shape(batch)
    slots: list[LayoutSlot] = []
    _add_slots(batch, "", slots, structure)
    for index, slot in enumerate(slots):
        factor = _rows_per_sample(slot, shape.batch_size)
        if factor:
            slots[index] = replace(slot, variable=SAMPLES, factor=factor)
    plain = Layout(structure, tuple(slots), {SAMPLES: shape.batch_size})
    if not plain.paths_along(SAMPLES):
        return [replace(plain, sizes={})]
    if shape.seq_len is None:
        return [plain]
    tried = [*(_with_lengths(plain, shape.seq_len, floats_too=too) for too in (True, False)), plain]
    return [layout for index, layout in enumerate(tried) if layout not in tried[:index]]


def _rows_per_sample(slot: LayoutSlot, batch_size: int) -> int | None:
    if slot.name in FLAT_IMAGES or slot.name in FLAT_IMAGES.values():
        return slot.size // batch_size if slot.dim == 0 and slot.size % batch_size == 0 else None
    if slot.dim not in (0, None) or (slot.dim is None and "." in slot.path):
        return None
    is_inside_list = slot.dim == 0 and "." in slot.path and slot.path.rpartition(".")[2].isdigit()
    if slot.size == batch_size and not is_inside_list:
        return 1
    # A tensor with 4 dimensions holds one image per row. A sample can have several images, and so several rows.
    return slot.size // batch_size if slot.size % batch_size == 0 and slot.rank == 4 and not is_inside_list else None


def _with_lengths(plain: Layout, seq_len: int, *, floats_too: bool) -> Layout:
    """Return `plain` with length variables for the sequence dimensions of integer tensors, such as token ids and masks.

    With `floats_too`, a dimension of a float tensor that is as long as a sequence gets the variable of that sequence.
    """
    slots = list(plain.slots)
    main = next((name for name in MAIN_SEQUENCE if any(slot.path == name for slot in slots)), None)
    # Dimensions of equal size get the same variable; `fit.separate_lengths` later tests whether they can differ.
    sizes: dict[int, str] = {seq_len: LENGTHS[0]}
    for index, slot in enumerate(slots):
        if not slot.dim or slot.rank < 2 or slot.name in FLAT_IMAGES or slot.name in FLAT_IMAGES.values():
            continue
        is_sequence = (slot.is_integer and slot.dim == 1) or (slot.path == main and slot.dim == 1)
        if is_sequence and slot.size not in sizes and len(sizes) < len(LENGTHS):
            sizes[slot.size] = LENGTHS[len(sizes)]
        if slot.size in sizes and (is_sequence or slot.is_integer or floats_too):
            slots[index] = replace(slot, variable=sizes[slot.size])
    used = {name: size for size, name in sizes.items() if any(slot.variable == name for slot in slots)}
    return replace(plain, slots=tuple(slots), sizes={**plain.sizes, **used})


def resized(batch: Any, layout: Layout, values: Mapping[str, int]) -> Any:
    known = {**layout.sizes, **values}
    sizes = (slot.size if slot.variable is None else slot.factor * known[slot.variable] for slot in layout.slots)
    return _resized(batch, layout.structure, sizes)


def _resized(value: Any, structure: Any, sizes: Iterator[int]) -> Any:
    kind = structure[0]
    if kind == "tensor":
        for dim in range(value.dim()):
            value = _stretched(value, dim, next(sizes))
        return value
    count = next(sizes) if kind == "items" else 1
    pieces = [_resized(item, inner, sizes) for _, item, inner in _pieces(value, structure)]
    if kind == "dict":
        return dict(zip(value, pieces, strict=True))
    if kind in ("items", "list"):
        return tuple(pieces) if kind == "list" and isinstance(value, tuple) else pieces * count
    return value  # a user-defined object stays unchanged, because its parts may depend on each other


def _stretched(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    have = value.shape[dim]
    if size == have:
        return value
    if size < have:
        return value.narrow(dim, 0, size)
    if dim == 0 and size % have == 0:
        return torch.cat([value] * (size // have))
    # The last position is repeated because it is sure to hold valid token ids.
    last = value.narrow(dim, have - 1, 1)
    shape = list(value.shape)
    shape[dim] = size - have
    return torch.cat([value, last.expand(shape)], dim)


Grid = tuple[int, int, int]
"""The number of frames, rows of patches and columns of patches of one image or video."""
_TOKEN_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


@dataclass(frozen=True)
class Sample:
    """One sample of a batch without its padding.

    Attributes:
        one: The sample as a batch of size 1.
        image_tokens: Token ids of image placeholders. Resizing keeps their number, because the model compares it with
            the number of patches.
        merge: The vision tower merges `merge` x `merge` patches into one, which takes the place of one placeholder.
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
        ids = tensors_of(self.one).get("input_ids")
        if ids is None or not self.image_tokens or ids.dim() != 2:
            return 1
        placeholders = torch.isin(ids[0].cpu(), torch.tensor(self.image_tokens)).nonzero()
        return int(placeholders.max()) + 2 if placeholders.numel() else 1

    def batch(self, values: Mapping[str, int]) -> Any:
        return resized(self.one, self.layout, values)

    def with_grids(self, grids: Sequence[Grid], length: int) -> Any:
        """Return a batch of one sample: one image for each of `grids`, and text tokens that fill it up to `length`."""
        tensors = named(self.one)
        per_patch = tensors["pixel_values"].shape[1]
        counts = [prod(grid) // self.merge**2 for grid in grids]
        # The sample's last token is a text token. Copies of it separate the images and fill the rest of the sequence.
        text = int(tensors["input_ids"][0, -1])
        ids = [text]
        for count in counts:
            ids += [self.image_tokens[0]] * count + [text]
        row = torch.tensor([ids + [text] * (length - len(ids))])
        # Counting needs the shape of the pixels, not their values.
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
    return {
        name: torch.cat([value] * times) if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in batch.items()
    }


def grids_of(batch: Any) -> tuple[Grid, ...]:
    grid = batch.get("image_grid_thw") if isinstance(batch, Mapping) else None
    return tuple((t, h, w) for t, h, w in grid.tolist()) if isinstance(grid, torch.Tensor) else ()


def take_sample(model: nn.Module, batch: Any, layout: Layout, index: int = 0) -> Sample:
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
    """Return the batch with one sample only; arguments that all samples share stay unchanged."""
    if SAMPLES not in layout.sizes:
        return batch
    factors = {slot.path: slot.factor for slot in layout.slots if slot.variable == SAMPLES}
    lists = {slot.path for slot in layout.slots if slot.dim is None and slot.path in factors}
    row = batch
    if lists and isinstance(batch, Mapping):
        row = {name: [item[index]] if name in lists else item for name, item in batch.items()}
    elif lists:
        items = [[item[index]] if str(position) in lists else item for position, item in enumerate(batch)]
        row = tuple(items) if isinstance(batch, tuple) else items

    def cut(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if path not in factors or path in lists:
            return tensor
        return tensor[index * factors[path] : (index + 1) * factors[path]]

    taken = map_tensors(row, cut)
    for pixels, grid in FLAT_IMAGES.items():
        if isinstance(batch, Mapping) and pixels in batch and grid in batch:
            images, samples = len(batch[grid]), layout.sizes[SAMPLES]
            if images % samples:
                raise InputError(
                    f"the batch has {images} images for {samples} samples, so flopwatch cannot tell which image "
                    "belongs to which sample; pass a batch in which every sample has the same number of images"
                )
            first, last = index * images // samples, (index + 1) * images // samples
            ends = [0, *accumulate(prod(each) for each in batch[grid].tolist())]
            taken = {**taken, pixels: batch[pixels][ends[first] : ends[last]], grid: batch[grid][first:last]}
    return taken


def mask_variable(layout: Layout, mask: str = "attention_mask") -> str | None:
    """Return the variable that determines the length of `mask`; None if the length is fixed or the mask is missing."""
    masks = (slot for slot in layout.slots if slot.path == mask and slot.dim == 1 and slot.rank == 2)
    return next((slot.variable for slot in masks), None)


def without_padding(sample: Any, layout: Layout) -> Any:
    variable = mask_variable(layout)
    values = sample.get("attention_mask") if isinstance(sample, Mapping) else None
    if variable not in layout.lengths or not isinstance(values, torch.Tensor) or values.device.type == "meta":
        return sample
    if bool((values != 0).all()):
        return sample
    columns = (values[0] != 0).nonzero()[:, 0]
    if not columns.numel():
        raise InputError(
            "attention_mask marks every position of a row as padding; "
            "pass a batch in which every row has at least one real position"
        )
    return select_positions(sample, layout, variable, columns)


def select_positions(sample: Any, layout: Layout, variable: str | None, columns: torch.Tensor) -> Any:
    """Return the sample with only the positions `columns` in each dimension whose size `variable` determines."""
    dims: dict[str, list[int]] = {}
    for slot in layout.slots:
        if slot.variable == variable and slot.dim is not None:
            dims.setdefault(slot.path, []).append(slot.dim)

    def cut(path: str, tensor: torch.Tensor) -> torch.Tensor:
        for dim in dims.get(path, ()):
            tensor = tensor.index_select(dim, columns.to(tensor.device))
        return tensor

    return map_tensors(sample, cut)
