"""What a run's FLOPs are divided by: the peak of its device for the type it computes in."""

from typing import Any

import torch
from torch import nn

from flopwatch.hardware import explain_unknown, matmul_dtype, peak_flops
from flopwatch.records import Peak

_MATMUL_NODES = (
    "MmBackward",
    "AddmmBackward",
    "BmmBackward",
    "ConvolutionBackward",
    "ScaledDotProduct",
    "LinearBackward",
)
_MOST_NODES = 10_000


def device_of(model: nn.Module | None) -> torch.device:
    """Where the model's weights are; without a model, the current accelerator or the CPU."""
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None and parameter.device.type != "meta":
        return parameter.device
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def compute_dtype(model: nn.Module | None, loss: Any, device: torch.device) -> str | None:
    """The type matmuls ran in: as the loss's graph remembers (autocast is off again by now), else the weights'."""
    seen = _dtype_in_graph(loss)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None) if model is not None else None
    return matmul_dtype(device.type, seen or (parameter.dtype if parameter is not None else None))


def find_peak(device: torch.device, dtype: str | None, override_flops_per_s: float | None) -> tuple[Peak | None, str]:
    """The peak, and why there is none."""
    peak = peak_flops(device, dtype, override_flops_per_s=override_flops_per_s)
    return peak, "" if peak is not None else explain_unknown(device, dtype)


def _dtype_in_graph(loss: Any) -> torch.dtype | None:
    """Walk back from the loss to the first matmul; its output's type outlives the backward pass."""
    node = getattr(loss, "grad_fn", None)
    seen, queue = {node}, [node] if node is not None else []
    while queue and len(seen) < _MOST_NODES:
        node = queue.pop(0)
        if any(name in node.name() for name in _MATMUL_NODES):
            metadata = getattr(node, "_input_metadata", None)
            return metadata[0].dtype if metadata else None
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                queue.append(parent)
    return None
