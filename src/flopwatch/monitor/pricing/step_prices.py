"""Computes the FLOPs of a step from its calls and batches, and the time the device would need for them at its peak."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.hardware import explain_unknown, matmul_dtype, peak_flops
from flopwatch.hardware.device import find_device
from flopwatch.hardware.measure import measured_peak
from flopwatch.monitor import output as notices
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.output import Notify
from flopwatch.monitor.pricing.batch_reader import Work
from flopwatch.monitor.pricing.call_costs import CallCosts
from flopwatch.monitor.pricing.certificates import Certificates, StepCalls
from flopwatch.monitor.pricing.law_book import CallPrice, LawBook
from flopwatch.monitor.pricing.watched_step import StepCount
from flopwatch.monitor.ranks.layout import shared_peak
from flopwatch.records.flops import Peak, PhaseFlops
from flopwatch.records.run import Provenance


@dataclass(frozen=True, slots=True)
class StepFlops:
    """FLOPs of a step; None means unknown.

    Attributes:
        model: FLOPs that the model's mathematics needs, without padding and recomputation.
        hardware: FLOPs that are executed.
        recompute: The part of `hardware` that the backward pass computes again.
        model_by_dtype: Model FLOPs by compute type; empty if unknown.
        hardware_by_dtype: Executed FLOPs by compute type; empty if unknown.
        reason: Why the FLOPs are not exact; None if they are.
    """

    model: int
    hardware: int | None = None
    recompute: int | None = None
    model_by_dtype: Mapping[str, int] = field(default_factory=dict)
    hardware_by_dtype: Mapping[str, int] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class StepCost:
    """FLOPs of a step, and the time a device would need at its peak for the model FLOPs and for all executed FLOPs."""

    flops: StepFlops | None = None
    model_peak_seconds: float | None = None
    hardware_peak_seconds: float | None = None


class StepPricer:
    """Computes the FLOPs of steps.

    Attributes:
        peaks: Peak FLOP/s of this rank's device, by compute type.
    """

    def __init__(self, config: MonitorConfig, costs: CallCosts, peak_flops_per_s: float | None, notify: Notify) -> None:
        self._config = config
        self._costs = costs
        self._peak_override = peak_flops_per_s or (config.peak_tflops * 1e12 if config.peak_tflops else None)
        self._notify = notify
        self.peaks = Peaks(torch.device("cpu"), self._peak_override, config.dtype)
        self._main_type: str | None = None
        self._last_flops: dict[Any, StepFlops | None] = {}
        self._written: Any = None
        """The values from which the newest `Provenance` record was made. If they change, a new record is needed."""

    @property
    def peak(self) -> Peak | None:
        """The device's peak for the compute type in which most FLOPs are computed; None if unknown."""
        return None if self._main_type is None else self.peaks.of(self._main_type)

    def set_model(self, model: nn.Module) -> None:
        self.peaks = Peaks(device_of(model), self._peak_override, self._config.dtype)
        self.peaks.look_ahead()

    def cost(
        self, calls: StepCalls, works: Sequence[Work] | None, user_flops: int | None, why_not_watched: str | None
    ) -> StepCost:
        """Compute the FLOPs of a step.

        Args:
            calls: The step's calls of the model.
            works: Sizes of the step's batches; None if one of them could not be read.
            user_flops: FLOPs by the user's `flops_fn`; None without such a function.
            why_not_watched: Why steps are not counted as they run; None if they are.
        """
        if user_flops is not None:
            flops: StepFlops | None = StepFlops(user_flops, reason="the FLOPs are those of the user's flops_fn")
        else:
            flops = None if works is None else self._flops(calls, works, why_not_watched)
        return StepCost(flops, *self._peak_seconds(flops))

    def _flops(self, calls: StepCalls, works: Sequence[Work], why_not_watched: str | None) -> StepFlops | None:
        """Compute the FLOPs, or return the last result if the step equals the one before, as most steps do."""
        is_plain = not any(calls.own_prices) and all(work.documents is None and work.grids is None for work in works)
        if not is_plain or calls.certificates is None:
            return self._flops_of_kind(calls, works, why_not_watched)
        shapes = tuple((work.plan.batch_size, work.plan.seq_len) for work in works)
        key = calls.kind, shapes, calls.doubt, id(calls.certificates), calls.certificates.version
        if key not in self._last_flops:
            self._last_flops = {key: self._flops_of_kind(calls, works, why_not_watched)}
        return self._last_flops[key]

    def _flops_of_kind(self, calls: StepCalls, works: Sequence[Work], why_not_watched: str | None) -> StepFlops | None:
        book, certificates = calls.book or self._costs.mode.book, calls.certificates or self._costs.certificates
        if self._costs.has_given_up or book is None:
            return None
        prices = calls.prices(book)
        verdict = certificates.verdict(calls.kind, calls.pattern)
        if prices is None:
            if verdict.count is not None:
                return _counted(verdict.count, verdict.reason)
            if book.refused:
                self._notify(*notices.shapes_not_counted())
            return None
        priced = _priced(book, prices, works)
        if priced.model_by_dtype:
            self._main_type = max(priced.model_by_dtype, key=lambda name: priced.model_by_dtype[name])
        if verdict.finding == "counted" and verdict.count is not None:
            reason = verdict.reason or _steered(calls, prices, book, certificates)
            return _counted(verdict.count, reason, priced)
        doubt = calls.doubt or (why_not_watched if verdict.finding == "unseen" else None) or verdict.reason
        return replace(priced, reason=priced.reason or doubt)

    def _peak_seconds(self, flops: StepFlops | None) -> tuple[float | None, float | None]:
        if flops is None:
            return None, None
        assumed = None if flops.model_by_dtype else weights_dtype(self._costs.model, self.peaks.device) or "fp32"
        self._main_type = self._main_type or assumed
        model = self.peaks.seconds(flops.model_by_dtype or {assumed or "fp32": flops.model})
        hardware = None
        if flops.hardware is not None:
            hardware = self.peaks.seconds(flops.hardware_by_dtype or {assumed or "fp32": flops.hardware})
        for name, why in self.peaks.why_unknown.items():
            self._notify(*notices.peak_unknown(name, why))
        return model, hardware

    def new_provenance(self, step: int, device_count: int) -> Provenance | None:
        """Return the record of how FLOPs and peak are found; None if it has not changed or is not known yet."""
        written = self._costs.facts_version, self.peaks, self.peaks.ranks, self._main_type
        if written == self._written or not self._costs.has_facts:
            return None
        self._written = written
        facts = self._costs.mode.facts()
        coverage = facts["coverage"]
        if coverage is not None and coverage < 1:
            self._notify(*notices.coverage_below_1(coverage, facts["notes"]))
        peak = self.peak
        return Provenance(
            step,
            self._costs.mode.name,
            facts["method"],
            facts["exact"],
            self._config.attention,
            coverage,
            facts["law"],
            None if peak is None else peak.to_json(),
            device_count,
            notes=facts["notes"],
            achievable_flops_per_s=self._achievable_flops_per_s(),
        )

    def _achievable_flops_per_s(self) -> float | None:
        """The rate of the fastest matrix product on this device, if it was measured well; None if ranks share it."""
        peak = self.peak
        if peak is None or peak.kind in ("measured", "override") or self.peaks.ranks > 1:
            return None
        measured = measured_peak(self.peaks.device, peak.dtype)
        return None if measured is None or measured.confidence == "low" else measured.flops_per_s


