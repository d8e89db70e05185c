"""Adds up the FLOPs of a step's ops by phase, op, module and compute type, and lists ops without a formula."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Literal

import torch

from flopwatch.flops.formulas.registry import OpFlops
from flopwatch.records.flops import AttentionConvention, FlopCount, Method, PhaseFlops, UncountedOp

UNMASKED_PRODUCTS = "attention in the form of plain matrix products counts masked pairs too, as its mask is not visible"

UNKNOWN_TYPE = "unknown"

Phase = Literal["forward", "backward", "recompute"]


class Tally:
    """Sums of FLOPs; `as_count` returns them as a `FlopCount`."""

    def __init__(self) -> None:
        # The outer keys are (op, module, compute type), the inner keys are phases.
        self._flops: dict[tuple[str, str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._counted_calls = 0
        self._uncounted: Counter[tuple[str, str, tuple[tuple[int, ...], ...]]] = Counter()
        self._notes: dict[str, None] = {}

    def add(self, op: str, module: str, phase: Phase, flops: OpFlops, dtype: str | None = None) -> None:
        """Add the FLOPs of one call. `dtype` is the compute type, unless the formula gives another."""
        self._counted_calls += 1
        cell = self._flops[op, module, flops.dtype or dtype or UNKNOWN_TYPE]
        cell[phase] += flops.needed
        # Extra FLOPs count like recomputation: the hardware executes them, but the model does not need them.
        cell["recompute"] += flops.extra
        self.note(flops.note)

    def add_uncounted(self, op: str, module: str, tensors: Iterable[torch.Tensor]) -> None:
        # Reading the shape of a nested tensor raises an error.
        self._uncounted[op, module, tuple(() if tensor.is_nested else tuple(tensor.shape) for tensor in tensors)] += 1

    def note(self, text: str | None) -> None:
        if text:
            self._notes[text] = None

    def add_to(self, other: "Tally") -> None:
        """Add everything to another tally."""
        for key, cell in self._flops.items():
            for phase, flops in cell.items():
                other._flops[key][phase] += flops
        other._counted_calls += self._counted_calls
        other._uncounted += self._uncounted
        other._notes |= self._notes

    def as_count(self, method: Method, attention: AttentionConvention) -> FlopCount:
        by_op = self._grouped(0)
        if attention == "causal":
            # All fused attention ops have one of these words in their names.
            is_fused = any("attention" in op or "attn" in op for op in by_op)
            if not is_fused or any("bmm" in op for op in by_op):
                self.note(UNMASKED_PRODUCTS)
            # Without fused attention no masked pair was left out, so the count is `full` and not `causal`.
            attention = "causal" if is_fused else "full"
        total = sum(by_op.values(), PhaseFlops())
        uncounted_calls = sum(self._uncounted.values())
        calls = self._counted_calls + uncounted_calls
        return FlopCount(
            model_flops=total.forward + total.backward,
            hardware_flops=total.total,
            forward_flops=total.forward,
            backward_flops=total.backward,
            recompute_flops=total.recompute,
            method=method,
            attention=attention,
            coverage=self._counted_calls / calls if calls else 1.0,
            uncounted=tuple(UncountedOp(*key, calls) for key, calls in self._uncounted.items()),
            by_op=by_op,
            by_module=self._grouped(1),
            by_dtype={dtype: flops for dtype, flops in self._grouped(2).items() if flops.total},
            notes=tuple(self._notes),
        )

    def _grouped(self, part: int) -> dict[str, PhaseFlops]:
        groups: dict[str, PhaseFlops] = defaultdict(PhaseFlops)
        for key, cell in self._flops.items():
            groups[key[part]] += PhaseFlops(cell["forward"], cell["backward"], cell["recompute"])
        return dict(groups)
