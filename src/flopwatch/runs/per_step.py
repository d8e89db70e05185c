"""Two runs by milliseconds per step: how long each part of a step and each loss took in both, and what changed most.

Shares of the wall time hide what became slower: if one part takes three times as long, the shares of all others fall.
Milliseconds per step do not have this fault, and they need no peak.

Time that a run spends once, such as its start-up, is spread over the steps of the longer run in both, because a short
run is not a slow one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from flopwatch.language import Said, ands, commas, semicolons
from flopwatch.numbers import number, step_time
from flopwatch.records.time_uses import IN_STEPS, MAY_HAVE_WAITS, USES

PASSES = "passes"
"""Key of the time of forward and backward passes in which the FLOPs of the model were computed."""
STEP_SIZE = "step_size"
"""Key of the cause that steps have more or fewer FLOPs."""
OF_PASSES = ("below_peak", "slow_matmuls", "achievable", "unpriced", "recompute", "padding", "extra_passes")
"""Losses that are time of forward and backward passes. Their points are relative to the peak, their time is not."""
_ONCE = ("start_up", "compile_outside", "compile", "count")
LEAST_SHARE = 0.02
"""Two runs of the same training differ by some percent; a smaller share of the time per step is not put into words."""
_NEARLY_ALL = 0.1
_FAR_LONGER = 2.0
"""If the steps themselves became longer or shorter by this factor, as the whole run did, what changed most in them is
named first, unless something else changed by more than this factor of it: a long pause may cost a short run somewhat
more, but does not explain such steps."""


@dataclass(frozen=True, slots=True)
class RunTime:
    """The time of one run by part.

    Attributes:
        seconds: Seconds of the whole run by part: keys of losses outside of `OF_PASSES`, and `PASSES` for all of these.
        flops: FLOPs of the whole run: `PASSES` for those of the model, and `recompute`, `padding` or `extra_passes`;
            empty if they are unknown.
        measured: Parts of steps that this run has measured. The time of others is in other parts.
    """

    seconds: Mapping[str, float]
    steps: int
    flops: Mapping[str, float]
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
class Cause:
    """Something that made the steps of run B longer or shorter, by `change_ms`.

    Its key is that of a part (for `passes`: they became slower or faster at the same work), or `step_size`.
    """

    key: str
    change_ms: float


@dataclass(frozen=True, slots=True)
class PerStep:
    """Two runs by milliseconds per step.

    Attributes:
        a_ms: Time per step of the whole run A, with everything that happens between steps; `b_ms` likewise.
        parts: The parts; their times add up to `a_ms` and `b_ms`. The cause that is named first comes first.
        causes: Why the time per step changed, the largest first.
    """

    a_ms: float
    b_ms: float
    parts: tuple[PartChange, ...]
    causes: tuple[Cause, ...]
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
    causes = {key: in_b.get(key, 0.0) - in_a.get(key, 0.0) for key in (in_a | in_b) if key != PASSES}
    causes |= _divide_passes(in_a, in_b, a, b)
    ordered = _ordered(causes, in_a, in_b)
    parts = []
    for key in dict.fromkeys(PASSES if cause.key == STEP_SIZE else cause.key for cause in ordered):
        a_ms, b_ms = in_a.get(key, 0.0), in_b.get(key, 0.0)
        parts.append(PartChange(key, _name(key), a_ms, b_ms, b_ms - a_ms))
    found = PerStep(sum(in_a.values()), sum(in_b.values()), tuple(parts), tuple(ordered), "", _notes(a, b))
    return replace(found, sentence=_sentence(found, a, b))


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


def _divide_passes(in_a: dict[str, float], in_b: dict[str, float], a: RunTime, b: RunTime) -> dict[str, float]:
    """Divide the time of the passes by what their FLOPs were for, in place; return the causes of its change.

    The time of some FLOPs is their share of all. With s for the change of the steps' size, F for FLOPs per step and r
    for time per FLOP, the time changes from F_a r_a to F_b r_b by (s - 1) F_a r_a because of the size, by
    (F_b - s F_a) (r_a + r_b) / 2 because of FLOPs of other kinds, and by (r_b - r_a) (F_b + s F_a) / 2 because of
    their speed.
    """
    time_a, time_b = in_a.get(PASSES, 0.0), in_b.get(PASSES, 0.0)
    if not a.flops.get(PASSES) or not b.flops.get(PASSES) or not time_a or not time_b:
        return {PASSES: time_b - time_a}
    of_a, of_b = ({kind: flops / run.steps for kind, flops in run.flops.items()} for run in (a, b))
    all_a, all_b = sum(of_a.values()), sum(of_b.values())
    slow_a, slow_b = time_a / all_a, time_b / all_b
    for amounts, of_run, slow in ((in_a, of_a, slow_a), (in_b, of_b, slow_b)):
        amounts |= {kind: flops * slow for kind, flops in of_run.items()}
    size = size_factor(of_a, of_b)
    causes = {
        kind: (of_b.get(kind, 0.0) - size * of_a.get(kind, 0.0)) * (slow_a + slow_b) / 2
        for kind in (of_a | of_b)
        if kind != PASSES
    }
    causes[STEP_SIZE] = (size - 1) * time_a
    return causes | {PASSES: (slow_b - slow_a) * (all_b + size * all_a) / 2}


def size_factor(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """How many times larger the steps of B are, by their FLOPs without recomputation.

    Padding changes either the FLOPs of the model or those of the whole step, but not both, and is no change of size.

    >>> size_factor({"passes": 8.0, "recompute": 2.0}, {"passes": 2.0}), size_factor({"passes": 8.0}, {"passes": 16.0})
    (0.25, 2.0)
    >>> size_factor({"passes": 8.0}, {"passes": 4.0, "padding": 4.0})
    1.0
    >>> size_factor({"passes": 8.0}, {"passes": 8.0, "padding": 4.0})
    1.0
    """
    of_model = b[PASSES] / a[PASSES]
    of_all = (sum(b.values()) - b.get("recompute", 0.0)) / (sum(a.values()) - a.get("recompute", 0.0))
    if of_model > 1 and of_all > 1:
        return min(of_model, of_all)
    return max(of_model, of_all) if of_model < 1 and of_all < 1 else 1.0


def _is_in_steps(key: str) -> bool:
    return key in IN_STEPS or key in (PASSES, STEP_SIZE)


def _ordered(causes: Mapping[str, float], in_a: Mapping[str, float], in_b: Mapping[str, float]) -> list[Cause]:
    found = sorted((Cause(key, change) for key, change in causes.items()), key=lambda cause: -abs(cause.change_ms))
    step_a, step_b = (sum(ms for key, ms in run.items() if _is_in_steps(key)) for run in (in_a, in_b))
    has_grown = sum(in_b.values()) > sum(in_a.values())
    if (step_b >= _FAR_LONGER * step_a) if has_grown else (step_a >= _FAR_LONGER * step_b):
        first = next(cause for cause in found if _is_in_steps(cause.key))
        if _FAR_LONGER * abs(first.change_ms) >= abs(found[0].change_ms):
            found.sort(key=lambda cause: cause is not first)
    return found


def _name(key: str) -> str:
    return USES["below_peak"].without_peak if key == PASSES else USES[key].name


def _sentence(found: PerStep, a: RunTime, b: RunTime) -> str:
    times = {"a": _ms(found.a_ms), "b": _ms(found.b_ms)}
    told = [cause for cause in found.causes if abs(cause.change_ms) >= LEAST_SHARE * found.a_ms]
    if not told:
        same = Said(
            "Per step, the whole run took {a} in A and {b} in B: no part changed by {least:g} % of that or more."
        )
        return same.filled(**times, least=100 * LEAST_SHARE)
    parts = {part.key: part for part in found.parts}
    first, *others = [_words(cause, parts, a, b) for cause in told[:2]]
    said = Said("Per step, the whole run took {a} in A and {b} in B. Most of the change: {change}.")
    if others:
        first = semicolons([first, Said("next, {change}", change=others[0])])
    return said.filled(**times, change=first)


def _words(cause: Cause, parts: Mapping[str, PartChange], a: RunTime, b: RunTime) -> str:
    if cause.key == STEP_SIZE:
        of_a, of_b = ({kind: flops / run.steps for kind, flops in run.flops.items()} for run in (a, b))
        factor = size_factor(of_a, of_b)
        resized = Said("steps became smaller, with {times} of the FLOPs, which makes {time} of {part}")
        if factor > 1:
            resized = Said("steps became larger, with {times} times the FLOPs, which makes {time} of {part}")
        times = number(factor) if factor > 1 else f"{factor:.2f}"
        return resized.filled(times=times, time=_ms(abs(cause.change_ms)), part=_name(PASSES))
    part = parts[cause.key]
    # What larger or smaller steps make of the growth is a cause of its own, and would be told twice.
    if cause.key == PASSES and abs(part.change_ms - cause.change_ms) > _NEARLY_ALL * abs(part.change_ms):
        became = Said("{part} became faster at the same work, by {time}")
        if cause.change_ms > 0:
            became = Said("{part} became slower at the same work, by {time}")
        return became.filled(part=part.name, time=_ms(abs(cause.change_ms)))
    changed = Said("{part} grew from {a} to {b}") if cause.change_ms > 0 else Said("{part} shrank from {a} to {b}")
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
