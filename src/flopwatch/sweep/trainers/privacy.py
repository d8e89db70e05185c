"""Computes the epsilon of a planned private training from the `privacy` settings of a matrix. Never loads torch.

The trial itself trains on random data, so it has no epsilon. Opacus's accountants assume Poisson sampling: each sample
is in a batch with the same probability, independently of all others.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, isfinite, log, sqrt
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flopwatch.errors import InputError, MissingDependencyError
from flopwatch.optional import require
from flopwatch.records.privacy import Privacy, PrivacySpent
from flopwatch.records.trial import COMMAND, is_private
from flopwatch.sweep.trainers.opacus_internals import epsilon_spent, load_opacus, prv_half_width
from flopwatch.text import first_line

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


_MOST_POINTS = 2_000_000
"""The maximum number of grid points of the PRV accountant. That many points take up to 1 GB and some seconds."""

_TARGET_ERROR = 0.01
"""How far epsilon may be below the target when the search for the noise ends. Opacus's own search uses this default."""

_MOST_TRIES = 12
"""The search for the noise halves the interval from x / 2 to x this many times, so its error is at most x / 8192."""

_EPSILON_ERROR = 0.01
"""The PRV accountant's default error of epsilon. With steps and delta, it determines the accountant's grid."""


def declared_spent(
    privacy: Mapping[str, Any], batch_size: int, declared: Privacy | None, *, is_builtin: bool = False
) -> PrivacySpent:
    """As `privacy_spent`, for what a trainer declares; what it leaves open is named in `note`, and epsilon is None.

    With a `target_epsilon` the noise is searched only if it is free: in a built-in trainer, or where none is declared.
    """
    not_declared = "epsilon is unknown: the trainer has no attribute `privacy` of type flopwatch.sweep.Privacy"
    target = privacy.get("target_epsilon")
    why = declared.why_unknown(is_noise_searched=target is not None) if declared is not None else not_declared
    noise = declared.noise_multiplier if declared is not None else None
    if not why and noise is not None and target is not None and not is_builtin:
        own = {name: value for name, value in privacy.items() if name != "target_epsilon"}
        spent = privacy_spent(own, batch_size, noise)
        return _noted(spent, f"the trainer declares its noise, so the target epsilon of {target:g} does not change it")
    if not why:
        return privacy_spent(privacy, batch_size, noise if noise is not None else 1.0)
    rate, steps = training_plan(privacy, batch_size)
    return PrivacySpent(None, privacy["delta"], noise, float(rate), steps, privacy["accountant"], why)


def privacy_spent(privacy: Mapping[str, Any], batch_size: int, noise_multiplier: float) -> PrivacySpent:
    """The epsilon of a trial's `privacy` settings, or the noise for their `target_epsilon`.

    If Opacus cannot compute epsilon, it is None and `note` has Opacus's message. The trial's steps do not run again
    with the noise for a target, because the noise level changes neither time nor memory.
    """
    rate, steps = training_plan(privacy, batch_size)
    accountant, target = privacy["accountant"], privacy.get("target_epsilon")
    training = PrivacySpent(None, privacy["delta"], noise_multiplier, float(rate), steps, accountant)
    if rate > 1:
        return _noted(training, f"a batch of {batch_size} is larger than the data set")
    load_opacus()  # called first, because importing Opacus changes the log format, and this call restores it
    try:
        with warnings.catch_warnings():  # the search causes warnings about noise levels that it only tries
            warnings.simplefilter("ignore")
            training = training if target is None else _with_noise_for(training, target)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = _spent(training)
    except MissingDependencyError:
        raise
    except Exception as error:  # noqa: BLE001 - scipy and Opacus raise various errors for extreme settings
        return _noted(training, f"Opacus's accountant {accountant} failed: {first_line(error)}")
    for message in dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, UserWarning)):
        # The PRV accountant uses the RDP accountant only for the width of its grid, where this warning does not matter.
        if found.accountant != "prv" or not message.startswith("Optimal order"):
            found = _noted(found, f"Opacus says: {message}")
    return found


def training_plan(privacy: Mapping[str, Any], batch_size: int) -> tuple[Fraction, int]:
    """The probability that a sample is in a batch, and the number of training steps, rounded up.

    >>> training_plan({"dataset_size": 50_000, "epochs": 3}, 512)
    (Fraction(32, 3125), 293)
    """
    size = privacy.get("dataset_size")
    # The fraction is made from the decimal text, so that 0.01 is exactly 1/100.
    rate = Fraction(batch_size, size) if size is not None else Fraction(str(privacy["sample_rate"]))
    steps = privacy.get("steps")
    return rate, steps if steps is not None else ceil(Fraction(str(privacy["epochs"])) / rate)


def _spent(training: PrivacySpent) -> PrivacySpent:
    noise = training.noise_multiplier
    if not noise:
        return _noted(training, "epsilon is infinite, because the noise multiplier is 0")
    epsilon = _epsilon(training, noise)
    if epsilon is None:
        too_large = "epsilon is the looser bound of the accountant rdp, because prv would take gigabytes of memory here"
        return _noted(_spent(replace(training, accountant="rdp")), too_large)
    if not isfinite(epsilon) or epsilon < 0:  # the RDP accountant returns such values for a delta near 1
        return _noted(
            training, f"Opacus's accountant {training.accountant} returned {epsilon:.4g}, which is no valid epsilon"
        )
    return replace(training, epsilon=epsilon)


def _with_noise_for(training: PrivacySpent, target: float) -> PrivacySpent:
    if training.accountant != "prv":
        return replace(training, noise_multiplier=_noise(training, target))
    # Opacus's search begins with very low noise, for which the PRV accountant takes gigabytes. So this search begins
    # with the noise that the RDP accountant gives.
    try:
        high = _noise(replace(training, accountant="rdp"), target)
    except ValueError:  # the RDP accountant returns no epsilon below about 0.2, whatever the noise
        high = 1.0
    while (epsilon := _epsilon(training, high)) is not None and epsilon > target:
        high *= 2
    low = 0.5 * high
    for _ in range(_MOST_TRIES):
        if epsilon is None or target - epsilon <= _TARGET_ERROR:
            break
        middle = (low + high) / 2
        tried = _epsilon(training, middle)
        if tried is not None and tried <= target:
            high, epsilon = middle, tried
        else:
            low = middle
    return replace(training, noise_multiplier=high)


def _epsilon(training: PrivacySpent, noise: float) -> float | None:
    """Epsilon with this noise multiplier; None if the PRV accountant would take too much memory for it.

    The number of points of its grid is that of Opacus 1.6 (Gopi et al., arXiv 2106.02848).
    """
    if training.accountant == "prv":
        delta_error = training.delta / 1000
        half_width = prv_half_width(noise, training.sample_rate, training.steps, _EPSILON_ERROR, delta_error)
        mesh = _EPSILON_ERROR / sqrt(training.steps * log(12 / delta_error) / 2)
        if 2 * half_width / mesh > _MOST_POINTS:
            return None
    return epsilon_spent(training.accountant, noise, training.sample_rate, training.steps, training.delta)


def _noise(training: PrivacySpent, target: float) -> float:
    search = require("opacus.accountants.utils", "dp").get_noise_multiplier
    return float(
        search(
            target_epsilon=target,
            target_delta=training.delta,
            sample_rate=training.sample_rate,
            steps=training.steps,
            accountant=training.accountant,
        )
    )


def _noted(spent: PrivacySpent, note: str) -> PrivacySpent:
    return replace(spent, note="; ".join(filter(None, [spent.note, note])))
