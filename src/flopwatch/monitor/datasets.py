"""Loss and accuracy of each dataset, for batches that mix datasets."""

from collections.abc import Sequence

import torch

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import IGNORED_LABEL
from flopwatch.monitor.kept import LateValues
from flopwatch.records.run import Number

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
                right, judged = _judged(logits.detach(), labels)
                sums[:, _RIGHT].index_add_(0, rows, right.to(sums.dtype))
                sums[:, _JUDGED].index_add_(0, rows, judged.to(sums.dtype))

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
        kind = torch.float32 if device.type == "mps" else torch.float64
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


def _judged(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the correct predictions and the labelled positions of each sample."""
    samples = len(labels)
    counts = (labels != IGNORED_LABEL).reshape(samples, -1)
    right = (logits.argmax(-1) == labels).reshape(samples, -1) & counts
    return right.sum(1), counts.sum(1)
