"""Finds the sizes of a batch (samples, tokens, documents) without waiting for the device.

Shapes are known at once. Sizes that depend on values (padding, packed documents, labels) are computed on
the device into small tensors, which are read when the logging window ends. For CPU tensors even the computation is
delayed until then, because one torch op right after a training step takes longer than the rest of `log_step`.
"""

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import IGNORED_LABEL, describe, named, read_shape
from flopwatch.flops.count import target_lengths
from flopwatch.flops.law import Documents
from flopwatch.flops.tracing.scaling import Axes
from flopwatch.language import Said
from flopwatch.torch_internals.ops import tensor_version

try:
    import numpy as np
except ImportError:  # torch works without numpy
    np = None  # type: ignore[assignment]


_CUMULATIVE_LENGTHS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")
_MOST_LAYOUTS = 4096
_MOST_ITEMS = 512


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The sizes that all batches of one shape share, and the names of the tensors from which other sizes are read."""

    batch_size: int
    seq_len: int | None
    mask: str | None
    positions: str | None
    cumulative: str | None
    labels: str | None
    target: str | None = None
    """Name of the labels. Their rows may have other lengths than the inputs, as in an encoder-decoder model."""
    target_len: int | None = None
    """Length of the labels in an encoder-decoder model; None in other models."""
    named: tuple[str, ...] = ()
    """The tensor names in the fields above, without the fields that are None."""

    @property
    def axes(self) -> Axes | None:
        """The sizes on which products can depend; None if the batch has no sequence."""
        if self.seq_len is None:
            return None
        return Axes(self.batch_size, (self.seq_len, *(() if self.target_len is None else (self.target_len,))))


class Reading(NamedTuple):
    """The sizes of one micro-batch, as integer tensors that may still be on the device.

    Attributes:
        row_lengths: For each row, the number of positions that are not padding.
        documents: The number of packed documents, the number of their tokens, and the sum of their squared lengths.
        cumulative: The positions at which packed documents end.
        trainable: Number of labels that are not -100.
        targets: Length of each row of a decoder's target, up to the last label that is not -100.
        known_documents: The documents, if the user gave their lengths.
        deferred: CPU tensors whose sizes are not computed yet, each with torch's version counter, which every in-place
            change increases.
    """

    layout: BatchLayout
    row_lengths: Tensor | None = None
    documents: Tensor | None = None
    cumulative: Tensor | None = None
    trainable: Tensor | int | None = None
    targets: Tensor | None = None
    known_documents: Documents | None = None
    deferred: Mapping[str, tuple[Tensor, int]] | None = None

    def tensors(self) -> list[Tensor]:
        fields = (self.row_lengths, self.documents, self.cumulative, self.trainable, self.targets)
        return [tensor for tensor in fields if isinstance(tensor, Tensor)]


class BatchSizes(NamedTuple):
    """The sizes of one micro-batch, as integers.

    Attributes:
        lengths: For each row, the number of positions that are not padding; None without padding or without a mask.
        documents: The documents in the batch; None if each row is one document without padding.
        trainable_tokens: Number of labels that are not -100; None without labels.
        target_lengths: Length of each row of a decoder's target, up to the last label that is not -100.
    """

    layout: BatchLayout
    lengths: tuple[int, ...] | None = None
    documents: Documents | None = None
    trainable_tokens: int | None = None
    target_lengths: tuple[int, ...] | None = None

    @property
    def samples(self) -> int:
        return self.documents.count if self.documents and self.lengths is None else self.layout.batch_size

    @property
    def tokens(self) -> int | None:
        return None if self.layout.seq_len is None else self.layout.batch_size * self.layout.seq_len

    @property
    def real_tokens(self) -> int | None:
        return self.documents.tokens if self.documents else self.tokens


class BatchReader:
    """Reads the sizes of batches. If the shape was seen before, this takes only a dictionary lookup.

    Attributes:
        masks_are_plain: False once a mask had other values than 0 and 1; some packers number the documents in the mask.
        reads_targets: Whether the lengths of labels are read in later batches, because the FLOPs depend on them.
        may_defer: Whether CPU batches are kept, to be read when the logging window ends. False once the training has
            overwritten a batch that was kept.
    """

    def __init__(self) -> None:
        self._layouts: dict[Any, BatchLayout] = {}
        self._last_key: list[Any] | None = None
        self._last_layout: BatchLayout | None = None
        self._uses_positions = True
        self.masks_are_plain = True
        self.may_defer = True
        self._has_new = False
        self.reads_targets = False

    def read(self, batch: Any, lengths: Sequence[int] | None = None) -> Reading:
        """Read a batch. `lengths` are the lengths of its documents, if the batch does not contain them."""
        tensors: Mapping[str, Any]
        if isinstance(batch, Tensor):
            tensors = {"0": batch}
        else:
            batch = batch if type(batch) is dict else plain_batch(batch)
            tensors = batch if type(batch) is dict else named(batch)
        if len(tensors) > _MOST_ITEMS:
            tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        key: list[Any] = []
        for name, value in tensors.items():
            if isinstance(value, Tensor):
                key += name, value.shape
            else:  # the sizes inside of a list, tuple or dict, such as a list of images
                has_sizes = type(value) in (list, tuple, dict) and len(value) <= _MOST_ITEMS
                key += name, describe(value).sizes if has_sizes else None
        if key == self._last_key:
            layout = self._last_layout
        else:
            quick = tuple(key)
            layout = self._layouts.get(quick) or self._new_layout(quick, batch, tensors)
            self._last_key, self._last_layout = key, layout
        assert layout is not None
        documents = None if lengths is None else _checked(layout, lengths)
        if self.may_defer:
            deferred = {}
            for name in layout.named:
                tensor = tensors[name]
                if not tensor.is_cpu or tensor.is_inference():
                    return self._measured(layout, tensors, documents)
                deferred[name] = tensor, tensor_version(tensor)
            # `tuple.__new__` takes 5 µs less than `Reading()`, which runs a Python function.
            return tuple.__new__(Reading, (layout, None, None, None, None, None, documents, deferred))
        return self._measured(layout, tensors, documents)

    def read_checked(self, batch: Any, lengths: Sequence[int] | None = None) -> tuple[Reading, str | None]:
        """Read a batch, and check its values if its shape is new; also returns a warning for the user, or None."""
        reading = self.read(batch, lengths)
        if not self._has_new:
            return reading, None
        self._has_new = False
        remark = self._check_values(batch, reading.layout)
        return self.read(batch, lengths), remark  # mask and positions may be read in another way now

    def with_sizes(self, reading: Reading) -> Reading | None:
        """Compute the sizes that `read` left for later; None if the training has overwritten the batch since then."""
        if reading.deferred is None:
            return reading
        if any(tensor_version(tensor) != version for tensor, version in reading.deferred.values()):
            self.may_defer = False
            return None
        tensors = {name: tensor for name, (tensor, _) in reading.deferred.items()}
        return self._measured(reading.layout, tensors, reading.known_documents)

    def _measured(self, layout: BatchLayout, tensors: Mapping[str, Any], documents: Documents | None) -> Reading:
        trainable: Tensor | int | None = None
        if layout.labels is not None:
            labels = tensors[layout.labels]
            if labels.is_cpu and np is not None:  # on small tensors numpy is three times as fast as torch
                trainable = int(np.count_nonzero(labels.numpy() != IGNORED_LABEL))
            else:
                trainable = (labels != IGNORED_LABEL).sum()
        if documents is not None:
            return Reading(layout, trainable=trainable, known_documents=documents)
        if layout.cumulative is not None:
            return Reading(layout, cumulative=tensors[layout.cumulative].clone(), trainable=trainable)
        mask = None if layout.mask is None else tensors[layout.mask]
        if layout.positions is not None and self._uses_positions:
            return Reading(layout, documents=_documents(tensors[layout.positions], mask), trainable=trainable)
        if mask is not None:
            # A mask of floats is first compared with 0, because the sum of 16-bit floats would be rounded.
            mask = (mask if self.masks_are_plain and not mask.is_floating_point() else mask != 0).sum(1)
        targets = target_lengths(tensors[layout.target]) if layout.target and self.reads_targets else None
        return Reading(layout, mask, trainable=trainable, targets=targets)

    def _check_values(self, batch: Any, layout: BatchLayout) -> str | None:
        """Check the values of mask and positions; return a warning for the user, or None.

        Called once per shape, because reading them may wait for the device.
        """
        tensors = named(plain_batch(batch))
        mask = tensors[layout.mask] if layout.mask is not None else None
        if mask is not None:
            self.masks_are_plain = bool(((mask == 0) | (mask == 1)).all())
        if layout.positions is None or _start_at_zero(tensors[layout.positions], mask):
            return None
        self._uses_positions = False
        return Said(
            "position_ids do not count up from 0 in each document, so each row is taken as one document; pass "
            "lengths= if rows contain several documents"
        )

    def _new_layout(self, key: Any, batch: Any, tensors: Mapping[str, Any]) -> BatchLayout:
        if len(self._layouts) >= _MOST_LAYOUTS:
            self._layouts.clear()
        batch_size, seq_len = read_shape(batch)
        if seq_len is None and "attention_mask" in tensors and tensors["attention_mask"].dim() == 2:
            batch_size, seq_len = tensors["attention_mask"].shape
        mask, positions, labels = (
            _two_dimensional(tensors, name, seq_len) for name in ("attention_mask", "position_ids", "labels")
        )
        cumulative = next((name for name in _CUMULATIVE_LENGTHS if isinstance(tensors.get(name), Tensor)), None)
        target, target_len, given = None, None, tensors.get("labels")
        if mask and isinstance(given, Tensor) and given.dim() == 2 and not given.is_floating_point():
            target, target_len = "labels", given.shape[1] if self.reads_targets else None
        names = tuple(dict.fromkeys(filter(None, (mask, positions, cumulative, labels, target))))
        layout = BatchLayout(batch_size, seq_len, mask, positions, cumulative, labels, target, target_len, names)
        self._layouts[key] = layout
        self._has_new = True
        return layout


def _two_dimensional(tensors: Mapping[str, Any], name: str, seq_len: int | None) -> str | None:
    value = tensors.get(name)
    if not isinstance(value, Tensor) or value.dim() != 2 or value.shape[1] != seq_len:
        return None
    return name if value.device.type != "meta" else None


def _start_at_zero(positions: Tensor, mask: Tensor | None) -> bool:
    """Whether every document's positions are 0, 1, 2, …; positions of padding are ignored."""
    before = torch.nn.functional.pad(positions[:, :-1], (1, 0), value=-1)
    fits = (positions == 0) | (positions == before + 1)
    return bool((fits if mask is None else fits | (mask == 0)).all())


