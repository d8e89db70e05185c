"""Computes the FLOPs of a step from what it ran, and the time the device would need for them at its peak."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.flops.tracing.live import StepCount
from flopwatch.flops.tracing.scaling import Axes, RowLengths, Scale, needed_flops
from flopwatch.hardware import explain_unknown, matmul_dtype, peak_flops
from flopwatch.hardware.device import find_device
from flopwatch.hardware.measure import measured_peak
from flopwatch.hardware.peak_clock import TENSOR_TYPES
from flopwatch.language import Said
from flopwatch.monitor import notices
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.counting.batch_reader import BatchSizes
from flopwatch.monitor.counting.evidence import Evidence, StepKind, StepTrace
from flopwatch.monitor.counting.step_counter import StepCounter
from flopwatch.monitor.notices import Notify
from flopwatch.monitor.ranks.layout import shared_peak
from flopwatch.numbers import flop_rate
from flopwatch.records.flops import Peak, PhaseFlops
from flopwatch.records.run import Provenance

PARTIAL = Said("what ran before the first call of a module was not seen in this step, the first of the training")
_BY_LENGTH = ("positions", "shifted", "pairs", "longest")
PADDED = Said("model FLOPs include padding, because the sizes of some products do not show how they depend on it")
NOT_DIVIDED = Said(
    "model FLOPs include padding, because the calls of the step do not show which of them belong to which "
    "micro-batch; this is not needed if all micro-batches of a step are padded to one length"
)


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of a step as in `MeasuredStep`, also by compute type; None and an empty dict mean unknown."""

    model: int
    hardware: int | None = None
    recompute: int | None = None
    model_by_dtype: Mapping[str, int] = field(default_factory=dict)
    hardware_by_dtype: Mapping[str, int] = field(default_factory=dict)

    def times(self, factor: int) -> "StepFlops":
        return StepFlops(
            self.model * factor,
            None if self.hardware is None else self.hardware * factor,
            None if self.recompute is None else self.recompute * factor,
            {name: flops * factor for name, flops in self.model_by_dtype.items()},
            {name: flops * factor for name, flops in self.hardware_by_dtype.items()},
        )


class FlopCost(NamedTuple):
    """What a `MeasuredStep` says of the step's FLOPs.

    Attributes:
        reason: Why the FLOPs are not exact or not known; None if they are exact.
    """

    model_flops: int | None = None
    hardware_flops: int | None = None
    recompute_flops: int | None = None
    model_peak_seconds: float | None = None
    hardware_peak_seconds: float | None = None
    reason: str | None = None


