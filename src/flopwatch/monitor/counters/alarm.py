"""Holds what hardware counters saw against what flopwatch counted, and names the likely reason if they disagree (pure).

The share of cycles in which the tensor cores are busy, times the clock, follows the utilisation that is computed from
FLOPs: within 2 points after a correction for tiles, with r = 0.78 over 608 production trainings, in which it found two
wrong FLOP formulas (arXiv 2605.20799). flopwatch does not correct for tiles, so the cores may be busy with their
padding, up to 15 % in trainings whose sizes are no multiples of a tile; `_TOLERANCE` leaves room for this and noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from flopwatch.hardware.counters.sampler import LONGEST_INTERVAL_SECONDS
from flopwatch.monitor.counters.values import weighted_mean

_TOLERANCE = 0.25
"""Counted FLOP/s and those by counters agree up to this factor, either way."""
LEAST_POINTS = 3.0
"""They also agree if they differ by fewer points of the peak: the 2 points of the paper, and noise."""
CONFIRMED_BY = 3
"""An alarm needs so many spans in a row with the same verdict."""
_SPAN_SECONDS, _SPAN_READINGS = 5.0, 10
"""A span is as many windows as it takes to have these: shorter ones say little, because both ends are uncertain."""
_COVERED = 0.9
"""Windows whose steps take less than this share of the counters' time are left out: other work is in the rest."""
_LOW_CLOCK, _OFTEN_THROTTLED = 0.9, 0.5
_LEAST_FOREIGN_BYTES = 512 << 20
"""A process that computes on a GPU holds more; the driver alone needs some hundred MB for it."""
_BUSY = 0.05
_TILES = 1.15

