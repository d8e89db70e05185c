"""The results of counting and of the peak lookup: frozen records with a JSON form. Standard library only."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Method = Literal["trace", "step", "estimate", "flops_fn"]
AttentionConvention = Literal["full", "causal"]
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of a device, with its source.

    Attributes:
        flops_per_s: Dense FLOP/s of one device as the framework enumerates it.
        device: The product, or the name that the device reports.
        dtype: The compute type: `bf16`, `fp16`, `tf32`, `fp32`, `fp8`, ...
        source: Where the figure comes from, in words.
        kind: `datasheet`, `derived` (units x rate x clock), `measured` (best GEMM) or `override` (by the user).
        confidence: How reliable the source is.
        fraction: Visible share of the device (MIG slices, AMD partitions); 1.0 for a whole device.
    """

    flops_per_s: float
    device: str
    dtype: str
    source: str
    kind: Literal["datasheet", "derived", "measured", "override"]
    confidence: Confidence
    fraction: float = 1.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PhaseFlops:
    """Executed FLOPs by phase. `recompute` is what checkpointing and fused attention run a second time."""

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
class UncountedOp:
    """A matmul-like op that ran and has no formula."""

    op: str
    module: str
    shapes: tuple[tuple[int, ...], ...]
    calls: int


@dataclass(frozen=True, slots=True)
class FlopCount:
    """The FLOPs of one step.

    Attributes:
        model_flops: FLOPs that the mathematics needs: forward and the needed backward, no recomputation, no padding.
        hardware_flops: Executed FLOPs: forward, backward, recomputation, padding.
        forward_flops: Executed in the forward pass, padding included.
        backward_flops: Executed in the backward pass, padding included, recomputation not.
        recompute_flops: Executed a second time: activation checkpointing, fused attention's backward.
        padding_flops: The part of forward and backward spent on tokens that `attention_mask` marks as padding.
        coverage: Share of the matmul-like op calls that had a formula; None if no op was seen (`estimate`).
        uncounted: The ops without a formula, with module and shapes.
        by_op: Executed FLOPs by op.
        by_module: Executed FLOPs by the innermost module that ran them; `""` is the model itself.
        method: How the number was found.
        attention: Which pairs of positions count: all (`full`) or those not masked (`causal`).
        notes: What to know before using the number: fallbacks, and what could not be determined.
        steered_by: What decides sizes inside the model besides shapes: names of arguments whose values do,
            `a random draw`, `activations`.
        values_read: The same for values that Python code has read and may use in decisions.
        mode_risks: Ops whose last bits may differ under a dispatch mode; a training with such ops is never counted as
            it runs.
        by_dtype: Executed FLOPs by the type the products ran in (`bf16`, `fp32`, `int8`, ...; fp32 also if the device
            may use tf32 for it); empty if no op was seen.
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
    mode_risks: tuple[str, ...] = ()
    by_dtype: Mapping[str, PhaseFlops] = field(default_factory=dict, repr=False)

    @property
    def is_lower_bound(self) -> bool:
        """True if some matmul-like op had no formula, so that the true count is higher."""
        return bool(self.uncounted)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