class StepCosts:
    """Computes the FLOPs of steps.

    Attributes:
        devices_per_batch: Number of ranks that work on one batch (tensor, context or pipeline parallel). Counts are of
            this rank's part alone, and are multiplied by it, because reports of ranks that share a batch are averaged.
        repeated: Why ranks that share a batch may run the same products; None if they do not.
    """

    def __init__(
        self, config: MonitorConfig, counter: StepCounter, peak_flops_per_s: float | None, notify: Notify
    ) -> None:
        self._config, self._counter, self._notify = config, counter, notify
        self._peak_override = peak_flops_per_s or (config.peak_tflops * 1e12 if config.peak_tflops else None)
        self.peaks = Peaks(torch.device("cpu"), self._peak_override, config.dtype)
        self.devices_per_batch = 1
        self.repeated: str | None = None
        self._main_type: str | None = None
        self._types: dict[str, None] = {}
        self._newest: Mapping[str, int] = {}
        """Executed FLOPs of the newest step, by compute type."""
        self._last: tuple[Any, StepFlops] | None = None
        self._written: Any = None
        """The values from which the newest `Provenance` record was made. If they change, a new record is needed."""

    @property
    def peak(self) -> Peak | None:
        """The device's peak for the compute type in which most FLOPs are computed; None if unknown."""
        return None if self._main_type is None else self.peaks.of(self._main_type)

    @property
    def _types_in_use(self) -> set[str]:
        return {self.peaks.name(name) for name in (self._main_type, *self._types) if name is not None}

    def tensor_peak(self, mean_flops_per_s: float | None) -> float | None:
        """The peak of the tensor cores in the types that run on them; None if the main type does not, or is unknown.

        `mean_flops_per_s` is the mean over all types in use, which is right only if all of them run there.
        """
        peak = self.peak
        if peak is None or peak.dtype not in TENSOR_TYPES:
            return None
        if self._types_in_use.issubset(TENSOR_TYPES):
            return mean_flops_per_s
        seconds, flops = self.peaks.seconds(self._on_tensor_cores), sum(self._on_tensor_cores.values())
        return flops / seconds if seconds else peak.flops_per_s

    @property
    def tensor_share(self) -> float:
        """The share of the newest step's FLOPs in types of the tensor cores; 1 if none is, or if it is not known."""
        return sum(self._on_tensor_cores.values()) / (sum(self._newest.values()) or 1) or 1.0

    @property
    def _on_tensor_cores(self) -> dict[str, int]:
        return {name: flops for name, flops in self._newest.items() if self.peaks.name(name) in TENSOR_TYPES}

    def set_model(self, model: nn.Module) -> None:
        self.peaks = Peaks(device_of(model), self._peak_override, self._config.dtype)
        self.peaks.look_ahead()

    def cost(
        self, trace: StepTrace, step: int, batch_sizes: Sequence[BatchSizes] | None, user_flops: int | None
    ) -> FlopCost:
        """Compute the FLOPs of a step. `batch_sizes` is None if one of its batches could not be read."""
        if user_flops is not None:
            flops: StepFlops | None = StepFlops(user_flops)
            reason: str | None = Said("the FLOPs are those of the user's flops_fn")
        elif trace.estimates is not None:
            flops, reason = self._estimated(trace, batch_sizes)
        elif trace.kind is None or trace.evidence is None:
            flops, reason = None, trace.reason
        else:
            flops, reason = self._counted(trace, trace.kind, trace.evidence, step, batch_sizes)
            reason = trace.reason or reason or self.repeated
            if flops is not None and self.devices_per_batch > 1:
                flops = flops.times(self.devices_per_batch)
        if flops is None:
            return FlopCost(reason=reason)
        return FlopCost(flops.model, flops.hardware, flops.recompute, *self._peak_seconds(flops), reason)

    def _counted(
        self,
        trace: StepTrace,
        kind: StepKind,
        evidence: Evidence,
        step: int,
        batch_sizes: Sequence[BatchSizes] | None,
    ) -> tuple[StepFlops | None, str | None]:
        count, reason = trace.count, None
        if count is None:
            known = evidence.verdict(kind, step)
            count, reason = known.count, known.reason
        elif trace.is_partial and self._counter.evidence.starts_with_call is not True:
            reason = PARTIAL
        elif count.uncounted:
            reason = Said("ops without a formula are not in it ({ops}): a lower bound", ops=", ".join(count.uncounted))
        else:
            reason = count.doubt
        if count is None:
            return None, reason
        if batch_sizes is None:
            return None, Said("the step's batch was overwritten before it was read")
        if all(batch.documents is None for batch in batch_sizes):
            if self._last is None or self._last[0] is not count:
                self._last = count, _flops_of(count, 0)
            return self._last[1], reason
        padding, unclear = _padding(count, batch_sizes, kind, evidence)
        return _flops_of(count, padding), reason or unclear

    def _estimated(
        self, trace: StepTrace, batch_sizes: Sequence[BatchSizes] | None
    ) -> tuple[StepFlops | None, str | None]:
        assert trace.estimates is not None
        costs = [trace.estimates.cost(batch) for batch in batch_sizes or ()]
        known = [cost for cost in costs if cost is not None]
        if not known or len(known) < len(costs):
            return None, trace.reason
        model = sum(needed.forward + needed.backward for needed, _, _ in known)
        executed = sum((executed for _, executed, _ in known), PhaseFlops())
        remark = next((remark for _, _, remark in known if remark), None)
        return StepFlops(model, executed.total, executed.recompute), remark or trace.reason

    def _peak_seconds(self, flops: StepFlops) -> tuple[float | None, float | None]:
        if flops.model_by_dtype:
            self._main_type = max(flops.model_by_dtype, key=lambda name: flops.model_by_dtype[name])
        assumed = None if flops.model_by_dtype else weights_dtype(self._counter.model, self.peaks.device) or "fp32"
        self._main_type = self._main_type or assumed
        self._types |= dict.fromkeys(name for name, amount in flops.model_by_dtype.items() if amount)
        self._newest = flops.hardware_by_dtype or flops.model_by_dtype
        model = self.peaks.seconds(flops.model_by_dtype or {assumed or "fp32": flops.model})
        hardware = None
        if flops.hardware is not None:
            hardware = self.peaks.seconds(flops.hardware_by_dtype or {assumed or "fp32": flops.hardware})
        for name, why in self.peaks.why_unknown.items():
            self._notify(*notices.peak_unknown(name, why))
        return model, hardware

    def new_provenance(self, step: int, device_count: int) -> Provenance | None:
        """Return the record of how FLOPs and peak are found; None if it has not changed or is not known yet."""
        facts = self._counter.provenance()
        if facts is None:
            return None
        types = () if self._main_type is None else (self._main_type, *self._types)
        dtypes = tuple(dict.fromkeys(map(self.peaks.name, types)))  # the one with the most FLOPs first
        written = facts, self.peaks, self.peaks.ranks, dtypes
        if written == self._written:
            return None
        self._written = written
        if facts.coverage is not None and facts.coverage < 1:
            self._notify(
                *notices.notice("coverage_below_1", percent=100 * (1 - facts.coverage), notes="; ".join(facts.notes))
            )
        if facts.attention != self._config.attention:
            self._notify(*notices.notice("not_causal"))
        peak = self.peak
        return replace(
            facts,
            step=step,
            peak=None if peak is None else peak.to_json(),
            device_count=device_count,
            achievable_flops_per_s=self._achievable_flops_per_s(),
            dtypes=dtypes,
        )

    def _achievable_flops_per_s(self) -> float | None:
        """The rate of the fastest matrix product on the device. None if it was not measured well, or ranks share it."""
        peak = self.peak
        if peak is None or peak.kind in ("measured", "override") or self.peaks.ranks > 1:
            return None
        measured = measured_peak(self.peaks.device, peak.dtype)
        if measured is not None and measured.confidence == "low":
            self._notify(*notices.notice("measured_peak_not_used", rate=flop_rate(measured.flops_per_s)))
            return None
        return None if measured is None else measured.flops_per_s


