"""What a trainer declares about its differential privacy, and what a training spends. Standard library only."""

from dataclasses import dataclass, field
from math import isfinite

from flopwatch.decode import is_amount, valid_if


@dataclass(frozen=True, slots=True)
class Privacy:
    """Says that a trainer is differentially private: it clips the gradient of every sample and adds Gaussian noise.

    A trainer declares it with an attribute `privacy`, of the class or set in `__init__`. The declaration is not
    verified. Epsilon stays unknown without `noise_multiplier` or `max_grad_norm`.

    Attributes:
        noise_multiplier: Standard deviation of the noise, divided by `max_grad_norm`.
        max_grad_norm: The norm that the gradient of every sample is clipped to.
        sampling: How the batches of the real training are drawn. None is taken as `poisson`, which the report states as
            an assumption; with any other word epsilon is unknown, because the accountants are for Poisson sampling.

    >>> Privacy(noise_multiplier=0.8, max_grad_norm=1.0).why_unknown()
    ''
    >>> Privacy(max_grad_norm=1.0).why_unknown()
    'epsilon is unknown: the trainer declares no noise_multiplier'
    """

    noise_multiplier: float | None = None
    max_grad_norm: float | None = None
    sampling: str | None = None

    def why_unknown(self, *, is_noise_searched: bool = False) -> str:
        """Why there is no epsilon for such a training; empty if there is one."""
        needed = ("max_grad_norm",) if is_noise_searched else ("noise_multiplier", "max_grad_norm")
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            return f"epsilon is unknown: the trainer declares no {' and no '.join(missing)}"
        if self.sampling is not None and str(self.sampling).lower() != "poisson":
            return (
                f"epsilon is unknown: the trainer declares the sampling {self.sampling!r}, and Opacus's accountants "
                "are for Poisson sampling"
            )
        return ""

    def why_broken(self) -> str | None:
        for name, least in (("noise_multiplier", "at least 0"), ("max_grad_norm", "above 0")):
            value = getattr(self, name)
            if value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
            if not is_number or value < 0 or (value == 0 and least == "above 0"):
                return f"{name} of Privacy must be a number {least}, got {value!r}"
        return None


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """The privacy budget that a training of `steps` steps spends, computed by one of Opacus's accountants.

    Attributes:
        epsilon: Epsilon for `delta`, which may be infinite; None if it cannot be computed, with the reason in `note`.
        delta: The delta of (epsilon, delta) differential privacy.
        noise_multiplier: Standard deviation of the noise, divided by the clipping bound; None if it is unknown.
        sample_rate: Probability that a sample is in a batch.
        steps: Steps of the whole training, not of the trial.
        accountant: `rdp`, `prv` or `gdp`.
        note: A warning of Opacus, or why epsilon is None.
    """

    epsilon: float | None = field(metadata=valid_if(lambda value: type(value) is float or is_amount(value)))
    delta: float
    noise_multiplier: float | None
    sample_rate: float
    steps: int
    accountant: str
    note: str = ""
