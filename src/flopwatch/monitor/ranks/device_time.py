"""How long an accelerator is busy with the work of its own rank, by the events around a step and its passes.

Of a step's `seconds` on the device, `input_wait_seconds` are those in which it had no work as its rank waited for a
batch, and `ranks_wait_seconds` those in which it waited for other ranks (see `waits`). The rest is the rank's own work:
passes and optimizer count as compute, what is outside of them as host.

If it is not known where ranks wait for each other, the input wait is still the rank's own: it begins after everything
that the device did for the step before. A collective of all ranks that is overlooked can hide a slow rank, and does not
make another one look slow: the ranks that work less wait in it, and their wait counts as work.

Written from torch's documentation, and not yet run on a GPU.
"""

from collections import deque
from collections.abc import Sequence
from math import pi, sqrt
from statistics import median
from typing import NamedTuple

from flopwatch.monitor.measured_step import MeasuredStep, input_wait_share, seconds_of
from flopwatch.monitor.ranks.reports import Profile
from flopwatch.monitor.ranks.waits import KnownWaits

_SECONDS_REMEMBERED = 60.0
_FEWEST_STEPS, _MOST_STEPS = 32, 512
"""Medians are over the last minute, at least over so many steps: few steps have marks around their passes."""
_MOST_WITHOUT = 64
"""After so many steps without such marks, medians over earlier ones are not used any longer."""
_NOT_SEEN = "the forward and backward passes of its steps were not seen whole"
_TO_SIGMA = 1.4826
"""Median of the absolute deviations times this is the standard deviation, if values are normally distributed."""
_OF_MEDIAN = sqrt(pi / 2)
"""The standard error of a median is that of the mean times this, if values are normally distributed."""


class _OwnWork(NamedTuple):
    """A step's own work. `ended` is the time of all steps up to its end, in seconds."""

    ended: float
    compute: float
    host: float


class DeviceTime:
    """The own work of a rank in the last steps that have marks around their passes.

    Attributes:
        waits: Where the passes wait for other ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.waits = KnownWaits(world_size)
        self._steps: deque[_OwnWork] = deque(maxlen=_MOST_STEPS)
        self._seconds, self._without = 0.0, 0

    @property
    def why_unknown(self) -> str | None:
        """Why more than the input wait is not known; None if it is, or if that is not certain yet."""
        return self.waits.why_unknown or (_NOT_SEEN if self._without > _MOST_WITHOUT else None)

    def profile(self, measured: Sequence[MeasuredStep]) -> Profile:
        """The busy time by cause in a window, as far as it is known; each step has a time."""
        for step in measured:
            self._seconds += step.seconds or 0.0
            self._without += 1
            if step.ranks_wait_seconds is not None and step.passes_seconds is not None:
                own = (step.work_seconds or 0.0) - step.ranks_wait_seconds
                compute = step.passes_seconds - step.ranks_wait_seconds + (step.optimizer_seconds or 0.0)
                self._steps.append(_OwnWork(self._seconds, compute, max(0.0, own - compute)))
                self._without = 0
        if self._without > _MOST_WITHOUT:
            self._steps.clear()
        waited = (input_wait_share(measured) or 0.0) * seconds_of(measured) / len(measured)
        return self._with_work(waited)

    def _with_work(self, waited: float) -> Profile:
        steps = list(self._steps)
        recent = [step for step in steps if step.ended > self._seconds - _SECONDS_REMEMBERED]
        recent = recent if len(recent) >= _FEWEST_STEPS else steps[-_FEWEST_STEPS:]
        if len(recent) < _FEWEST_STEPS:
            return Profile(waited, None, None)
        own = [step.compute + step.host for step in recent]
        typical = median(own)
        sigma = _TO_SIGMA * median(abs(seconds - typical) for seconds in own)
        compute, host = (median(getattr(step, name) for step in recent) for name in ("compute", "host"))
        return Profile(waited, compute, host, (_OF_MEDIAN * sigma) ** 2 / len(own))