def _flops_of(count: StepCount, padding: int) -> StepFlops:
    total, recompute = count.phases.total, count.phases.recompute
    model = total - recompute - padding
    types = count.by_dtype
    if not count.knows_executed:
        return StepFlops(model, None, None, _shares(types, model))
    return StepFlops(model, total, recompute, _shares(types, model), _shares(types, total))


def _padding(
    count: StepCount, batch_sizes: Sequence[BatchSizes], kind: StepKind, evidence: Evidence
) -> tuple[int, str | None]:
    """FLOPs that the step's documents would not need without padding; or 0, and why these FLOPs are not known."""
    needed = count.phases.total - count.phases.recompute
    batches = [batch for batch in map(_row_lengths, batch_sizes) if batch is not None]
    if len(batches) < len(batch_sizes):
        return 0, PADDED
    by_scale = count.by_scale
    if any(
        scale.axes is None and scale.kind in _BY_LENGTH for scale in by_scale
    ):  # the count comes from a fitted formula
        axes = [batch.axes for batch in batches]
        parts = [by_scale] if len(set(axes)) == 1 else evidence.divided(kind, axes)
        if parts is None:
            return 0, NOT_DIVIDED
        by_scale = _with_axes(parts, axes)
    alone, is_clear = needed_flops(by_scale, batches)
    if not is_clear or sum(by_scale.values()) != needed:
        return 0, PADDED
    return needed - alone, None


def _with_axes(parts: Sequence[Mapping[Scale, int]], axes: Sequence[Axes]) -> dict[Scale, int]:
    """The sum of the parts of a step, each of which ran on a micro-batch of its own shape."""
    sums: dict[Scale, int] = {}
    for part, own in zip(parts, axes, strict=False):
        for scale, flops in part.items():
            placed = replace(scale, axes=own) if scale.kind in _BY_LENGTH else scale
            sums[placed] = sums.get(placed, 0) + flops
    return sums


