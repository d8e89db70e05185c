"""What costs a run most, in one sentence, or why its log does not tell."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from flopwatch.numbers import duration, percent
from flopwatch.records.time_uses import USES, Use
from flopwatch.runs.comparison import total
from flopwatch.runs.reading import RunLog, provenance_at
from flopwatch.runs.waterfall.losses import Loss, Waterfall, exactness_of, seconds_of
from flopwatch.text import plural

LEAST_STEPS = 20
"""The first steps are warm-up, and the median that tells stalled steps from others needs some more."""
LEAST_STEP_SECONDS = 60.0
"""In a shorter run, start-up and the first evaluation decide every share of the time, whatever the training is like."""
_LEAST_POINTS = 5.0
"""A smaller loss is not worth a verdict: shares of the time differ by some points from one run to the next."""
_LEAST_POINTS_TOGETHER = 15.0
"""Losses below `_LEAST_POINTS` that add up to this are worth saying, although none of them stands out."""
_NEARLY_EQUAL = 0.8
"""A loss of at least this share of the largest one is named too, because another run could rank them the other way."""
_GOOD_SHARE_OF_DATASHEET = 0.5
"""Share of a datasheet's peak that well-tuned forward and backward passes reach. MFU of 40 to 55 % is published for
large models on A100 and H100, with optimizer and communication; passes that are as fast are not called slow."""
_GOOD_SHARE_OF_MEASURED = 0.7
"""The same of the fastest matrix product measured on the device, which is about 0.7 of the datasheet on these."""
_LEAST_EXCESS_POINTS = 1.0
"""If the executed FLOPs exceed what the peak allows by more than this, the peak is too low."""
_SLOW = ("achievable", "below_peak", "slow_matmuls", "other_kernels")
"""Losses of which even a good run has some. What is usual is taken off in this order."""

_IF_PASSES_ARE_NOT_TIMED = {
    "below_peak": replace(
        USES["below_peak"],
        costs="Slow passes or waiting for input cost",
        meaning="the input wait between the passes of a step was not measured, and is at most this",
    ),
    "idle": replace(
        USES["idle"],
        meaning="the device waits for Python or for input: the input wait between the passes of a step was not "
        "measured, and is at most this",
    ),
}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a verdict needs to know about a run besides its waterfall. Unknown values are None.

    Attributes:
        steps: Number of steps of the run.
        step_seconds: Time in steps, with warm-up and input wait.
        exact: Whether the FLOPs are exact.
        good_share: Share of the peak that good forward and backward passes reach on such a device.
        times_passes: Whether the time of forward and backward passes is known. If not, input wait may be part of it.
    """

    steps: int
    step_seconds: float
    exact: bool | None = None
    good_share: float = _GOOD_SHARE_OF_DATASHEET
    times_passes: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """What costs a run most.

    Attributes:
        key: Its stable name: the key of a loss such as `input_wait`, or `two_losses`, `many_losses`, `healthy` or
            `peak_too_low`.
        sentence: The verdict, in one sentence.
        losses: Keys of the losses that the sentence names, largest first.
        reservation: A sentence about what limits the verdict; empty if nothing does.
    """

    key: str
    sentence: str
    losses: tuple[str, ...] = ()
    reservation: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def facts_of(log: RunLog) -> RunFacts:
    """What the end of a log says about the run; `read_around` is enough."""
    steps, uses = total(log, "total/steps"), seconds_of(log)
    seconds = uses.get("train")
    return RunFacts(
        int(steps) if steps is not None and isfinite(steps) else 0,
        float(seconds) if seconds is not None and isfinite(seconds) else 0.0,
        exactness_of(log)[0],
        _good_share(log),
        bool(uses.get("passes_timed")),
    )


def _good_share(log: RunLog) -> float:
    provenance = provenance_at(log, log.rows[-1].step) if log.rows else None
    if provenance is None or provenance.peak is None:
        return _GOOD_SHARE_OF_DATASHEET
    peak, achievable = provenance.peak.get("flops_per_s"), provenance.achievable_flops_per_s
    if provenance.peak.get("kind") == "measured":
        return _GOOD_SHARE_OF_MEASURED
    if not peak or not achievable:
        return _GOOD_SHARE_OF_DATASHEET
    return _GOOD_SHARE_OF_MEASURED * min(float(achievable) / float(peak), 1.0)