def _priced(book: LawBook, prices: Sequence[CallPrice], works: Sequence[Work]) -> StepFlops:
    """Add up the FLOPs of a step's calls. Model FLOPs exclude padding only if each call has the shape of its batch."""
    aligned = len(works) == len(prices) and all(map(_is_same_shape, prices, works))
    model = hardware = recompute = 0
    by_dtype: dict[str, PhaseFlops] = {}
    reasons = [price.reason for price in prices if price.reason]
    is_typed = True
    for index, price in enumerate(prices):
        needed = executed = price.executed
        if aligned:
            price = book.with_images(price, works[index].grids) or price
            needed, executed, unclear = book.needed(price, works[index])
            reasons += [unclear] if unclear else []
        model += needed.forward + needed.backward
        hardware += executed.total
        recompute += executed.recompute
        is_typed = is_typed and bool(price.by_dtype)
        for name, flops in price.by_dtype.items():
            by_dtype[name] = by_dtype.get(name, PhaseFlops()) + flops
    if not aligned and any(work.documents is not None for work in works):
        reasons.append("model FLOPs include padding, because the step's calls have other shapes than its batches")
    types = by_dtype if is_typed else {}
    return StepFlops(
        model, hardware, recompute, _shares(types, model), _shares(types, hardware), reasons[0] if reasons else None
    )


