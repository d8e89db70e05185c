"""Padded batches, and what they cost without their padding.

The truth is each row alone at its own length. What a step pays once (tables of relative positions in DeBERTa), and
what it pays per pair of rows (a contrastive loss), is told apart by real steps of 1, 2 and 3 equal rows: their cost is
once + rows x each + rows² x pair, three equations for three unknowns.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from zoo.specimen import Shape, Specimen

IGNORED_LABEL = -100
Measure = Callable[[Any], int]


@dataclass(frozen=True)
class PaddedCase:
    """A batch of rows of different lengths, and the shape each row has alone."""

    what: str
    specimen: Specimen
    batch: Any
    rows: tuple[Shape, ...]

    def truth(self, measure: Measure) -> int:
        """The rows' own costs, what the step pays once, and what it pays per pair of rows."""
        longest = Shape(1, max(row.length for row in self.rows), max(row.target_length for row in self.rows))
        alone = {row: measure(self.specimen.batch(row)) for row in {*self.rows, longest}}
        two = measure(self.specimen.batch(replace(longest, batch_size=2)))
        if two == 2 * alone[longest]:
            return sum(alone[row] for row in self.rows)
        each = {row: self._parts(row, alone[row], measure) for row in {*self.rows, longest}}
        once, _, pair = each[longest]
        return once + sum(each[row][1] for row in self.rows) + pair * len(self.rows) ** 2

    def _parts(self, row: Shape, one: int, measure: Measure) -> tuple[int, int, int]:
        two, three = (measure(self.specimen.batch(replace(row, batch_size=size))) for size in (2, 3))
        pair = (three - 2 * two + one) // 2
        each = two - one - 3 * pair
        return one - each - pair, each, pair


def padded_cases(specimen: Specimen) -> list[PaddedCase]:
    """Short and long rows; for encoder-decoders the source padded alone, then the target padded as well."""
    longest = specimen.example.length
    lengths = (longest - 2 * (longest // 6) - 1, longest, longest // 2)
    if not specimen.has_target:
        return [_case(specimen, "padded", lengths, (specimen.example.target_length,) * 3)]
    target = specimen.example.target_length
    return [
        _case(specimen, "source padded", lengths, (target,) * 3),
        _case(specimen, "source padded, target as wide as the source", lengths, (longest,) * 3),
        _case(specimen, "source and target padded", lengths, (target, target - 5, target - 2)),
    ]


def _case(specimen: Specimen, what: str, lengths: tuple[int, ...], targets: tuple[int, ...]) -> PaddedCase:
    batch = dict(specimen.batch(Shape(len(lengths), max(lengths), max(targets))))
    mask = _mask(lengths)
    batch["attention_mask"] = mask.to(batch["attention_mask"].dtype) if "attention_mask" in batch else mask
    labels: Any = batch.get("labels")
    if specimen.has_target:
        if len(set(targets)) > 1:
            target_mask = _mask(targets)
            batch["labels"] = labels.masked_fill(target_mask == 0, IGNORED_LABEL)
            if specimen.takes_target_mask:
                batch["decoder_attention_mask"] = target_mask
    elif isinstance(labels, torch.Tensor) and labels.shape == mask.shape:
        batch["labels"] = labels.masked_fill(mask == 0, IGNORED_LABEL)
    rows = tuple(Shape(1, length, target) for length, target in zip(lengths, targets, strict=True))
    return PaddedCase(what, specimen, batch, rows)


def _mask(lengths: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
