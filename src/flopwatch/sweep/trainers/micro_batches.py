"""A batch in parts that are in memory one after the other."""

from collections.abc import Mapping
from typing import Any

import torch

from flopwatch.errors import UnsupportedError


def batch_rows(batch: Mapping[str, Any]) -> int:
    """Samples of the batch: the rows of its first tensor that has more than one, since one row may be for all."""
    lengths = [len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
    return next((length for length in lengths if length > 1), 1)


def micro_batches(batch: Mapping[str, Any], size: int | None) -> list[Mapping[str, Any]]:
    """Parts of at most so many samples, in order, the last one with what is left; None is the whole batch.

    >>> [len(part["x"]) for part in micro_batches({"x": torch.zeros(7, 2)}, 3)]
    [3, 3, 1]
    """
    rows = batch_rows(batch)
    if size is None or size >= rows:
        return [batch]
    return [{name: _part(name, batch[name], rows, begin, size) for name in batch} for begin in range(0, rows, size)]


def _part(name: str, value: Any, rows: int, begin: int, size: int) -> Any:
    """Its samples of a tensor or list; what is one for all samples goes to every part."""
    if not isinstance(value, torch.Tensor | list | tuple) or (isinstance(value, torch.Tensor) and not value.dim()):
        return value
    if len(value) == rows:
        return value[begin : begin + size]
    if isinstance(value, torch.Tensor) and len(value) == 1:
        return value
    raise UnsupportedError(
        f"a batch whose {name} has {len(value)} rows for {rows} samples cannot be split into micro-batches; "
        "leave micro_batch_size out, or make a batch with one row for each sample"
    )