def _steered(calls: StepCalls, prices: Sequence[CallPrice], book: LawBook, certificates: Certificates) -> str | None:
    """Why steps with the same calls may have other FLOPs than the counted step; None if they cannot."""
    if not any(price.is_steered for price in prices):
        return None
    if not any(map(book.hides_cost, calls.kinds)) and certificates.node_counts_determine_costs(calls.kind):
        return None
    return next(price.reason for price in prices if price.is_steered)


def _is_same_shape(price: CallPrice, work: Work) -> bool:
    shape = price.shape
    if shape is None:
        return work.documents is None
    return shape.batch_size == work.plan.batch_size and shape.seq_len in (None, work.plan.seq_len)


def _shares(by_dtype: Mapping[str, PhaseFlops], total: int) -> dict[str, int]:
    """Divide a total over compute types in proportion to the executed FLOPs."""
    if len(by_dtype) == 1:
        return {next(iter(by_dtype)): total}
    executed = sum(flops.total for flops in by_dtype.values())
    if not executed:
        return {}
    return {name: round(total * flops.total / executed) for name, flops in by_dtype.items()}


def _counted(count: StepCount, reason: str | None, priced: StepFlops | None = None) -> StepFlops:
    """Return the FLOPs of a counted step. Model FLOPs exclude padding, whose FLOPs are computed from `priced`."""
    total, recompute = count.phases.total, count.phases.recompute
    padding = 0
    if priced is not None and priced.hardware is not None and priced.recompute is not None:
        padding = priced.hardware - priced.recompute - priced.model
    model = total - recompute - padding
    types = count.by_dtype
    return StepFlops(model, total, recompute, _shares(types, model), _shares(types, total), reason)


_USUAL_TYPES = ("fp32", "tf32", "bf16", "fp16")


def device_of(model: nn.Module | None) -> torch.device:
    """The device of the model's weights; without a model, the current accelerator or the CPU."""
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
        device: The device.
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
        self._known: dict[str, Peak | None] = {}
        """Peak of one rank's share of the device, by compute type."""

    def look_ahead(self) -> None:
        """Look up the peaks of usual compute types now, because this reads files, which must not delay the training."""
        for name in (self._dtype,) if self._dtype else _USUAL_TYPES:
            self._ask(name)

    def share(self, ranks: int) -> None:
        """Set how many ranks share the device."""
        if ranks != self.ranks:
            self.ranks = ranks
            self._known.clear()

    def of(self, compute_type: str) -> Peak | None:
        """The peak for the `dtype` that the user has set, otherwise for `compute_type`; None if unknown."""
        name = self._dtype or self._with_tf32(compute_type)
        if name not in self._known:
            peak, why = self._ask(name)
            self._known[name] = None if peak is None else shared_peak(peak, self.ranks)
            if peak is None:
                self.why_unknown[name] = why
        return self._known[name]

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

    def _with_tf32(self, compute_type: str) -> str:
        """Return tf32 instead of fp32 if torch's settings make the device compute fp32 products in tf32."""
        if compute_type == "fp32" and self.device.type == "cuda":
            return matmul_dtype("cuda", torch.float32) or compute_type
        return compute_type
