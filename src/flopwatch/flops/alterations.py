"""Other batches of the same shapes: do the values of an argument decide what a step costs?"""

from collections.abc import Iterator
from typing import Any

import torch

from flopwatch.flops.structure import map_tensors, tensors_of

_IGNORED_LABEL = -100
_SEED = 20_24


def altered_batches(batch: Any, name: str) -> Iterator[Any]:
    """The batch with other values of one argument: shuffled, smaller, partly masked. Some may make no sense."""
    own = [tensor for path, tensor in tensors_of(batch).items() if path.partition(".")[0] == name]
    if not own or any(tensor.is_floating_point() or tensor.device.type == "meta" for tensor in own):
        return
    changes = [_shuffled_rows, _drawn_anew]
    if "label" in name:
        changes.append(_half_ignored)
    elif all(_is_mask(tensor) for tensor in own):
        changes = [_half_off, _all_on]
    else:
        changes.append(_halved)
    for change in changes:

        def changed(path: str, tensor: torch.Tensor, change: Any = change) -> torch.Tensor:
            return change(tensor.detach().cpu().clone()) if path.partition(".")[0] == name else tensor

        yield map_tensors(batch, changed)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _is_mask(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all())


def _shuffled_rows(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    order = torch.randperm(tensor.shape[-1], generator=_generator())
    return tensor[..., order]


def _drawn_anew(tensor: torch.Tensor) -> torch.Tensor:
    low, high = int(tensor.min()), int(tensor.max())
    return torch.randint(low, high + 1, tensor.shape, generator=_generator()).to(tensor.dtype)


def _half_ignored(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() > 1:
        tensor[..., : tensor.shape[-1] // 2] = _IGNORED_LABEL
    return tensor


def _half_off(tensor: torch.Tensor) -> torch.Tensor:
    tensor[..., tensor.shape[-1] // 2 + 1 :] = 0
    return tensor


def _all_on(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(tensor)


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return torch.clamp(tensor // 2, min=min(1, int(tensor.min())))
