"""The difference of two waterfalls: which loss shrank, and which one grew."""

from dataclasses import dataclass

from flopwatch.runs.waterfall.losses import Waterfall
from flopwatch.runs.waterfall.texts import LOSSES

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
        sentence: Which loss shrank or grew most.
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
    return WaterfallChange(a.mfu_percent, b.mfu_percent, tuple(changes), _sentence(a, b, changes))


def _sentence(a: Waterfall, b: Waterfall, changes: list[LossChange]) -> str:
    gained = b.mfu_percent - a.mfu_percent
    of_run = f"MFU of the whole run changed by less than {_LEAST_POINTS:g} point"
    if abs(gained) >= _LEAST_POINTS:
        direction = "rose" if gained > 0 else "fell"
        of_run = f"MFU of the whole run {direction} from {a.mfu_percent:.1f} to {b.mfu_percent:.1f} %"
    extremes = [loss for loss in _extremes(changes, has_risen=gained >= _LEAST_POINTS) if _is_told(loss)]
    told = ", and ".join(map(_moved, extremes)) or f"no loss changed by {_LEAST_POINTS:g} point or more"
    return f"{of_run}: {told}.{_SHARES if len(extremes) > 1 else ''}"


_SHARES = (
    " Points are shares of the wall time, so a loss that takes as long as before has more of them once another one "
    "has shrunk."
)


def _is_told(loss: LossChange) -> bool:
    return abs(loss.change) >= _LEAST_POINTS


def _extremes(changes: list[LossChange], *, has_risen: bool) -> list[LossChange]:
    """The loss that shrank most and the one that grew most. If MFU has risen, the reason for that comes first."""
    first = [next((loss for loss in changes if (loss.change > 0) == grew), None) for grew in (False, True)]
    found = [loss for loss in first if loss is not None]
    return found if has_risen else sorted(found, key=lambda loss: -abs(loss.change))


def _moved(loss: LossChange) -> str:
    what = "shrank" if loss.change < 0 else "grew"
    return f"{loss.name} {what} most (from {loss.a:.1f} to {loss.b:.1f} points)"