def why_no_verdict(waterfall: Waterfall | None, facts: RunFacts) -> str | None:
    """The sentence that says why the data does not support a verdict; None if it does."""
    if waterfall is None:
        return "No verdict: the log has no peak, no FLOPs or no wall time."
    if facts.steps < LEAST_STEPS:
        return f"No verdict: the run has {plural(facts.steps, 'step')}, and a verdict needs {LEAST_STEPS}."
    if facts.step_seconds < LEAST_STEP_SECONDS:
        so_far = duration(facts.step_seconds)
        return f"No verdict: the run has spent {so_far} in steps, and a verdict needs {duration(LEAST_STEP_SECONDS)}."
    return None


def verdict_of(waterfall: Waterfall | None, facts: RunFacts) -> Verdict | None:
    """What costs a run most; None if the data does not support a verdict, see `why_no_verdict`."""
    if waterfall is None or why_no_verdict(waterfall, facts) is not None:
        return None
    step_mfu = waterfall.step_mfu_percent or 0.0
    if waterfall.points("below_peak") < -_LEAST_EXCESS_POINTS or step_mfu > 100:
        need = percent(step_mfu / 100) if step_mfu > 100 else "more than 100 %, with recomputation and padding,"
        return Verdict("peak_too_low", f"The peak is too low to judge this run: its steps reach {need} of it.")
    reservation = ""
    if facts.exact is False:
        reservation = "The FLOPs are not exact, so this verdict relies on the measured times."
    gains = _gains(waterfall, facts.good_share)
    uses = USES if facts.times_passes else {**USES, **_IF_PASSES_ARE_NOT_TIMED}
    found = _verdict(waterfall, gains, uses)
    return Verdict(found.key, found.sentence, found.losses, reservation)


def _gains(waterfall: Waterfall, good_share: float) -> list[tuple[float, Loss]]:
    """What could be gained from each loss, in points, largest first: all of it, or what is more than usual."""
    executed = waterfall.mfu_percent + sum(waterfall.points(key) for key in ("recompute", "padding", "extra_passes"))
    usual = executed * (1 / good_share - 1)
    gains = []
    for key in _SLOW:
        for loss in (loss for loss in waterfall.losses if loss.key == key):
            taken = min(usual, loss.points)
            usual -= taken
            gains.append((0.0 if key == "achievable" else loss.points - taken, loss))
    gains += [(loss.points, loss) for loss in waterfall.losses if loss.key not in _SLOW]
    return sorted(gains, key=lambda gain: -gain[0])


def _verdict(waterfall: Waterfall, gains: list[tuple[float, Loss]], uses: Mapping[str, Use]) -> Verdict:
    together = sum(gain for gain, _ in gains)
    if not gains or (gains[0][0] < _LEAST_POINTS and together < _LEAST_POINTS_TOGETHER):
        return Verdict(
            "healthy",
            f"Nothing large is left to gain: MFU is {percent(waterfall.mfu_percent / 100)}, forward and backward pass "
            f"are about as fast as well-tuned ones, and no other loss costs {_LEAST_POINTS:g} points or more.",
        )
    if gains[0][0] < _LEAST_POINTS:
        named = [loss for _, loss in gains[:2]]
        return Verdict(
            "many_losses",
            f"No single loss stands out: many small ones cost {together:.0f} points together, the largest are "
            f"{' and '.join(f'{loss.name} ({_points(loss.points)})' for loss in named)}.",
            tuple(loss.key for loss in named),
        )
    first, *others = gains
    if others and others[0][0] >= max(_NEARLY_EQUAL * first[0], _LEAST_POINTS):
        return _of_two(first[1], others[0][1], uses)
    return _of_one(waterfall, first[1], uses)


def _of_one(waterfall: Waterfall, loss: Loss, uses: Mapping[str, Use]) -> Verdict:
    use = uses[loss.key]
    is_largest = loss.points >= max(other.points for other in waterfall.losses)
    rank = "more than anything else" if is_largest else "the most that this run could gain"
    return Verdict(loss.key, f"{use.costs} {_points(loss.points)}, {rank}: {use.meaning}.", (loss.key,))


def _of_two(first: Loss, second: Loss, uses: Mapping[str, Use]) -> Verdict:
    one, two = (uses[loss.key].costs.rpartition(" ")[0] for loss in (first, second))
    two = two if two.startswith("FLOP") else two[0].lower() + two[1:]
    return Verdict(
        "two_losses",
        f"{one} ({_points(first.points)}) and {two} ({_points(second.points)}) are about equally large: "
        f"{uses[first.key].meaning}; {uses[second.key].meaning}.",
        (first.key, second.key),
    )


def _points(points: float) -> str:
    return f"{points:.0f} points" if points >= 9.5 else f"{points:.1f} points"