Kind = Literal["not_counted", "peak_type", "other_process", "throttled"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One device in some seconds: what the steps did by count, and what its counters saw. None means unknown.

    Attributes:
        seconds: Time between the first and the last reading; `steps_seconds` is that of the timed steps.
        counted_flops_per_s: Executed FLOPs per second of step time (those of HFU), in types of the tensor cores.
        counter_flops_per_s: FLOP/s by the counters.
        peak_flops_per_s: Peak for the compute type in use, `dtype`, or the mean peak of those on the tensor cores.
        clock_share: The mean clock, divided by that of the peak.
        throttled: Share of the readings in which the clock was held down, by reason, the most frequent first.
        peaks: Peaks of the device by compute type, also of types that are not in use.
        uses_tensor_cores: False if no product ran in a type that runs on tensor cores, so that they should be idle.
        is_type_seen: True if `dtype` was seen in the products that ran; False if it was set, or follows from weights.
    """

    seconds: float
    steps_seconds: float
    readings: int
    dtype: str
    peak_flops_per_s: float
    counted_flops_per_s: float
    counter_flops_per_s: float | None = None
    tensor_active: float | None = None
    clock_share: float | None = None
    throttled: tuple[tuple[str, float], ...] = ()
    other_memory_bytes: int | None = None
    peaks: Mapping[str, float] = field(default_factory=dict)
    uses_tensor_cores: bool = True
    is_type_seen: bool = True

    @property
    def is_comparable(self) -> bool:
        """Whether the counters saw the steps and little else; readings come up to an interval after the steps' ends."""
        interval = self.seconds / max(self.readings, 1)
        allowed = max((1 - _COVERED) * self.seconds, min(interval, LONGEST_INTERVAL_SECONDS))
        return self.seconds > 0 and abs(self.steps_seconds - self.seconds) <= allowed


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What an alarm says.

    Attributes:
        kind: The likely reason: `not_counted`, `peak_type`, `other_process` or `throttled`.
        compared: What was compared.
        likely_type: With `peak_type`, the compute type whose peak would explain it; None if none does.
    """

    kind: Kind
    compared: Compared
    likely_type: str | None = None


def is_near(ratio: float) -> bool:
    """Whether FLOP/s by counters and counted ones agree, given their ratio."""
    return 1 / (1 + _TOLERANCE) <= ratio <= 1 + _TOLERANCE


def judge(compared: Compared) -> Disagreement | None:
    """The likely reason why counters and count disagree; None if they agree, or if one of them is unknown.

    >>> seen = Compared(10, 10, 50, "bf16", 989e12, 400e12, counter_flops_per_s=430e12)
    >>> judge(seen) is None
    True
    >>> from dataclasses import replace
    >>> judge(replace(seen, counter_flops_per_s=800e12)).kind
    'not_counted'
    """
    if compared.counter_flops_per_s is None:
        is_busy = not compared.uses_tensor_cores and (compared.tensor_active or 0.0) >= _BUSY
        return Disagreement("peak_type", compared) if is_busy else None
    difference = compared.counter_flops_per_s - compared.counted_flops_per_s
    if compared.counted_flops_per_s <= 0 or compared.peak_flops_per_s <= 0:
        return None
    ratio = compared.counter_flops_per_s / compared.counted_flops_per_s
    is_close = 100 * abs(difference) / compared.peak_flops_per_s < LEAST_POINTS
    if is_close or is_near(ratio):
        return Disagreement("throttled", compared) if _is_held_down(compared) else None
    likely = _type_with_ratio(compared, ratio)
    if ratio < 1:
        return Disagreement("peak_type", compared, likely)
    if (compared.other_memory_bytes or 0) >= _LEAST_FOREIGN_BYTES:
        return Disagreement("other_process", compared)
    if likely is not None and not compared.is_type_seen:
        return Disagreement("peak_type", compared, likely)
    return Disagreement("not_counted", compared)


def _is_held_down(compared: Compared) -> bool:
    often = bool(compared.throttled) and compared.throttled[0][1] >= _OFTEN_THROTTLED
    return often and compared.clock_share is not None and compared.clock_share < _LOW_CLOCK


def _type_with_ratio(compared: Compared, ratio: float) -> str | None:
    """The type whose peak makes counters and count agree; tiles make the counters' figure up to 15 % higher."""
    explains = {
        name: abs(ratio * peak / compared.peak_flops_per_s / _TILES**0.5 - 1)
        for name, peak in compared.peaks.items()
        if name != compared.dtype and is_near(ratio * peak / compared.peak_flops_per_s)
    }
    return min(explains, key=lambda name: explains[name], default=None)


class CounterAlarm:
    """Confirms disagreements over several spans, and gives each kind once."""

    def __init__(self) -> None:
        self._span: list[Compared] = []
        self._last: Kind | None = None
        self._confirmed = 0
        self._given: set[Kind] = set()

    def add(self, compared: Compared) -> Disagreement | None:
        """Add a window; return the disagreement that it confirms and that was not given before."""
        if not compared.is_comparable or (compared.tensor_active is None and compared.counter_flops_per_s is None):
            return None
        self._span.append(compared)
        if sum(each.seconds for each in self._span) < _SPAN_SECONDS or (
            sum(each.readings for each in self._span) < _SPAN_READINGS
        ):
            return None
        found, self._span = judge(_joined(self._span)), []
        kind = None if found is None else found.kind
        self._confirmed = self._confirmed + 1 if kind == self._last else 1
        self._last = kind
        if found is None or found.kind in self._given or self._confirmed < CONFIRMED_BY:
            return None
        self._given.add(found.kind)
        return found


def _joined(span: Sequence[Compared]) -> Compared:
    """The windows of a span as one, with means over their time. What is no amount is that of the last window."""
    last, seconds = span[-1], sum(each.seconds for each in span)
    reasons = dict.fromkeys(name for each in span for name, _ in each.throttled)
    shares = {
        name: sum(each.seconds * dict(each.throttled).get(name, 0.0) for each in span) / seconds for name in reasons
    }
    memory = [each.other_memory_bytes for each in span if each.other_memory_bytes is not None]
    return replace(
        last,
        seconds=seconds,
        steps_seconds=sum(each.steps_seconds for each in span),
        readings=sum(each.readings for each in span),
        counted_flops_per_s=weighted_mean(span, "counted_flops_per_s", "seconds") or 0.0,
        counter_flops_per_s=weighted_mean(span, "counter_flops_per_s", "seconds"),
        tensor_active=weighted_mean(span, "tensor_active", "seconds"),
        clock_share=weighted_mean(span, "clock_share", "seconds"),
        throttled=tuple(sorted(shares.items(), key=lambda share: -share[1])),
        other_memory_bytes=min(memory, default=None),  # what was there all the time
    )
