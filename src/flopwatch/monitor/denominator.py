"""What a run's FLOPs are divided by: for each compute type, the peak of the device for it."""

from collections.abc import Mapping

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.hardware import explain_unknown, matmul_dtype, peak_flops
from flopwatch.monitor.ranks.shared_devices import shared_peak
from flopwatch.records import Peak


def device_of(model: nn.Module | None) -> torch.device:
    """Where the model's weights are; without a model, the current accelerator or the CPU."""
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None and parameter.device.type != "meta":
        return parameter.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def weights_dtype(model: nn.Module | None, device: torch.device) -> str | None:
    """The compute type that the weights suggest, where no call of the model was seen."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None) if model is not None else None
    return matmul_dtype(device.type, parameter.dtype if parameter is not None else None)


class Peaks:
    """The peaks of one device, each looked up once.

    Attributes:
        device: Whose peaks they are.
        ranks: How many ranks share the device.
        why_unknown: What could not be found, by compute type.
    """

    def __init__(self, device: torch.device, override_flops_per_s: float | None, dtype: str | None) -> None:
        self.device = device
        self.ranks = 1
        self.why_unknown: dict[str, str] = {}
        self._override = override_flops_per_s
        self._dtype = dtype
        self._known: dict[str, Peak | None] = {}

    def share(self, ranks: int) -> bool:
        """So many ranks share the device; True when that is new."""
        if ranks == self.ranks:
            return False
        self.ranks = ranks
        self._known.clear()
        return True

    def of(self, compute_type: str) -> Peak | None:
        """The peak for products of this type; of the type that the user has named, whatever they ran in."""
        name = self._dtype or self._with_tf32(compute_type)
        if name not in self._known:
            self._known[name] = self._looked_up(name)
        return self._known[name]

    def seconds(self, flops_by_dtype: Mapping[str, int]) -> float | None:
        """How long the device needs for these FLOPs at its peaks; None where one is not known."""
        total = 0.0
        for compute_type, flops in flops_by_dtype.items():
            if not flops:
                continue
            peak = self.of(compute_type)
            if peak is None:
                return None
            total += flops / peak.flops_per_s
        return total

    def _looked_up(self, name: str) -> Peak | None:
        try:
            peak = peak_flops(self.device, name, override_flops_per_s=self._override)
            why = "" if peak is not None else explain_unknown(self.device, name)
        except InputError as error:
            peak, why = None, str(error)
        if peak is None:
            self.why_unknown[name] = why
            return None
        return shared_peak(peak, self.ranks)

    def _with_tf32(self, compute_type: str) -> str:
        """fp32 products run as tf32 where torch's switches allow it."""
        if compute_type == "fp32" and self.device.type == "cuda":
            return matmul_dtype("cuda", torch.float32) or compute_type
        return compute_type