def _row_lengths(batch: BatchSizes) -> RowLengths | None:
    axes = batch.layout.axes
    if axes is None:
        return None
    rows = [batch.lengths or (axes.lengths[0],) * axes.batch]
    if len(axes.lengths) > 1:
        rows.append(batch.target_lengths or (axes.lengths[1],) * axes.batch)
    elif batch.documents is not None and batch.lengths is None:
        documents = batch.documents
        return RowLengths(axes, (documents.tokens,), {(0, 0): documents.squares}, documents.count)
    pairs = {
        (one, other): sum(a * b for a, b in zip(rows[one], rows[other], strict=True))
        for one in range(len(rows))
        for other in range(len(rows))
    }
    return RowLengths(axes, tuple(map(sum, rows)), pairs, axes.batch, tuple(map(max, rows)))


def _shares(by_dtype: Mapping[str, PhaseFlops], total: int) -> dict[str, int]:
    """Divide a total over compute types in proportion to the executed FLOPs."""
    if len(by_dtype) == 1:
        return {next(iter(by_dtype)): total}
    executed = sum(flops.total for flops in by_dtype.values())
    if not executed:
        return {}
    return {name: round(total * flops.total / executed) for name, flops in by_dtype.items()}


_USUAL_TYPES = ("fp32", "tf32", "bf16", "fp16")


def device_of(model: nn.Module | None) -> torch.device:
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None and parameter.device.type != "meta":
        return parameter.device
    return find_device()


def weights_dtype(model: nn.Module | None, device: torch.device) -> str | None:
    """The compute type that the model's weights suggest; None without floating-point weights."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None) if model is not None else None
    return matmul_dtype(device.type, parameter.dtype if parameter is not None else None)


class Peaks:
    """The peak FLOP/s of one device for each compute type, each looked up once.

    Attributes:
        ranks: How many ranks share the device.
        why_unknown: By compute type, why the peak is not known.
    """

    def __init__(self, device: torch.device, override_flops_per_s: float | None, dtype: str | None) -> None:
        self.device = device
        self.ranks = 1
        self.why_unknown: dict[str, str] = {}
        self._override = override_flops_per_s
        self._dtype = dtype
        self._whole: dict[str, tuple[Peak | None, str]] = {}
        """By compute type, the peak of the whole device, or None and the reason why it is unknown."""

    def look_ahead(self) -> None:
        """Look up the peaks of usual compute types now, because this reads files, which must not delay the training."""
        for name in (self._dtype,) if self._dtype else _USUAL_TYPES:
            self._ask(name)

    def of(self, compute_type: str) -> Peak | None:
        """The peak for the `dtype` that the user has set, otherwise for `compute_type`; None if unknown."""
        name = self.name(compute_type)
        peak, why = self._ask(name)
        if peak is None:
            self.why_unknown[name] = why
            return None
        return shared_peak(peak, self.ranks)

    def name(self, compute_type: str) -> str:
        """The compute type whose peak is used for products in this one: tf32 if torch computes fp32 products in it."""
        if not self._dtype and compute_type == "fp32" and self.device.type == "cuda":
            return matmul_dtype("cuda", torch.float32) or compute_type
        return self._dtype or compute_type

    def seconds(self, flops_by_dtype: Mapping[str, int]) -> float | None:
        """Seconds the device would need for these FLOPs at its peak; None if a peak is unknown."""
        total = 0.0
        for compute_type, flops in flops_by_dtype.items():
            if not flops:
                continue
            peak = self.of(compute_type)
            if peak is None:
                return None
            total += flops / peak.flops_per_s
        return total

    def _ask(self, name: str) -> tuple[Peak | None, str]:
        if name not in self._whole:
            try:
                peak = peak_flops(self.device, name, override_flops_per_s=self._override)
                self._whole[name] = peak, "" if peak is not None else explain_unknown(self.device, name)
            except InputError as error:
                self._whole[name] = None, str(error)
        return self._whole[name]
