"""The results of counting FLOPs and of looking up a device's peak FLOP/s. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flopwatch.decode import Stored
from flopwatch.language import Templates
from flopwatch.numbers import percent
from flopwatch.present.notebook import html_table

Method = Literal["trace", "step", "estimate", "flops_fn"]
AttentionConvention = Literal["full", "causal"]
Confidence = Literal["high", "medium", "low"]


PEAK_WORDS: Templates = {
    "datasheet": "datasheet",
    "derived": "derived",
    "measured": "measured",
    "override": "override",
    "high": "high",
    "medium": "medium",
    "low": "low",
}
"""Kinds of peaks, and how sure they are, for people."""


@dataclass(frozen=True, slots=True)
class Peak(Stored):
    """The peak FLOP/s of a device for one compute type, and where the figure comes from.

    Attributes:
        flops_per_s: Dense FLOP/s of one torch device.
        device: The product, or the name that the device reports.
        dtype: The compute type: `bf16`, `fp16`, `tf32`, `fp32`, `fp8`, ...
        source: Where the figure comes from, as a text for people.
        kind: `datasheet`, `derived` (units x rate x clock), `measured` (best GEMM) or `override` (by the user).
        confidence: How reliable the source is.
        fraction: Share of the product that is visible (below 1.0 on MIG slices and AMD partitions).
    """

    flops_per_s: float
    device: str
    dtype: str
    source: str
    kind: Literal["datasheet", "derived", "measured", "override"]
    confidence: Confidence
    fraction: float = 1.0


@dataclass(frozen=True, slots=True)
class PhaseFlops:
    """Executed FLOPs by phase. `recompute` is the work that checkpointing and fused attention run a second time."""

    forward: int = 0
    backward: int = 0
    recompute: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.recompute

    def __add__(self, other: "PhaseFlops") -> "PhaseFlops":
        return PhaseFlops(
            self.forward + other.forward, self.backward + other.backward, self.recompute + other.recompute
        )


@dataclass(frozen=True, slots=True)
class ConventionFlops(Stored):
    """The FLOPs of one step as a publisher of performance tables counts them.

    Attributes:
        convention: Its name, such as `megatron`.
        flops: Forward and backward; None if the convention does not define them for this model.
        attention: Which pairs of positions it counts in attention.
        source: Where the publisher states the convention.
        why_not: Why there are no `flops`.
    """

    convention: str
    flops: int | None
    attention: AttentionConvention
    source: str
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class UncountedOp:
    """A matmul-like op that ran, but for which flopwatch has no FLOP formula."""

    op: str
    module: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int


@dataclass(frozen=True, slots=True)
class FlopCount(Stored):
    """The FLOPs of one step.

    Attributes:
        model_flops: FLOPs that a training step needs: forward and backward, without recomputation and padding.
        hardware_flops: Executed FLOPs: forward, backward, recomputation, padding.
        forward_flops: Executed in the forward pass, padding included.
        backward_flops: Executed in the backward pass, with padding and without recomputation.
        recompute_flops: Executed a second time, by activation checkpointing or by the backward pass of fused attention.
        padding_flops: The part of forward and backward spent on tokens that `attention_mask` marks as padding.
        coverage: Share of the matmul-like op calls that had a formula; None if no op was traced (method `estimate`).
        uncounted: The ops without a formula, with module and shapes.
        by_op: Executed FLOPs by op.
        by_module: Executed FLOPs by the innermost module that ran them; `""` is the model itself.
        method: How the FLOPs were counted.
        attention: Which pairs of positions count in attention: all (`full`) or those that are not masked (`causal`).
        notes: Fallbacks that were used, and facts that could not be determined.
        steered_by: What determines tensor sizes inside the model besides the shapes of its inputs: the names of
            arguments whose values matter, `a random draw` or `activations`.
        values_read: Like `steered_by`, for values that the model's Python code has read, so it may branch on them.
        by_dtype: Executed FLOPs by compute type (`bf16`, `fp32`, `int8`, ...); `fp32` includes products that the device
            may compute in tf32. Empty if no op was traced.
    """

    model_flops: int
    hardware_flops: int
    forward_flops: int
    backward_flops: int
    recompute_flops: int
    method: Method
    attention: AttentionConvention
    padding_flops: int = 0
    coverage: float | None = None
    uncounted: tuple[UncountedOp, ...] = ()
    by_op: Mapping[str, PhaseFlops] = field(default_factory=dict, repr=False)
    by_module: Mapping[str, PhaseFlops] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    steered_by: tuple[str, ...] = ()
    values_read: tuple[str, ...] = ()
    by_dtype: Mapping[str, PhaseFlops] = field(default_factory=dict, repr=False)

    @property
    def is_lower_bound(self) -> bool:
        """True if some matmul-like op had no formula, so that the true count is higher."""
        return bool(self.uncounted)

    def _repr_html_(self) -> str:
        at_least = "at least " if self.is_lower_bound else ""
        amounts = {
            "model FLOPs": self.model_flops,
            "executed FLOPs": self.hardware_flops,
            "forward": self.forward_flops,
            "backward": self.backward_flops,
            "recomputed": self.recompute_flops,
            "padding": self.padding_flops,
        }
        lines = [(label, f"{at_least}{amount:,}") for label, amount in amounts.items() if amount]
        if self.coverage is not None:
            lines.append(("ops with a formula", percent(self.coverage)))
        lines += [("not counted", f"{op.op} in {op.module or 'the model itself'}") for op in self.uncounted]
        lines += [("note", note) for note in self.notes]
        return html_table(f"FLOPs of one step, by {self.method}, attention {self.attention}", lines)
