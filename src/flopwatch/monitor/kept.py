"""Keeps the values of a step until its window ends. They stay on the device until then; one copy fetches all."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from flopwatch.guard import Guard, caught
from flopwatch.torch_internals.ops import tensor_version

_UNREADABLE = -1


class Kept(NamedTuple):
    """A tensor to be read later, and its version counter in torch, which every in-place change increases."""

    value: torch.Tensor
    version: int

    def is_unchanged(self) -> bool:
        """Whether nothing was written into the tensor since it was kept; False if the kept value was not a number."""
        return tensor_version(self.value) == self.version


_NOT_A_NUMBER = Kept(torch.zeros(()), _UNREADABLE)
_NUMBERS = frozenset((float, int, bool, type(None)))


def keep(value: Any) -> Any:
    """Keep a value until the window ends: a tensor of one number without its graph, a plain number as it is.

    Never raises. On an accelerator the value is copied, because CUDA graphs write the next step's loss into the same
    memory. A CPU tensor is not copied, because that would take longer than the rest of `log_step`; instead
    `Kept.is_unchanged` shows later whether the training wrote into it. Tensors of several numbers are dropped, because
    a window of them could fill the memory.
    """
    try:
        # Plain tensors skip isinstance(value, DTensor), which takes 5 µs (measured right after a training step).
        if type(value) is not torch.Tensor:
            if not isinstance(value, torch.Tensor):
                return value if type(value) in _NUMBERS else _keep_object(value)
            if isinstance(value, DTensor):
                return _keep_sharded(value)
        if value.numel() != 1:
            return _NOT_A_NUMBER
        if value.requires_grad:
            value = value.detach()
        if value.is_cpu:
            try:
                return tuple.__new__(Kept, (value, tensor_version(value)))  # This is faster than Kept(...).
            except RuntimeError:  # Tensors of inference mode have no version counter.
                pass
        return _keep_copy(value)
    except Exception as error:  # code of the user, such as a tensor class, has raised; only this value is lost
        caught("a logged value", error)
        return _NOT_A_NUMBER


def _keep_copy(value: torch.Tensor) -> Kept:
    if value.is_complex() or value.is_meta or value.layout is not torch.strided:
        return _NOT_A_NUMBER
    with torch.inference_mode(False):  # so that the copy has a version counter
        return Kept(value.clone(), 0)


def _keep_object(value: Any) -> Any:
    """Read arrays and containers now, so that their memory can be freed; keep other objects until the window ends."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return value
    return float(value.item() if hasattr(value, "item") else value)


def read_now(value: Any) -> float | None:
    """Read a value, waiting for the device if necessary; None if it is not a single real number."""
    with Guard("a logged value"):  # code of the user, such as __float__, may raise anything
        return None if value is None else float(value)
    return None


def _keep_sharded(value: DTensor) -> Kept:
    """Keep a replicated DTensor, such as a norm. Drop any other, because reading it needs a collective."""
    is_whole = all(placement.is_replicate() for placement in value.placements)
    local = value.to_local().detach()
    return _keep_copy(local) if is_whole and local.numel() == 1 else _NOT_A_NUMBER


class LateValues:
    """Copies the tensors of one logging window to the host, without waiting for the device.

    The copies are queued behind the work that computes the values; `are_there` polls whether they have arrived. CPU
    tensors are not copied.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        event: Any = torch.Event,
        is_here: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cpu,
    ) -> None:
        self._tensors: list[torch.Tensor | None] = list(tensors)
        self._copies: list[tuple[list[int], list[int], torch.Tensor, Any]] = []
        groups: dict[tuple[torch.device, bool], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if not is_here(tensor):
                groups.setdefault((tensor.device, tensor.is_floating_point()), []).append(index)
        for members in groups.values():
            flat = _flattened([tensors[index] for index in members])
            self._copies.append((members, [tensors[index].numel() for index in members], *_fetched(flat, event)))
            for index in members:
                self._tensors[index] = None

    def are_there(self) -> bool:
        return all(arrived.query() for *_, arrived in self._copies)

    def read(self) -> list[list[Any]]:
        """Return one flat list of values per tensor, in the order of the tensors."""
        result = [[] if tensor is None else _flat_list(tensor) for tensor in self._tensors]
        for members, sizes, host, _ in self._copies:
            values, start = host.tolist(), 0
            for index, size in zip(members, sizes, strict=True):
                result[index] = values[start : start + size]
                start += size
        return result


def _flat_list(tensor: torch.Tensor) -> list[Any]:
    """The tensor's values; an empty list if they cannot be read, such as those of sparse, nested or fake tensors."""
    with Guard("a logged value"):
        values: Any = (tensor if tensor.dim() < 2 else tensor.reshape(-1)).tolist()
        return values if tensor.dim() else [values]
    return []


def _flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors[0].is_floating_point():
        kind = torch.int64
    else:
        kind = torch.float32 if tensors[0].device.type == "mps" else torch.float64  # Metal has no float64
    return torch.cat([tensor.reshape(-1).to(kind) for tensor in tensors])


def _fetched(flat: torch.Tensor, event: Any) -> tuple[torch.Tensor, Any]:
    # Without pinned memory, a copy to the host blocks even with non_blocking=True.
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.device.type == "cuda")
    host.copy_(flat, non_blocking=True)
    arrived = event(flat.device)
    arrived.record()
    return host, arrived
