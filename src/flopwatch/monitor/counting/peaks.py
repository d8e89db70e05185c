"""The peak FLOP/s of a device by compute type, and the time that FLOPs would take at it."""

from collections.abc import Mapping

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.hardware import explain_unknown, matmul_dtype, peak_flops
from flopwatch.hardware.device import find_device
from flopwatch.monitor.ranks.layout import shared_peak
from flopwatch.records.flops import Peak

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
        name = self.name(compute_type)
        if name not in self._known:
            peak, why = self._ask(name)
            self._known[name] = None if peak is None else shared_peak(peak, self.ranks)
            if peak is None:
                self.why_unknown[name] = why
        return self._known[name]

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
