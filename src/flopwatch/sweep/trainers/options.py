"""The options of the built-in trainers, and the `privacy` settings of a matrix. Never loads torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flopwatch.errors import InputError
from flopwatch.records.trial import COMMAND, is_private


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """The `options` of a trial with a built-in trainer.

    Attributes:
        lr: Learning rate.
        max_grad_norm: The norm that the gradient of every sample is clipped to; the standard trainer does not clip.
        noise_multiplier: Standard deviation of the noise divided by `max_grad_norm`; the standard trainer adds none.
    """

    lr: float = 1e-3
    max_grad_norm: float = 1.0
    noise_multiplier: float = 1.0


def read_options(options: Mapping[str, Any]) -> TrainerOptions:
    """Check the options. Each built-in trainer accepts all of them, because a sweep gives every trainer the same ones.

    >>> read_options({"max_grad_norm": 0.1}).max_grad_norm
    0.1
    """
    known = [field.name for field in fields(TrainerOptions)]
    for name, value in options.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise InputError(f"the built-in trainers have no option {name!r}; they have {', '.join(known)}{hint}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
            raise InputError(f"option {name} must be a number of at least 0, got {value!r}")
    if options.get("max_grad_norm") == 0:
        raise InputError("option max_grad_norm must be above 0, because 0 would clip every gradient to zero")
    return TrainerOptions(**options)


_USUAL_DELTA = 1e-5
"""Default delta for a data set of unknown size; otherwise the default is 1 divided by the size."""


class PrivacySettings(BaseModel):
    """The planned training: data set size or sampling rate, epochs or steps, and Opacus's accountant for epsilon."""

    model_config = ConfigDict(extra="forbid")

    dataset_size: Annotated[int, Field(ge=1)] | None = None
    sample_rate: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    accountant: Literal["prv", "rdp", "gdp"] = "prv"  # the default of Opacus's PrivacyEngine
    target_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> "PrivacySettings":
        for first, second in (("dataset_size", "sample_rate"), ("epochs", "steps")):
            if (getattr(self, first) is None) == (getattr(self, second) is None):
                raise ValueError(f"give exactly one of {first} and {second}")
        return self

    def as_spec(self, trainer: str, batch_size: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """The settings for a trial's spec, with default values; empty if the trainer cannot be private."""
        if not may_be_private(trainer):
            return {}
        if self.dataset_size is not None and batch_size > self.dataset_size:
            raise InputError(
                f"privacy.dataset_size is {self.dataset_size}, less than the batch size of {batch_size}; give the "
                "number of samples in the whole data set"
            )
        if self.target_epsilon is not None and "noise_multiplier" in options:
            raise InputError(
                "privacy.target_epsilon and options.noise_multiplier both determine the noise; leave one out"
            )
        given = self.model_dump(exclude_none=True)
        delta = 1 / self.dataset_size if self.dataset_size is not None and self.dataset_size > 1 else _USUAL_DELTA
        return {"delta": delta, **given}


def may_be_private(trainer: str) -> bool:
    """Whether a trainer is private, or is a class of the user, which declares that only once it is built."""
    return is_private(trainer) is not False and trainer != COMMAND


def check_privacy_used(privacy: PrivacySettings | None, trainers: Sequence[str]) -> None:
    """Raise InputError if there are privacy settings, but no trainer can be private."""
    if privacy is not None and not any(map(may_be_private, trainers)):
        raise InputError(
            "the setting `privacy` needs one of the trainers dpsgd, ghost, fast or a class of your own that declares "
            f"its privacy, but the matrix has only {', '.join(dict.fromkeys(trainers))}; add a private trainer, or "
            "leave `privacy` out"
        )
