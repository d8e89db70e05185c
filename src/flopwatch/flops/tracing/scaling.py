"""Finds out how the FLOPs of an op depend on the lengths of a batch's rows, from the sizes of its factors.

A padded or packed batch runs more than its documents need. How much more follows from what each product is made of: one
with a factor for every position needs the share of real positions, one for every pair of positions the share of real
pairs. The products of the backward pass follow the product of the forward pass whose gradients they compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from flopwatch.flops.formulas.matrices import FACTORS
from flopwatch.flops.formulas.registry import OpCall
from flopwatch.torch_internals.ops import GROUPED_MM, short_op_name

_MATRICES, _BATCHED = ("mm", "addmm", "_addmm_activation"), ("bmm", "baddbmm")
_GROUPED = "grouped"


class Axes(NamedTuple):
    """The shape of the micro-batch that is running: its rows, and the lengths of its sequences."""

    batch: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """How FLOPs grow: with the rows of the batch, its positions or its pairs of positions.

    Attributes:
        kind: What the FLOPs are proportional to; `unclear` if the sizes do not show it. `shifted` is all positions but
            one of each document, as in a loss that has no label for the last one. `longest` is the longest document, in
            a product that all rows share, such as the angles of rotary embeddings in transformers 4.
        axes: The shape of the micro-batch in which the op ran; None if the FLOPs do not depend on lengths.
        query, key: For positions, the index of the sequence in `axes.lengths`; for pairs, those of both sequences.
        is_causal: Whether only pairs were counted in which the key is not after the query.
    """

    kind: Literal["fixed", "positions", "shifted", "pairs", "longest", "unclear"]
    axes: Axes | None = None
    query: int = 0
    key: int = 0
    is_causal: bool = False


FIXED, UNCLEAR = Scale("fixed"), Scale("unclear")


Shape = tuple[int, ...]


class Product(NamedTuple):
    """What the sizes of a matrix product or of fused attention show, for batches whose shape is known only later.

    The shapes are those of its factors, or of query and key; `is_weight` says which factors are model parameters.
    """

    name: str
    shapes: tuple[Shape, ...]
    is_weight: tuple[bool, ...] = ()
    is_causal: bool = False


def product_of(call: OpCall, is_weight: Sequence[bool]) -> Product | None:
    """The op as a product; None if it is another op, or its sizes say nothing about lengths."""
    name = short_op_name(call.func).removesuffix("_")
    if name in _MATRICES or name in _BATCHED:
        return Product(name, tuple(tuple(factor.shape) for factor in factors_of(call)), tuple(is_weight))
    if call.func.overloadpacket is GROUPED_MM:
        return Product(_GROUPED, (tuple(call.arguments["self"].shape),))
    if "scaled_dot_product" in name:
        is_causal = call.attention == "causal" and bool(call.arguments.get("is_causal"))
        if call.attention == "full" or is_causal:
            shapes = tuple(call.arguments["query"].shape), tuple(call.arguments["key"].shape)
            return Product("attention", shapes, is_causal=is_causal)
    return None


def scale_of(product: Product | None, axes: Axes | None) -> Scale:
    """How the FLOPs of a forward op depend on lengths; `axes` are None if the micro-batch has no sequence."""
    # Two sequences of one length look alike.
    if product is None or axes is None or len(set(axes.lengths)) < len(axes.lengths):
        return UNCLEAR
    if product.name == _GROUPED:  # each position is multiplied with some of the groups
        rows = product.shapes[0][0]
        return Scale("positions", axes) if rows % (axes.batch * axes.lengths[0]) == 0 else UNCLEAR
    left, right = product.shapes
    if product.name in _MATRICES:
        return _of_matrices(left, right, axes, product.is_weight)
    if product.name in _BATCHED:
        return _of_batched(left, right, axes, product.is_weight)
    if left[0] != axes.batch:
        return UNCLEAR
    # Attention. No two sequences are equally long, so each size is the length of one at most.
    positions = _places((left[-2], right[-2]), axes.lengths)
    if len(positions) == 2:
        return Scale("pairs", axes, positions[0], positions[1], product.is_causal)
    return Scale("positions", axes, positions[0]) if positions else FIXED


def factors_of(call: OpCall) -> tuple[Any, ...]:
    name = short_op_name(call.func).removesuffix("_")
    is_product = name in _MATRICES or name in _BATCHED
    return tuple(call.arguments[each] for each in FACTORS[f"aten::{name}"]) if is_product else ()


def _of_matrices(left: Shape, right: Shape, axes: Axes, is_weight: Sequence[bool]) -> Scale:
    if all(is_weight):
        return FIXED
    rows, contracted, columns = left[0], left[1], right[1]
    # The sizes of a weight are never lengths, even if they are equal to one.
    sizes = [columns] if is_weight[0] else [rows] if is_weight[1] else [rows, contracted, columns]
    positions = _places(sizes, [axes.batch * length for length in axes.lengths])
    if len(positions) == 1:
        return Scale("positions", axes, positions[0])
    if len(positions) == 2 and axes.batch == 1 and len(sizes) == 3 and len(set(sizes)) == 2:
        return Scale("pairs", axes, positions[0], positions[1])
    shifted = _places(sizes, [axes.batch * (length - 1) for length in axes.lengths])
    if not positions and len(shifted) == 1 and axes.batch not in sizes:
        return Scale("shifted", axes, shifted[0])
    return FIXED if not positions and len(sizes) == 1 and sizes[0] == axes.batch else UNCLEAR


def _of_batched(left: Shape, right: Shape, axes: Axes, is_weight: Sequence[bool]) -> Scale:
    groups, rows, contracted = left
    if groups == 1 < axes.batch:
        if contracted == 1 and not any(is_weight):  # two vectors, multiplied once for all rows of the batch
            sizes, all_positions = (rows, right[2]), [axes.batch * length for length in axes.lengths]
            lengths = _places(sizes, axes.lengths)
            is_clear = len(lengths) == 1 and not _places(sizes, all_positions)
            return Scale("longest", axes, lengths[0]) if is_clear else UNCLEAR
        return _of_matrices(left[1:], right[1:], axes, is_weight)
    if groups % axes.batch:
        return UNCLEAR
    if all(is_weight):
        return FIXED
    left_over = [right[2]] if is_weight[0] else [rows] if is_weight[1] else [rows, contracted, right[2]]
    positions = _places(left_over, axes.lengths)
    # Three equal sizes are attention whose heads are as wide as the rows are long: one of them is no length.
    if len(positions) >= 2:
        return Scale("pairs", axes, positions[0], positions[1])
    return Scale("positions", axes, positions[0]) if positions else FIXED


def _places(sizes: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return [index for size in sizes for index, length in enumerate(lengths) if size == length]


class RowLengths(NamedTuple):
    """The real lengths of a micro-batch's documents, one list for each of its sequences.

    Attributes:
        sums: For each sequence, the sum of the documents' lengths.
        products: For each pair of sequences (query, key), the sum of the products of both lengths.
        longest: For each sequence, the length of the longest document; empty if it is not known.
    """

    axes: Axes
    sums: tuple[int, ...]
    products: Mapping[tuple[int, int], int]
    documents: int = 0
    longest: tuple[int, ...] = ()


def needed_flops(by_scale: Mapping[Scale, int], batches: Sequence[RowLengths]) -> tuple[int, bool]:
    """FLOPs that the documents of these micro-batches need alone, and whether all of them are clear.

    >>> axes = Axes(2, (8,))
    >>> half = RowLengths(axes, (8,), {(0, 0): 32})
    >>> needed_flops({Scale("positions", axes): 160, Scale("pairs", axes): 1280, FIXED: 5}, [half])
    (405, True)
    """
    total, is_clear = 0, True
    for scale, flops in by_scale.items():
        if scale.kind == "unclear":
            is_clear = is_clear and not flops
        if scale.axes is None:
            total += flops
            continue
        own = [batch for batch in batches if batch.axes == scale.axes]
        real, whole = _share(scale, own)
        is_clear = is_clear and bool(whole) and flops * real % whole == 0
        total += flops * real // whole if whole else flops
    return total, is_clear


def _share(scale: Scale, batches: Sequence[RowLengths]) -> tuple[int, int]:
    assert scale.axes is not None
    rows, lengths = scale.axes.batch * len(batches), scale.axes.lengths
    if scale.kind == "positions":
        return sum(batch.sums[scale.query] for batch in batches), rows * lengths[scale.query]
    if scale.kind == "shifted":
        real = sum(batch.sums[scale.query] - batch.documents for batch in batches)
        return real, rows * (lengths[scale.query] - 1)
    if scale.kind == "longest":
        real = sum(batch.longest[scale.query] for batch in batches if batch.longest)
        return real, len(batches) * lengths[scale.query] if all(batch.longest for batch in batches) else 0
    pair = scale.query, scale.key
    real = sum(batch.products[pair] for batch in batches)
    whole = rows * lengths[scale.query] * lengths[scale.key]
    if scale.is_causal:  # s(s + 1) / 2 pairs of s positions; both figures are doubled
        real += sum(batch.sums[scale.query] for batch in batches)
        whole += rows * lengths[scale.query]
    return real, whole
