"""The `privacy` of a matrix: which training the epsilon is asked for. Never loads torch."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flopwatch.errors import InputError
from flopwatch.sweep.trainers.names import PRIVATE

_USUAL_DELTA = 1e-5
"""Where the size of the data set is not known; else 1 over it."""


class PrivacySettings(BaseModel):
    """A training: its data or sampling rate, its length, and how epsilon is worked out."""

    model_config = ConfigDict(extra="forbid")

    dataset_size: Annotated[int, Field(ge=1)] | None = None
    sample_rate: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    accountant: Literal["prv", "rdp", "gdp"] = "prv"  # what Opacus's PrivacyEngine takes when nobody says
    target_epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> "PrivacySettings":
        for first, second in (("dataset_size", "sample_rate"), ("epochs", "steps")):
            if (getattr(self, first) is None) == (getattr(self, second) is None):
                raise ValueError(f"give either {first} or {second}")
        return self

    def as_spec(self, trainer: str, batch_size: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """What stands in a trial's spec: all that matters, and nothing where the trainer is not private.

        Raises:
            InputError: The settings do not go with this trial.
        """
        if trainer not in PRIVATE:
            return {}
        if self.dataset_size is not None and batch_size > self.dataset_size:
            raise InputError(
                f"privacy.dataset_size is {self.dataset_size}, less than a batch of {batch_size}: name the samples of "
                "the whole data set"
            )
        if self.target_epsilon is not None and "noise_multiplier" in options:
            raise InputError(
                "privacy.target_epsilon asks for the noise, and options.noise_multiplier gives it; leave one out"
            )
        given = self.model_dump(exclude_none=True)
        delta = 1 / self.dataset_size if self.dataset_size is not None and self.dataset_size > 1 else _USUAL_DELTA
        return {"delta": delta, **given}


def check_privacy_used(privacy: PrivacySettings | None, trainers: Sequence[str]) -> None:
    """Raises:
    InputError: Epsilon is asked for, and no trainer is known to be private.
    """
    if privacy is not None and not any(trainer in PRIVATE for trainer in trainers):
        raise InputError(
            f"privacy asks for epsilon, and {', '.join(dict.fromkeys(trainers))} is none of {', '.join(PRIVATE)}; add "
            "one of them, or leave privacy out"
        )