def _documents(positions: Tensor, mask: Tensor | None) -> Tensor:
    """Return how many packed documents there are, how many tokens they have, and the sum of their squared lengths.

    A document begins at position 0. Its squared length s² is the sum of 2p + 1 over its positions p = 0 … s - 1.
    """
    first = positions == 0
    odd = 2 * positions + 1
    if mask is None:
        tokens = torch.full((), positions.numel(), dtype=torch.int64, device=positions.device)
    else:
        real = mask != 0
        first, odd, tokens = first & real, odd * real, real.sum()
    return torch.stack([first.sum(), tokens, odd.sum()])


def sizes_from(reading: Reading, values: Iterator[Sequence[int]]) -> BatchSizes:
    """Convert a reading to integers; `values` has the contents of `Reading.tensors`, each as a flat list."""
    row_lengths = tuple(next(values)) if reading.row_lengths is not None else None
    documents = Documents(*next(values)) if reading.documents is not None else reading.known_documents
    ends = next(values) if reading.cumulative is not None else None
    trainable = next(values)[0] if isinstance(reading.trainable, Tensor) else reading.trainable
    targets = tuple(next(values)) if reading.targets is not None else None
    if ends is not None:
        # Some packers pad the list of ends by repeating its last entry, so documents of length 0 are left out.
        documents = Documents.of_lengths([end - start for start, end in pairwise(ends) if end > start])
    rows, seq_len = reading.layout.batch_size, reading.layout.seq_len or 0
    if documents == Documents(rows, rows * seq_len, rows * seq_len**2):
        documents = None
    if row_lengths is not None and all(length == reading.layout.seq_len for length in row_lengths):
        is_whole = targets is None or len(set(targets)) == 1
        row_lengths = None if is_whole else row_lengths
    if row_lengths is not None:
        documents = Documents.of_lengths(row_lengths)
    return BatchSizes(reading.layout, row_lengths, documents, trainable, targets)


