"""What the zoo knows of one architecture: how to build it, and how to make batches for it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import nn

Status = Literal["equal", "told", "wrong", "not asked"]
COLUMNS = ("count", "law", "padding")


@dataclass(frozen=True)
class Shape:
    """Samples, positions of the main sequence, positions of the decoder's own; those a model lacks are not read."""

    batch_size: int
    length: int = 0
    target_length: int = 0


@dataclass(frozen=True)
class Specimen:
    """An architecture that is built and has run one real step."""

    kind: str
    build: Callable[[bool], nn.Module]
    """A fresh model in training mode; True asks for eager attention and experts."""
    batch: Callable[[Shape], Any]
    example: Shape
    has_length: bool = False
    has_target: bool = False
    law_length: Literal["length", "target_length"] = "length"
    """Which of the two a law calls `seq_len`: that of the tokens; features of sounds are not."""
    takes_mask: bool = False
    takes_target_mask: bool = False


@dataclass(frozen=True)
class Verdict:
    """One cell of the table."""

    status: Status
    got: int | None = None
    truth: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """One row of the table; `error` says why there is none."""

    name: str
    family: str
    kind: str = ""
    error: str = ""
    seconds: float = 0.0
    """Processor time, which other work on the machine does not lengthen."""
    cells: dict[str, Verdict] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Outcome":
        cells = {column: Verdict(**cell) for column, cell in record["cells"].items()}
        return cls(**{**record, "cells": cells})
