"""The `privacy` of a matrix: which training the epsilon is asked for. Never loads torch."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, isfinite, log, sqrt
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from flopwatch.errors import InputError
from flopwatch.optional import require
from flopwatch.records.trainer_names import PRIVATE
from flopwatch.records.trial import PrivacySpent
from flopwatch.sweep.trainers.opacus_internals import load_opacus

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


# What a private training would spend, by Opacus's own accountants.
#
# A trial trains on random data and spends nothing; this is about the training its settings stand for. Every accountant
# assumes Poisson sampling: each sample is in a batch with the same chance, independently of the others.


_MOST_POINTS = 2_000_000
"""Of the PRV accountant's grid: up to 1 GB and some seconds, and both grow with it."""

_TARGET_ERROR = 0.01
_MOST_TRIES = 12
"""Of noise between too little and enough: to 1 in 8,000 of it."""

_EPSILON_ERROR = 0.01
"""The PRV accountant's default; with the steps and delta it makes the grid's width."""


def privacy_spent(privacy: Mapping[str, Any], batch_size: int, noise_multiplier: float) -> PrivacySpent:
    """Epsilon for the trial's `privacy` settings; with a `target_epsilon` there, the noise that reaches it.

    Whatever Opacus cannot work out is None, with its words in the note: the trial is measured already. A trial's
    steps are not made again with the noise for a target, whose level changes neither time nor memory.

    Args:
        privacy: `dataset_size` or `sample_rate`, `epochs` or `steps`, `delta`, `accountant`, `target_epsilon`.
        batch_size: Samples of a logical batch.
        noise_multiplier: Of the trial; not looked at when there is a target.
    """
    rate, steps = training_plan(privacy, batch_size)
    accountant, target = privacy["accountant"], privacy.get("target_epsilon")
    asked = PrivacySpent(None, privacy["delta"], noise_multiplier, float(rate), steps, accountant)
    if rate > 1:
        return _noted(asked, f"a batch of {batch_size} is larger than the data set")
    load_opacus()  # first: it keeps what importing Opacus does to the program's log away
    try:
        with warnings.catch_warnings():  # of noise that was only tried
            warnings.simplefilter("ignore")
            asked = asked if target is None else _with_noise_for(asked, target)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = _spent(asked)
    except Exception as error:  # scipy's and Opacus's own, for settings that are far out
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        return _noted(asked, f"Opacus's accountant {accountant} could not tell: {words}")
    for words in dict.fromkeys(str(one.message) for one in said if issubclass(one.category, UserWarning)):
        # The PRV accountant uses rdp for the width of its grid only, where its orders matter little.
        if found.accountant != "prv" or not words.startswith("Optimal order"):
            found = _noted(found, f"Opacus says: {words}")
    return found


def training_plan(privacy: Mapping[str, Any], batch_size: int) -> tuple[Fraction, int]:
    """The chance of a sample to be in a batch, and the steps of the training; a part of a step counts as one.

    >>> training_plan({"dataset_size": 50_000, "epochs": 3}, 512)
    (Fraction(32, 3125), 293)
    """
    size = privacy.get("dataset_size")
    # By its text: 0.01 is 1/100 here, and not the nearest number to the base 2.
    rate = Fraction(batch_size, size) if size is not None else Fraction(str(privacy["sample_rate"]))
    steps = privacy.get("steps")
    return rate, steps if steps is not None else ceil(Fraction(str(privacy["epochs"])) / rate)


def _spent(asked: PrivacySpent) -> PrivacySpent:
    if asked.noise_multiplier == 0:
        return _noted(asked, "without noise no epsilon holds")
    if asked.accountant == "prv" and _grid_points(asked) > _MOST_POINTS:
        return _noted(_spent(_by_rdp(asked)), _TOO_LARGE)
    epsilon = _epsilon(asked)
    if not isfinite(epsilon) or epsilon < 0:  # rdp, for a delta near 1
        return _noted(asked, f"Opacus's accountant {asked.accountant} gave {epsilon:.4g}, which is no epsilon")
    return replace(asked, epsilon=epsilon)


_TOO_LARGE = "the PRV accountant would take gigabytes here, so this is the looser bound of rdp"


def _with_noise_for(asked: PrivacySpent, target: float) -> PrivacySpent:
    """The least noise whose epsilon is at most the target and at most 0.01 below it, as Opacus searches."""
    if asked.accountant != "prv":
        return replace(asked, noise_multiplier=_noise(asked, target))
    # Opacus's search would try noise far too low, where the PRV accountant takes gigabytes: begin where rdp ends.
    try:
        high = _noise(_by_rdp(asked), target)
    except ValueError:  # rdp has no epsilon below about 0.2, whatever the noise
        high = 1.0
    while (epsilon := _tried(asked, high)) is not None and epsilon > target:
        high *= 2
    low = 0.5 * high
    for _ in range(_MOST_TRIES):
        if epsilon is None or target - epsilon <= _TARGET_ERROR:
            break
        middle = (low + high) / 2
        tried = _tried(asked, middle)
        if tried is not None and tried <= target:
            high, epsilon = middle, tried
        else:
            low = middle
    return replace(asked, noise_multiplier=high)


def _tried(asked: PrivacySpent, noise: float) -> float | None:
    """Epsilon at this noise; None where finding it takes too much."""
    at_noise = replace(asked, noise_multiplier=noise)
    return _epsilon(at_noise) if _grid_points(at_noise) <= _MOST_POINTS else None


def _epsilon(asked: PrivacySpent) -> float:
    accountant = require("opacus.accountants", "dp").create_accountant(mechanism=asked.accountant)
    accountant.history = [(asked.noise_multiplier, asked.sample_rate, asked.steps)]
    return float(accountant.get_epsilon(delta=asked.delta))


def _noise(asked: PrivacySpent, target: float) -> float:
    search = require("opacus.accountants.utils", "dp").get_noise_multiplier
    return float(
        search(
            target_epsilon=target,
            target_delta=asked.delta,
            sample_rate=asked.sample_rate,
            steps=asked.steps,
            accountant=asked.accountant,
        )
    )


def _grid_points(asked: PrivacySpent) -> float:
    """Of the grid `PRVAccountant` would make (Gopi et al., arXiv 2106.02848, as Opacus 1.6 does it)."""
    analysis = require("opacus.accountants.analysis.prv", "dp")
    delta_error = asked.delta / 1000
    half_width = analysis.compute_safe_domain_size(
        prvs=[analysis.PoissonSubsampledGaussianPRV(asked.sample_rate, asked.noise_multiplier)],
        max_self_compositions=[asked.steps],
        eps_error=_EPSILON_ERROR,
        delta_error=delta_error,
    )
    mesh = _EPSILON_ERROR / sqrt(asked.steps * log(12 / delta_error) / 2)
    return float(2 * half_width / mesh)


def _by_rdp(asked: PrivacySpent) -> PrivacySpent:
    return replace(asked, accountant="rdp")


def _noted(spent: PrivacySpent, words: str) -> PrivacySpent:
    return replace(spent, note="; ".join(filter(None, [spent.note, words])))
