"""What a run's FLOPs are divided by: for each compute type, the peak of the device for it."""

from collections.abc import Mapping

import torch
from torch import nn

from flopwatch.errors import InputError
from flopwatch.hardware import explain_unknown, matmul_dtype, peak_flops
from flopwatch.monitor.ranks.sharing import shared_peak
from flopwatch.records.flops import Peak

_USUAL_TYPES = ("fp32", "tf32", "bf16", "fp16")


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
        self._whole: dict[str, tuple[Peak | None, str]] = {}
        """The device's answers, before ranks share them."""
        self._known: dict[str, Peak | None] = {}

    def look_ahead(self) -> None:
        """Ask the device now: a rank learns only in mid-run what its products run in, and must not read files then."""
        for name in (self._dtype,) if self._dtype else _USUAL_TYPES:
            self._ask(name)

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
        peak, why = self._ask(name)
        if peak is None:
            self.why_unknown[name] = why
            return None
        return shared_peak(peak, self.ranks)

    def _ask(self, name: str) -> tuple[Peak | None, str]:
        if name not in self._whole:
            try:
                peak = peak_flops(self.device, name, override_flops_per_s=self._override)
                self._whole[name] = peak, "" if peak is not None else explain_unknown(self.device, name)
            except InputError as error:
                self._whole[name] = None, str(error)
        return self._whole[name]

    def _with_tf32(self, compute_type: str) -> str:
        """fp32 products run as tf32 where torch's switches allow it."""
        if compute_type == "fp32" and self.device.type == "cuda":
            return matmul_dtype("cuda", torch.float32) or compute_type
        return compute_type
