"""Two runs by milliseconds per step: how long each part of a step and each loss took in both, and what changed most.

Shares of the wall time hide what became slower: if one part takes three times as long, the shares of all others fall.
Milliseconds per step do not have this fault, and they need no peak.

Time that a run spends once, such as its start-up, is spread over the steps of the longer run in both, because a short
run is not a slow one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flopwatch.language import Said, ands, commas, semicolons
from flopwatch.numbers import step_time
from flopwatch.records.time_uses import IN_STEPS, MAY_HAVE_WAITS, USES

PASSES = "passes"
"""Key of the time of forward and backward passes in which the FLOPs of a step were computed."""
OF_PASSES = ("below_peak", "slow_matmuls", "achievable", "unpriced", "recompute", "padding", "extra_passes")
"""Losses that are time of forward and backward passes. Their points are relative to the peak, their time is not."""
_ONCE = ("start_up", "compile_outside", "compile", "count")
LEAST_SHARE = 0.02
"""Two runs of the same training differ by some percent; a smaller share of the time per step is not put into words."""
_FAR_LONGER = 2.0
"""If the steps themselves became longer or shorter by this factor, as the whole run did, what changed most in them is
named first, unless something else changed by more than this factor of it: a long pause may cost a short run somewhat
more, but does not explain such steps."""


@dataclass(frozen=True, slots=True)
class RunTime:
    """The time of one run by part.

    Attributes:
        seconds: Seconds of the whole run by part: keys of losses outside of `OF_PASSES`, and `PASSES` for all of these.
        measured: Parts of steps that this run has measured. The time of others is in other parts.
    """

    seconds: Mapping[str, float]
    steps: int
    measured: Collection[str] = ()

    @property
    def once_seconds(self) -> float:
        """What it does once, whatever its length: start, compile and count FLOPs."""
        return sum(self.seconds.get(key, 0.0) for key in _ONCE)


@dataclass(frozen=True, slots=True)
class PartChange:
    """One part of the time per step in two runs, in milliseconds.

    Its key is that of a loss such as `input_wait`, or `passes`.
    """

    key: str
    name: str
    a_ms: float
    b_ms: float
    change_ms: float


@dataclass(frozen=True, slots=True)
class PerStep:
    """Two runs by milliseconds per step.

    Attributes:
        a_ms: Time per step of the whole run A, with everything that happens between steps; `b_ms` likewise.
        parts: The parts; their times add up to `a_ms` and `b_ms`. The one that is named first comes first.
    """

    a_ms: float
    b_ms: float
    parts: tuple[PartChange, ...]
    sentence: str
    notes: tuple[str, ...] = ()


def compare_per_step(a: RunTime, b: RunTime) -> PerStep | None:
    """Compare two runs by milliseconds per step; None if one of them has no step."""
    if not a.steps or not b.steps:
        return None
    folds = _folds(a, b)
    longer = max(a.steps, b.steps)
    in_a, in_b = (
        _folded({key: 1000 * s / (longer if key in _ONCE else run.steps) for key, s in run.seconds.items()}, folds)
        for run in (a, b)
    )
    parts = _ordered([_part(key, in_a.get(key, 0.0), in_b.get(key, 0.0)) for key in in_a | in_b])
    a_ms, b_ms = sum(in_a.values()), sum(in_b.values())
    return PerStep(a_ms, b_ms, tuple(parts), _sentence(parts, a_ms, b_ms), _notes(a, b))


def _part(key: str, a_ms: float, b_ms: float) -> PartChange:
    return PartChange(key, _name(key), a_ms, b_ms, b_ms - a_ms)


def _folds(a: RunTime, b: RunTime) -> dict[str, str]:
    """The parts that only one run has measured, and the part to which each is added in both.

    An input wait that is not measured is time between the passes, if that is measured; anything else is in the passes.
    """
    once = sorted({*a.measured} ^ {*b.measured})
    return {key: _place_of_waits(a, b) if key == "input_wait" else PASSES for key in once}


def _place_of_waits(a: RunTime, b: RunTime) -> str:
    return "between" if "between" in a.measured and "between" in b.measured else PASSES


def _rare_places(run: RunTime) -> list[str]:
    """Where an unmeasured wait is too, if it was far longer than usual."""
    return [key for key in MAY_HAVE_WAITS if key != "between" and run.seconds.get(key)]


def _in_quotes(keys: Sequence[str]) -> str:
    return ands(Said('"{loss}"', loss=_name(key)) for key in dict.fromkeys(keys))


def _folded(amounts: Mapping[str, float], folds: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, amount in amounts.items():
        found[folds.get(key, key)] = found.get(folds.get(key, key), 0.0) + amount
    return found


def _ordered(parts: Sequence[PartChange]) -> list[PartChange]:
    found = sorted(parts, key=lambda part: -abs(part.change_ms))
    of_steps = [part for part in found if part.key == PASSES or part.key in IN_STEPS]
    step_a, step_b = sum(part.a_ms for part in of_steps), sum(part.b_ms for part in of_steps)
    has_grown = sum(part.change_ms for part in found) > 0
    explains = (step_b >= _FAR_LONGER * step_a) if has_grown else (step_a >= _FAR_LONGER * step_b)
    if explains and _FAR_LONGER * abs(of_steps[0].change_ms) >= abs(found[0].change_ms):
        found.sort(key=lambda part: part is not of_steps[0])
    return found


def _name(key: str) -> str:
    return USES["below_peak"].without_peak if key == PASSES else USES[key].name


def _sentence(parts: Sequence[PartChange], a_ms: float, b_ms: float) -> str:
    times = {"a": _ms(a_ms), "b": _ms(b_ms)}
    told = [_words(part) for part in parts if abs(part.change_ms) >= LEAST_SHARE * a_ms]
    if not told:
        same = Said(
            "Per step, the whole run took {a} in A and {b} in B: no part changed by {least:g} % of that or more."
        )
        return same.filled(**times, least=100 * LEAST_SHARE)
    said = Said("Per step, the whole run took {a} in A and {b} in B. Most of the change: {change}.")
    change: str = told[0]
    if len(told) > 1:
        change = semicolons([change, Said("next, {change}", change=told[1])])
    return said.filled(**times, change=change)


def _words(part: PartChange) -> str:
    changed = Said("{part} grew from {a} to {b}") if part.change_ms > 0 else Said("{part} shrank from {a} to {b}")
    return changed.filled(part=part.name, a=_ms(part.a_ms), b=_ms(part.b_ms))


def _ms(milliseconds: float) -> str:
    return step_time(milliseconds / 1000)


def _notes(a: RunTime, b: RunTime) -> tuple[str, ...]:
    notes: list[str] = []
    for key, target in _folds(a, b).items():
        which = "A" if key in a.measured else "B"
        once = Said('Only {which} measured "{loss}", so it is part of "{other}" in both.')
        notes.append(once.filled(which=which, loss=_name(key), other=_name(target)))
        if key == "input_wait" and (rare := _rare_places(b if which == "A" else a)):
            other = "B" if which == "A" else "A"
            also = Said("In {other}, some of the input wait may be part of {losses} too.")
            notes.append(also.filled(other=other, losses=_in_quotes(rare)))
    if "input_wait" not in {*a.measured, *b.measured}:
        places = _in_quotes((_place_of_waits(a, b), *_rare_places(a), *_rare_places(b)))
        notes.append(
            Said(
                "The input wait of both runs is unknown. After warm-up, it is part of {losses}, at most all of it.",
                losses=places,
            )
        )
    in_one = [key for key in _ONCE if a.seconds.get(key) or b.seconds.get(key)]
    if a.steps != b.steps and in_one:
        spread = Said(
            "A has {a:,} steps and B {b:,}. What a run does once ({names}) is spread over {longer:,} steps in both."
        )
        names = commas(_name(key) for key in in_one)
        notes.append(spread.filled(a=a.steps, b=b.steps, names=names, longer=max(a.steps, b.steps)))
    return tuple(notes)