def _checked(layout: BatchLayout, given: Sequence[int]) -> Documents:
    lengths = [int(length) for length in given]
    positions = layout.batch_size * (layout.seq_len or 0)
    if not lengths or min(lengths) < 1 or sum(lengths) > positions > 0:
        raise InputError(
            f"lengths= must be positive and sum to at most the {positions} positions of the batch; got {len(lengths)} "
            f"lengths that sum to {sum(lengths)}"
        )
    return Documents.of_lengths(lengths)


def plain_batch(batch: Any) -> Any:
    """The batch with its items in a plain dict, list or tuple.

    A class of the user may compute items when they are asked for (augmentation, files), so none of its methods is
    called: the items are taken from the plain class below it, or from the dict of a `UserDict`, as in transformers.
    """
    if isinstance(batch, dict):
        return dict(dict.items(batch))
    if isinstance(batch, list):
        return batch if type(batch) is list else list(list.__iter__(batch))
    if isinstance(batch, tuple):
        return tuple(tuple.__iter__(batch))
    if isinstance(batch, UserDict) and type(vars(batch).get("data")) is dict:
        return vars(batch)["data"]
    if isinstance(batch, Mapping):
        name = type(batch).__name__
        raise InputError(f"the batch is a {name}, which may make its items when they are read; pass a dict of tensors")
    return batch
