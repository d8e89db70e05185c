"""How many trials `flopwatch fit` needs, on 120 made-up memory curves: `python benchmarks/sweeps/fit_trials.py`.

Half of the curves are affine as the theory has it, the others are what real ones do besides: a term quadratic in the
batch, a floor from another phase of the trial, blocks of an allocator, capacity that cannot be used to its end.
Every curve has noise from run to run.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from flopwatch.sweep.fit import Found, Probe, search

PROBLEMS = 120
MAX_BATCH = 4096
GIB = 2**30
KINDS = ("affine", "affine", "affine", "quadratic", "floor", "blocks")


@dataclass(frozen=True, slots=True)
class Problem:
    """A memory curve.

    Attributes:
        kind: Its shape.
        capacity_bytes: What there is.
        usable: Share of it a trial can really have.
        used_bytes: By a batch, without noise.
        noise: Relative, of one run.
        true_largest: Largest batch that fits without noise.
    """

    kind: str
    capacity_bytes: int
    usable: float
    used_bytes: Callable[[int], float]
    noise: float
    true_largest: int


@dataclass(frozen=True, slots=True)
class Solved:
    """What a method found of a problem, and in how many trials."""

    problem: Problem
    largest: int
    trials: int


def problems(count: int = PROBLEMS, seed: int = 0) -> list[Problem]:
    rng = random.Random(seed)
    return [_problem(rng, KINDS[number % len(KINDS)]) for number in range(count)]


def _problem(rng: random.Random, kind: str) -> Problem:
    capacity = rng.choice((2, 8, 24, 80)) * GIB
    usable = rng.choice((1.0, 1.0, 0.985, 0.97))
    base = rng.uniform(0.05, 0.6) * capacity
    wished = round(2 ** rng.uniform(1, 10.5))
    room = usable * capacity - base
    used = _curve(kind, base, room, wished, capacity * rng.uniform(0.3, 0.8))
    largest = max((batch for batch in range(1, MAX_BATCH + 1) if used(batch) <= usable * capacity), default=0)
    return Problem(kind, capacity, usable, used, rng.choice((0.0, 0.001, 0.005)), largest)


def _curve(kind: str, base: float, room: float, wished: int, floor: float) -> Callable[[int], float]:
    each = room / (wished + 0.5)
    if kind == "quadratic":
        bent = room / (wished * (1 + wished / 40))
        return lambda batch: base + bent * batch * (1 + batch / 40)
    if kind == "floor":
        return lambda batch: max(base + each * batch, min(floor, base + room))
    if kind == "blocks":
        block = room / 60
        return lambda batch: base + block * -(-each * batch // block)
    return lambda batch: base + each * batch


def by_fit(problem: Problem, seed: int = 0) -> Solved:
    found: Found = search(_trial(problem, seed), MAX_BATCH, speed_probes=0)
    return Solved(problem, found.largest or 0, len(found.probes))


def by_doubling(problem: Problem, seed: int = 0, tolerance: float = 0.05) -> Solved:
    """What people do: double until it does not fit, then halve the gap."""
    measure, low, high, trials = _trial(problem, seed), 0, None, 0
    while high is None or (high - low > 1 and low < (1 - tolerance) * (high - 1)):
        batch = max(1, 2 * low) if high is None else (low + high) // 2
        trials += 1
        if measure(batch).fits:
            low = batch
        else:
            high = batch
    return Solved(problem, low, trials)


def _trial(problem: Problem, seed: int) -> Callable[[int], Probe]:
    """Noise shows in the peak that is read, not in whether it fits: the truth stays one number."""
    rng = random.Random(seed)

    def measure(batch_size: int) -> Probe:
        used = problem.used_bytes(batch_size)
        fits = batch_size <= problem.true_largest
        peak = round(used * (1 + rng.uniform(-problem.noise, problem.noise)))
        if not fits:
            return Probe(batch_size, fits=False, outcome="oom_device")
        return Probe(batch_size, fits=True, outcome="ok", peak_bytes=peak, capacity_bytes=problem.capacity_bytes)

    return measure


def row(name: str, solved: list[Solved]) -> str:
    trials = sorted(one.trials for one in solved)
    shares = [one.largest / one.problem.true_largest for one in solved]
    p90 = trials[int(0.9 * (len(trials) - 1))]
    return (
        f"{name:<22} {len(solved):>4} problems  trials mean {sum(trials) / len(trials):.1f} p90 {p90} "
        f"most {trials[-1]}  found/true mean {sum(shares) / len(shares):.3f} least {min(shares):.3f}"
    )


if __name__ == "__main__":
    asked = problems()
    fitted = [by_fit(problem) for problem in asked]
    print(row("affine fit", fitted))
    for kind in dict.fromkeys(KINDS):
        print(row(f"  {kind}", [one for one in fitted if one.problem.kind == kind]))
    print(row("double and bisect", [by_doubling(problem) for problem in asked]))
