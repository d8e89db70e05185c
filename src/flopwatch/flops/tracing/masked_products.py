"""Leaves masked pairs out of attention that a model writes as plain matrix products (eager attention).

Such attention multiplies queries with keys, adds a mask to the scores or fills them under it, and multiplies the result
with the values. No op is told of the mask, so it is read where it meets the scores: in a trace too, masks that are made
from positions and from the batch are real tensors. All products of the module over these pairs (two in the forward
pass, four in the backward pass) then count the pairs that the mask allows.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flopwatch.flops.formulas.attention import unmasked_pairs
from flopwatch.flops.formulas.matrices import FACTORS
from flopwatch.flops.formulas.registry import OpCall, OpFlops
from flopwatch.flops.tracing.custom_functions import ByStorage, storage_of
from flopwatch.torch_internals.ops import FakeTensor, op_name, tensor_version

_PRODUCTS = ("aten::bmm", "aten::baddbmm")
_ADD = (torch.ops.aten.add, torch.ops.aten.add_)
_FILL = (torch.ops.aten.masked_fill, torch.ops.aten.masked_fill_)
_WHERE = torch.ops.aten.where
_MEET_MASKS = {*_ADD, *_FILL, _WHERE}
# A fill from here down hides a pair: its exponential is 0 in every type. Others, such as 0, are no mask of a softmax.
_HIDES = -1000.0


@dataclass(frozen=True, slots=True)
class Product:
    """One batched product: its place in the tally, its FLOPs by phase, and its sizes."""

    op: str
    module: str
    dtype: str
    phase: str
    needed: int
    extra: int
    batch: int
    sizes: tuple[int, int, int]
    """Rows, contracted and columns."""

    def is_over(self, scores: "Scores") -> bool:
        """Whether two of its three dimensions are the queries and the keys."""
        return not Counter((scores.queries, scores.keys)) - Counter(self.sizes)

    @property
    def is_outer(self) -> bool:
        """Whether it only multiplies a column with a row, such as positions with the frequencies of an embedding."""
        return self.sizes[1] == 1


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of attention that met a mask: their sizes, and how many of all pairs the mask allows."""

    planes: int
    queries: int
    keys: int
    allowed: int

    @property
    def pairs(self) -> int:
        return self.planes * self.queries * self.keys


