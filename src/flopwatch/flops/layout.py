"""Which sizes of a batch may vary together: the variables of a FLOP law.

Every size of a batch is a slot. A layout gives some slots a variable (`n` samples, `s` positions of the main sequence,
`t`, `u` of other sequences) and keeps all others as they are in the example. Names and equal sizes only suggest a
layout: the law is verified by counting with its variables moved, and a batch belongs to it only if each of its sizes
agrees with the layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flopwatch.flops.batches import FLAT_IMAGES, MAIN_SEQUENCE, read_shape
from flopwatch.flops.structure import Description, describe

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
        """Of the argument it belongs to."""
        return self.path.partition(".")[0]


@dataclass(frozen=True)
class Layout:
    """Which slot follows which variable.

    Attributes:
        slots: All sizes of the example, in the order of `Description.sizes`.
        variables: The variable of each slot, or None where the size stays as it is.
        factors: A slot's size is this many times its variable (three images per sample).
        sizes: Of the variables in the example.
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
        """The values of the variables in this batch; None when it does not belong to the layout."""
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
        """The size of every slot when the variables have these values; others keep that of the example."""
        return [
            slot.size if variable is None else factor * values.get(variable, self.sizes[variable])
            for slot, variable, factor in zip(self.slots, self.variables, self.factors, strict=True)
        ]

    def without(self, *names: str) -> "Layout":
        """The same with these variables held at their size in the example."""
        variables = tuple(None if variable in names else variable for variable in self.variables)
        return replace(self, variables=variables, sizes={k: v for k, v in self.sizes.items() if k not in names})

    def with_own_length(self, path: str) -> "Layout | None":
        """The same, where the tensor at `path` has a length of its own; None when there are too many lengths."""
        free = next((name for name in LENGTHS if name not in self.sizes), None)
        moved = [i for i, slot in enumerate(self.slots) if slot.path == path and self.variables[i] in self.lengths]
        if free is None or not moved:
            return None
        variables = tuple(free if i in moved else variable for i, variable in enumerate(self.variables))
        return replace(self, variables=variables, sizes={**self.sizes, free: self.slots[moved[0]].size})

    def paths_along(self, variable: str) -> list[str]:
        """The tensors that have a dimension which follows this variable."""
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
    """Layouts worth a try, the one with most variables first; the last holds every length at its size."""
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
    return slot.size // batch_size if slot.size % batch_size == 0 and slot.rank == 4 and not is_inside_list else None


def _with_lengths(plain: Layout, slots: Sequence[Slot], seq_len: int, *, floats_too: bool) -> Layout:
    """Dimensions after the first: those of integers (token ids, labels, masks), and of floats of the same size."""
    main = next((name for name in MAIN_SEQUENCE if any(slot.path == name for slot in slots)), None)
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
    """A batch of one sample, made into one in which the layout's variables have these values."""
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
    if kind == "parts":
        return _skipped(value, structure, sizes)
    return value


def _skipped(value: Any, structure: Any, sizes: Any) -> Any:
    """Objects of somebody's own are never resized; their sizes must be as they are."""
    for _ in slots_of_structure(structure):
        next(sizes)
    return value


def slots_of_structure(structure: Any) -> range:
    """As many as the structure has sizes."""
    kind = structure[0]
    if kind == "tensor":
        return range(structure[2])
    if kind == "items":
        return range(1 + len(slots_of_structure(structure[1])))
    if kind == "dict":
        return range(sum(len(slots_of_structure(inner)) for _, inner in structure[1]))
    if kind == "list":
        return range(sum(len(slots_of_structure(inner)) for inner in structure[1]))
    if kind == "parts":
        return range(sum(len(slots_of_structure(inner)) for _, inner in structure[2]))
    return range(0)


def _stretched(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Cut at the end; to be longer, samples are repeated, and of a sequence the last position."""
    have = value.shape[dim]
    if size == have:
        return value
    if size < have:
        return value.narrow(dim, 0, size)
    if dim == 0 and size % have == 0:
        return torch.cat([value] * (size // have))
    last = value.narrow(dim, have - 1, 1)
    shape = list(value.shape)
    shape[dim] = size - have
    return torch.cat([value, last.expand(shape)], dim)
