"""Which sizes of a batch vary together (the variables of a FLOP law), and one sample that can be resized along them.

Every size of a batch is a slot. A layout gives some slots a variable (`n` samples, `s` positions of the main sequence,
`t`, `u` of other sequences) and keeps all others as they are in the example. Names and equal sizes only suggest a
layout: the law is verified by counts at other values of the variables, and a batch belongs to the law only if all its
sizes agree with the layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    images_of_row,
    map_tensors,
    named,
    read_shape,
    tensors_of,
)

SAMPLES = "n"
LENGTHS = ("s", "t", "u")
"""Names of the lengths; the first is that of the main sequence."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One size of a batch: dimension `dim` of the tensor at `path`, or (`dim` None) how many items a list has."""

    path: str
    dim: int | None
    size: int
    is_integer: bool = False
    rank: int = 0

    @property
    def name(self) -> str:
        """The name of the argument it belongs to."""
        return self.path.partition(".")[0]


@dataclass(frozen=True)
class Layout:
    """Which slot follows which variable.

    Attributes:
        slots: All sizes of the example, in the order of `Description.sizes`.
        variables: The variable of each slot, or None where the size is fixed.
        factors: The ratio of a slot's size to its variable (three images per sample).
        sizes: The values of the variables in the example.
    """

    structure: Any
    slots: tuple[Slot, ...]
    variables: tuple[str | None, ...]
    factors: tuple[int, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[str, ...]:
        """The lengths that vary, the main one first."""
        return tuple(name for name in LENGTHS if name in self.sizes)

    def match(self, batch: Description) -> dict[str, int] | None:
        """The values of the variables in this batch; None if it does not belong to the layout."""
        if batch.structure != self.structure or len(batch.sizes) != len(self.slots):
            return None
        found: dict[str, int] = {}
        for size, slot, variable, factor in zip(batch.sizes, self.slots, self.variables, self.factors, strict=True):
            if variable is None:
                if size != slot.size:
                    return None
            elif size % factor or found.setdefault(variable, size // factor) != size // factor:
                return None
        return found

    def sizes_at(self, values: Mapping[str, int]) -> list[int]:
        """The size of every slot for these values; variables that are left out keep their value in the example."""
        return [
            slot.size if variable is None else factor * values.get(variable, self.sizes[variable])
            for slot, variable, factor in zip(self.slots, self.variables, self.factors, strict=True)
        ]

    def with_own_length(self, path: str) -> "Layout | None":
        """The same layout with a separate length for the tensor at `path`; None if all names for lengths are taken."""
        free = next((name for name in LENGTHS if name not in self.sizes), None)
        moved = [i for i, slot in enumerate(self.slots) if slot.path == path and self.variables[i] in self.lengths]
        if free is None or not moved:
            return None
        variables = tuple(free if i in moved else variable for i, variable in enumerate(self.variables))
        return replace(self, variables=variables, sizes={**self.sizes, free: self.slots[moved[0]].size})

    def paths_along(self, variable: str) -> list[str]:
        """The tensors with a dimension that follows this variable."""
        paths = [slot.path for slot, own in zip(self.slots, self.variables, strict=True) if own == variable]
        return list(dict.fromkeys(paths))


def slots_of(batch: Any) -> tuple[Slot, ...]:
    found: list[Slot] = []
    _add_slots(batch, "", found, describe(batch).structure)
    return tuple(found)


def _add_slots(value: Any, path: str, found: list[Slot], structure: Any) -> None:
    kind = structure[0]
    if kind == "tensor":
        is_integer = not (value.is_floating_point() or value.is_complex())
        found += [Slot(path or "0", dim, size, is_integer, value.dim()) for dim, size in enumerate(value.shape)]
    elif kind == "dict":
        for (name, item), (_, inner) in zip(value.items(), structure[1], strict=True):
            _add_slots(item, f"{path}.{name}" if path else str(name), found, inner)
    elif kind == "items":
        found.append(Slot(path, None, len(value)))
        _add_slots(value[0], f"{path}.0", found, structure[1])
    elif kind == "list":
        for index, (item, inner) in enumerate(zip(value, structure[1], strict=True)):
            _add_slots(item, f"{path}.{index}" if path else str(index), found, inner)
    elif kind == "parts":
        for name, inner in structure[2]:
            item = getattr(value, name) if not isinstance(value, dict) else value[name]
            _add_slots(item, f"{path}.{name}" if path else str(name), found, inner)


def suggest_layouts(batch: Any) -> list[Layout]:
    """Layouts to try, the one with most variables first; the last one fixes every length."""
    slots = slots_of(batch)
    shape = read_shape(batch)
    variables: list[str | None] = [None] * len(slots)
    factors = [1] * len(slots)
    for index, slot in enumerate(slots):
        factor = _rows_per_sample(slot, shape.batch_size)
        if factor:
            variables[index], factors[index] = SAMPLES, factor
    plain = Layout(describe(batch).structure, slots, tuple(variables), tuple(factors), {SAMPLES: shape.batch_size})
    if not any(variable == SAMPLES for variable in variables):
        return [replace(plain, sizes={})]
    if shape.seq_len is None:
        return [plain]
    with_integers = _with_lengths(plain, slots, shape.seq_len, floats_too=False)
    with_floats = _with_lengths(plain, slots, shape.seq_len, floats_too=True)
    tried = [with_floats, with_integers, plain]
    return [layout for index, layout in enumerate(tried) if layout not in tried[:index]]


def _rows_per_sample(slot: Slot, batch_size: int) -> int | None:
    if slot.name in FLAT_IMAGES or slot.name in FLAT_IMAGES.values():
        return slot.size // batch_size if slot.dim == 0 and slot.size % batch_size == 0 else None
    if slot.dim not in (0, None) or (slot.dim is None and "." in slot.path):
        return None
    is_inside_list = slot.dim == 0 and "." in slot.path and slot.path.rpartition(".")[2].isdigit()
    if slot.size == batch_size and not is_inside_list:
        return 1
    # Only pixels (rank 4) may have several rows per sample, one per image.
    return slot.size // batch_size if slot.size % batch_size == 0 and slot.rank == 4 and not is_inside_list else None


def _with_lengths(plain: Layout, slots: Sequence[Slot], seq_len: int, *, floats_too: bool) -> Layout:
    """Make dimensions after the first variable: those of integers (token ids, masks), and of floats of equal size."""
    main = next((name for name in MAIN_SEQUENCE if any(slot.path == name for slot in slots)), None)
    # Equal sizes are taken for one length; `fit.separate_lengths` tests whether they are.
    variables = list(plain.variables)
    sizes: dict[int, str] = {seq_len: LENGTHS[0]}
    for index, slot in enumerate(slots):
        if not slot.dim or slot.rank < 2 or slot.name in FLAT_IMAGES or slot.name in FLAT_IMAGES.values():
            continue
        is_sequence = (slot.is_integer and slot.dim == 1) or (slot.path == main and slot.dim == 1)
        if is_sequence and slot.size not in sizes and len(sizes) < len(LENGTHS):
            sizes[slot.size] = LENGTHS[len(sizes)]
        if slot.size in sizes and (is_sequence or slot.is_integer or floats_too):
            variables[index] = sizes[slot.size]
    used = {name: size for size, name in sizes.items() if name in variables}
    return replace(plain, variables=tuple(variables), sizes={**plain.sizes, **used})


def resized(batch: Any, layout: Layout, values: Mapping[str, int]) -> Any:
    """A batch in which the layout's variables have these values, made from a batch of one sample."""
    sizes = iter(layout.sizes_at(values))
    return _resized(batch, layout.structure, sizes)


def _resized(value: Any, structure: Any, sizes: Any) -> Any:
    kind = structure[0]
    if kind == "tensor":
        for dim in range(value.dim()):
            value = _stretched(value, dim, next(sizes))
        return value
    if kind == "dict":
        pairs = zip(value.items(), structure[1], strict=True)
        return {name: _resized(item, inner, sizes) for (name, item), (_, inner) in pairs}
    if kind == "items":
        count = next(sizes)
        return [_resized(value[0], structure[1], sizes)] * count
    if kind == "list":
        items = [_resized(item, inner, sizes) for item, inner in zip(value, structure[1], strict=True)]
        return tuple(items) if isinstance(value, tuple) else items
    if kind == "parts":  # a user-defined object stays unchanged, because its parts may depend on each other
        for _ in range(_size_count(structure)):
            next(sizes)
    return value


def _size_count(structure: Any) -> int:
    """The number of sizes that belong to a structure."""
    kind = structure[0]
    if kind == "tensor":
        return int(structure[2])
    if kind == "items":
        return 1 + _size_count(structure[1])
    if kind == "list":
        return sum(map(_size_count, structure[1]))
    if kind in ("dict", "parts"):
        return sum(_size_count(inner) for _, inner in structure[-1])
    return 0


def _stretched(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Cut a dimension at its end, or lengthen it: samples are repeated, and of a sequence the last position."""
    have = value.shape[dim]
    if size == have:
        return value
    if size < have:
        return value.narrow(dim, 0, size)
    if dim == 0 and size % have == 0:
        return torch.cat([value] * (size // have))
    # A repeated position has valid token ids.
    last = value.narrow(dim, have - 1, 1)
    shape = list(value.shape)
    shape[dim] = size - have
    return torch.cat([value, last.expand(shape)], dim)


Grid = tuple[int, int, int]
"""Frames, rows and columns of patches of one image or video."""
_TOKEN_NAMES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


@dataclass(frozen=True)
class Sample:
    """One sample of a batch without its padding.

    Attributes:
        one: The sample as a batch of size 1.
        layout: Which of its sizes can be changed.
        image_tokens: Ids of image placeholders. Their number does not change with the length, because the model checks
            it against the pixels.
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
        """The shortest length that keeps all placeholders."""
        ids = tensors_of(self.one).get("input_ids")
        if ids is None or not self.image_tokens or ids.dim() != 2:
            return 1
        placeholders = torch.isin(ids[0].cpu(), torch.tensor(self.image_tokens)).nonzero()
        return int(placeholders.max()) + 2 if placeholders.numel() else 1

    def batch(self, values: Mapping[str, int]) -> Any:
        """A batch of copies of the sample in which the layout's variables have these values."""
        return resized(self.one, self.layout, values)

    def with_layout(self, layout: Layout) -> "Sample":
        return replace(self, layout=layout)

    def with_grids(self, grids: Sequence[Grid], length: int) -> Any:
        """A batch of the same sample with other images, and with patches and placeholders that match them."""
        tensors = named(self.one)
        per_patch = tensors["pixel_values"].shape[1]
        counts = [prod(grid) // self.merge**2 for grid in grids]
        # The last token is text. It separates the images and fills the rest of the sequence.
        text = int(tensors["input_ids"][0, -1])
        ids = [text]
        for count in counts:
            ids += [self.image_tokens[0]] * count + [text]
        row = torch.tensor([ids + [text] * (length - len(ids))])
        # A trace only needs the shape of pixels.
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
    """The samples of a batch repeated, images included."""
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
    """One sample of every argument that has one per sample; shared arguments stay unchanged."""
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
    """The length variable of this mask."""
    pairs = zip(layout.slots, layout.variables, strict=True)
    return next((own for slot, own in pairs if slot.path == mask and slot.dim == 1 and slot.rank == 2), None)


def without_padding(sample: Any, layout: Layout, mask: str = "attention_mask") -> Any:
    """One sample without its padding, in all tensors that have the mask's length."""
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