class MaskedProducts:
    def __init__(self) -> None:
        self._products: dict[str, list[Product]] = defaultdict(list)
        # Masks by module and by the place of the product that gave the scores; None where one cannot be read.
        self._masks: dict[str, dict[int, list[Scores | None]]] = defaultdict(lambda: defaultdict(list))
        self._allowed = ByStorage()

    def note_product(self, call: OpCall, module: str, phase: str, flops: OpFlops) -> None:
        name = op_name(call.func).removesuffix("_")
        if name not in _PRODUCTS:
            return
        left, right = (call.arguments[factor] for factor in FACTORS[name])
        batch, rows, contracted = (int(size) for size in left.shape)
        sizes = rows, contracted, int(right.shape[-1])
        op, dtype = op_name(call.func).removeprefix("aten::"), flops.dtype or "unknown"
        self._products[module].append(Product(op, module, dtype, phase, flops.needed, flops.extra, batch, sizes))

    def numbers(self) -> dict[str, int]:
        """How many products each module has run so far."""
        return {module: len(products) for module, products in self._products.items()}

    def forget_after(self, numbers: dict[str, int]) -> None:
        """Forget products that are not counted after all, and their masks."""
        for module, products in self._products.items():
            number = numbers.get(module, 0)
            del products[number:]
            for place in [each for each in self._masks[module] if each > number]:
                del self._masks[module][place]

    def note_mask(self, func: Any, args: tuple[Any, ...], module: str) -> None:
        """If an op of the forward pass combines scores of attention with a mask, remember what the mask allows."""
        packet = func.overloadpacket
        if packet not in _MEET_MASKS or not self._products.get(module):
            return
        last = self._products[module][-1]
        queries, _, keys = last.sizes
        pairs = last.batch * queries * keys
        found = _scores_and_mask(
            packet, args, lambda each: each.shape[-2:] == (queries, keys) and each.numel() == pairs
        )
        if found is None or not pairs:
            return
        mask, fills_where_true = found
        allowed = self._allowed_by(mask, fills_where_true) if pairs % mask.numel() == 0 else None
        # A mask with fewer dimensions, heads or samples than the scores is broadcast to all of them.
        total = None if allowed is None else allowed * (pairs // mask.numel())
        # Numbers that mask nothing are a bias, such as that of relative positions; zeros or False are a mask.
        if total != pairs or mask.dtype == torch.bool or not mask.any():
            met = None if total is None else Scores(last.batch, queries, keys, total)
            self._masks[module][len(self._products[module])].append(met)

    def _allowed_by(self, mask: torch.Tensor, fills_where_true: bool) -> int | None:
        """How many elements of a mask allow their pair; None if it cannot be read. Layers often share a mask."""
        # Parts of one storage can be different masks, and a mask can be written between two layers.
        version = None if mask.is_inference() else tensor_version(mask)
        read_as = mask.shape, mask.stride(), mask.storage_offset(), mask.dtype, version, fills_where_true
        known = self._allowed.get(storage_of(mask))
        if version is None or known is None or known[0] != read_as:
            true = unmasked_pairs(mask, mask.numel())
            known = read_as, mask.numel() - true if fills_where_true and true is not None else true
            self._allowed.put(storage_of(mask), known)
        return known[1]  # type: ignore[no-any-return]

    def masked_flops(self) -> tuple[list[tuple[Product, int, int]], bool]:
        """Return each product under a mask with its needed and extra FLOPs on masked pairs.

        The second value says whether there are products whose mask is not known, which may be attention too.
        """
        found: list[tuple[Product, int, int]] = []
        is_unknown = False
        for module, products in self._products.items():
            scores = self._one_mask(module)
            for product in products:
                if scores is not None and product.batch == scores.planes and product.is_over(scores):
                    masked = scores.pairs - scores.allowed
                    needed, extra = (part * masked // scores.pairs for part in (product.needed, product.extra))
                    found.append((product, needed, extra))
                elif not product.is_outer:
                    is_unknown = True
        return found, is_unknown

    def _one_mask(self, module: str) -> Scores | None:
        """The mask of all attention in a module; None if it is not certain that there is one mask for all of it."""
        of_scores = [_without_idle(each) for each in self._masks.get(module, {}).values() if any(each)]
        met = {mask for masks in of_scores for mask in masks}
        scores = met.pop() if len(met) == 1 else None
        if scores is None or any(len(masks) > 1 for masks in of_scores):
            return None
        over = [each for each in self._products[module] if each.phase == "forward" and each.is_over(scores)]
        return scores if len(over) == 2 * len(of_scores) else None


def _without_idle(masks: list[Scores | None]) -> list[Scores | None]:
    """Leave out masks that allow all pairs, if there are others on the same scores."""
    return [each for each in masks if each is None or each.allowed < each.pairs] or masks[:1]


def _scores_and_mask(
    packet: Any, args: tuple[Any, ...], is_scores: Callable[[torch.Tensor], bool]
) -> tuple[torch.Tensor, bool] | None:
    """Return the mask that an op combines with scores, and whether it masks where it is True; None if there is none."""
    first, second, third = (*args, None, None, None)[:3]
    if packet is _WHERE:
        if _is(second, is_scores) and _hides(third):
            return first, False
        return (first, True) if _is(third, is_scores) and _hides(second) else None
    if packet in _FILL:
        return (second, True) if _is(first, is_scores) and _hides(third) else None
    for scores, mask in ((first, second), (second, first)):
        if _is(scores, is_scores) and isinstance(mask, torch.Tensor) and mask.is_floating_point():
            return mask, False
    return None


def _is(value: Any, is_scores: Callable[[torch.Tensor], bool]) -> bool:
    return isinstance(value, torch.Tensor) and is_scores(value)


def _hides(value: Any) -> bool:
    """Whether a softmax gives 0 to a score that was replaced by this value."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or isinstance(value, FakeTensor) or value.device.type == "meta":
            return False
        value = value.item()
    return isinstance(value, int | float) and value <= _HIDES
