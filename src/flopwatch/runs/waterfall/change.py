"""The difference of two waterfalls, in points of the peak."""

from dataclasses import dataclass

from flopwatch.records.time_uses import LOSSES
from flopwatch.runs.waterfall.losses import Waterfall

_LEAST_POINTS = 1.0
"""Two runs of the same training differ by some tenths of a point; a smaller change is not put into words."""


@dataclass(frozen=True, slots=True)
class LossChange:
    """One loss in two runs, in percent of the peak; 0 in a run that does not have it. `change` is in points.

    Attributes:
        key: Its stable name, such as `input_wait`.
        name: Its name for people, such as "input wait".
        a: Percent of the peak that it costs in run A.
        b: Percent of the peak that it costs in run B.
        change: From A to B, in points.
    """

    key: str
    name: str
    a: float
    b: float
    change: float


@dataclass(frozen=True, slots=True)
class WaterfallChange:
    """The difference of two waterfalls. The changes of the losses add up to minus the change of MFU.

    Attributes:
        mfu_a: MFU of the whole run A, in percent.
        mfu_b: MFU of the whole run B, in percent.
        losses: The losses of either run, the largest change first.
        sentence: How MFU changed. Points are shares of the wall time, so they do not tell which loss is the reason:
            once one has shrunk, the others have more points. `flopwatch.runs.per_step` tells it.
    """

    mfu_a: float
    mfu_b: float
    losses: tuple[LossChange, ...]
    sentence: str


def waterfall_change(a: Waterfall | None, b: Waterfall | None) -> WaterfallChange | None:
    """The difference of two waterfalls; None if one of them is unknown. Both need a trace, or none of them."""
    if a is None or b is None:
        return None
    points = {key: (a.points(key), b.points(key)) for key in LOSSES}
    changes = [
        LossChange(key, LOSSES[key].name, in_a, in_b, in_b - in_a)
        for key, (in_a, in_b) in points.items()
        if in_a or in_b
    ]
    changes.sort(key=lambda loss: -abs(loss.change))
    return WaterfallChange(a.mfu_percent, b.mfu_percent, tuple(changes), _sentence(a, b))


def _sentence(a: Waterfall, b: Waterfall) -> str:
    gained = b.mfu_percent - a.mfu_percent
    if abs(gained) < _LEAST_POINTS:
        return f"MFU of the whole run changed by less than {_LEAST_POINTS:g} point."
    direction = "rose" if gained > 0 else "fell"
    return f"MFU of the whole run {direction} from {a.mfu_percent:.1f} to {b.mfu_percent:.1f} %."
