"""Keeps the values of a step until its window ends. They stay on the device until then; one copy fetches all.

So do the sums by dataset, for batches that mix datasets.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import IGNORED_LABEL
from flopwatch.guard import Guard, caught
from flopwatch.records.run import Number
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
        for (device, is_floating), members in groups.items():
            kind = torch.int64 if not is_floating else _float_type(device)
            flat = torch.cat([tensors[index].reshape(-1).to(kind) for index in members])
            # Without pinned memory, a copy to the host blocks even with non_blocking=True.
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=device.type == "cuda")
            host.copy_(flat, non_blocking=True)
            arrived = event(device)
            arrived.record()
            self._copies.append((members, [tensors[index].numel() for index in members], host, arrived))
            for index in members:
                self._tensors[index] = None

    def are_there(self) -> bool:
        return all(arrived.query() for *_, arrived in self._copies)

    def read(self) -> list[list[Any]]:
        """Return one flat list of values per tensor, in the order of the tensors."""
        result = [[] if tensor is None else _flat_list(tensor) for tensor in self._tensors]
        for members, sizes, host, _ in self._copies:
            values = iter(host.tolist())
            for index, size in zip(members, sizes, strict=True):
                result[index] = list(islice(values, size))
        return result


def _flat_list(tensor: torch.Tensor) -> list[Any]:
    """The tensor's values; an empty list if they cannot be read, such as those of sparse, nested or fake tensors."""
    with Guard("a logged value"):
        values: Any = (tensor if tensor.dim() < 2 else tensor.reshape(-1)).tolist()
        return values if tensor.dim() else [values]
    return []


def _float_type(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64


_LOSS, _LOSS_SAMPLES, _RIGHT, _JUDGED, _SAMPLES = range(5)


class DatasetMetrics:
    """Sums loss and accuracy per dataset in a small table on the device, which is read one window later."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._sums: torch.Tensor | None = None
        self._late: LateValues | None = None

    def add(
        self,
        names: Sequence[str],
        losses: torch.Tensor | None,
        logits: torch.Tensor | None,
        labels: torch.Tensor | None,
    ) -> None:
        given = [tensor for tensor in (losses, logits) if tensor is not None]
        if not given or (logits is not None and labels is None):
            raise InputError(
                "log_datasets needs losses= with the loss of each sample, or logits= and labels=, or all three"
            )
        if any(len(tensor) != len(names) for tensor in given):
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
            raise InputError(f"log_datasets: {len(names)} names for tensors of shape {sizes}; pass one name per sample")
        device = given[0].device
        rows = torch.tensor([self._index.setdefault(name, len(self._index)) for name in names]).to(
            device, non_blocking=True
        )
        sums = self._table(device)
        with torch.no_grad():
            sums[:, _SAMPLES].index_add_(0, rows, torch.ones(len(names), device=device, dtype=sums.dtype))
            if losses is not None:
                sums[:, _LOSS].index_add_(0, rows, losses.detach().reshape(len(names), -1).mean(1).to(sums.dtype))
                sums[:, _LOSS_SAMPLES].index_add_(0, rows, torch.ones(len(names), device=device, dtype=sums.dtype))
            if logits is not None and labels is not None:
                judged = (labels != IGNORED_LABEL).reshape(len(labels), -1)
                right = (logits.argmax(-1) == labels).reshape(len(labels), -1) & judged
                sums[:, _RIGHT].index_add_(0, rows, right.sum(1).to(sums.dtype))
                sums[:, _JUDGED].index_add_(0, rows, judged.sum(1).to(sums.dtype))

    def take(self) -> dict[str, Number]:
        """Return the metrics whose sums have arrived on the host, and begin to copy the current sums."""
        arrived: dict[str, Number] = {}
        if self._late is not None and self._late.are_there():
            arrived, self._late = self._values(self._late.read()[0]), None
        if self._sums is not None and self._late is None:
            self._late, self._sums = LateValues([self._sums]), None
            if not arrived and self._late.are_there():  # on a CPU nothing has to be copied
                arrived, self._late = self._values(self._late.read()[0]), None
        return arrived

    def _table(self, device: torch.device) -> torch.Tensor:
        kind = _float_type(device)
        if self._sums is None:
            self._sums = torch.zeros(len(self._index), 5, device=device, dtype=kind)
        missing = len(self._index) - len(self._sums)
        if missing:
            self._sums = torch.cat([self._sums, torch.zeros(missing, 5, device=device, dtype=kind)])
        return self._sums

    def _values(self, flat: list[float]) -> dict[str, Number]:
        values: dict[str, Number] = {}
        for name, row in self._index.items():
            sums = flat[5 * row : 5 * row + 5]
            if not sums or not sums[_SAMPLES]:
                continue
            values[f"dataset/{name}/samples"] = int(sums[_SAMPLES])
            if sums[_LOSS_SAMPLES]:
                values[f"dataset/{name}/loss"] = sums[_LOSS] / sums[_LOSS_SAMPLES]
            if sums[_JUDGED]:
                values[f"dataset/{name}/accuracy"] = sums[_RIGHT] / sums[_JUDGED]
        return values
