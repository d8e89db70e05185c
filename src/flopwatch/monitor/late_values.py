"""Values that are on the device, fetched with one copy per window and read when the copy has arrived."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

_UNREADABLE = -1


class Kept(NamedTuple):
    """A loss or norm to be read later, and the version its storage had: an in-place change raises it."""

    value: torch.Tensor
    version: int

    def is_unchanged(self) -> bool:
        """Also False for what is not a single real number, and for a DTensor shard: its local value is a part only."""
        return self.value._version == self.version


_NOT_A_NUMBER = Kept(torch.zeros(()), _UNREADABLE)
_NUMBERS = frozenset((float, int, bool, type(None)))


def keep(value: Any) -> Any:
    """Hold on to a tensor of one number without its graph; numbers stay as they are. Never raises.

    CUDA graphs write the next step's loss into the same memory, so on an accelerator the value is copied. A copy of a
    CPU tensor would cost more than all the rest of a step; there `Kept.is_unchanged` tells whether the training wrote
    into it. Anything that holds more than one number is dropped at once: a window of such values could fill the memory.
    """
    try:
        if type(value) is not torch.Tensor:  # asking for DTensor takes 5 µs after a training step, as much as detach()
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
                return tuple.__new__(Kept, (value, value._version))  # without the Python function that Kept() is
            except RuntimeError:  # a tensor of inference mode has no version
                pass
        return _keep_copy(value)
    except Exception:  # a tensor class or an object with code of its own: costs this value, and nothing else
        return _NOT_A_NUMBER


def _keep_copy(value: torch.Tensor) -> Kept:
    """For values on an accelerator, which are all read with one copy, and for those without a version."""
    if value.is_complex() or value.is_meta or value.layout is not torch.strided:
        return _NOT_A_NUMBER
    with torch.inference_mode(False):  # so that the copy has a version
        return Kept(value.clone(), 0)


def _keep_object(value: Any) -> Any:
    """Arrays and containers are read at once, so that they can be freed; other objects, when the window ends."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return value
    return float(value.item() if hasattr(value, "item") else value)


def read_now(value: Any) -> float | None:
    """A value that is read while the device may be waited for; None where it is not a single real number."""
    try:
        return None if value is None else float(value)
    except Exception:  # code of the user's
        return None


def _keep_sharded(value: DTensor) -> Kept:
    """A norm of sharded parameters. Reading one that is not the same everywhere would take a collective: left out."""
    is_whole = all(placement.is_replicate() for placement in value.placements)
    local = value.to_local().detach()
    return _keep_copy(local) if is_whole and local.numel() == 1 else _NOT_A_NUMBER


class LateValues:
    """Tensors of one window on their way to the host.

    The copies are queued behind the work that computes the values, one per device; `are_there` asks without waiting. On
    a CPU nothing is copied and everything is there at once.
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
        """Each tensor's values in a flat list, in the order given."""
        result = [[] if tensor is None else _flat_list(tensor) for tensor in self._tensors]
        for members, sizes, host, _ in self._copies:
            values, start = host.tolist(), 0
            for index, size in zip(members, sizes, strict=True):
                result[index] = values[start : start + size]
                start += size
        return result


def _flat_list(tensor: torch.Tensor) -> list[Any]:
    """The tensor's values; none where they cannot be read: sparse, nested, fake, of a type without numbers."""
    try:
        return _values_of(tensor)
    except Exception:
        return []


def _values_of(tensor: torch.Tensor) -> list[Any]:
    dimensions = tensor.dim()
    if dimensions == 0:
        return [tensor.item()]
    values: list[Any] = tensor.tolist() if dimensions == 1 else tensor.reshape(-1).tolist()
    return values


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
