"""How often the interval of a repeated trial contains the truth: `python benchmarks/sweeps/repeat_coverage.py`.

Trials are made up: a run draws its own speed (processes differ), its steps vary around that. They are repeated as
`flopwatch sweep --until 5%` does it, and each final interval is compared with the true step time, which is the median
over infinitely many undisturbed runs. An interval that stops as soon as it is narrow is narrow by luck more often than
a fixed one, so its coverage is below 95 %; the table says by how much. The last column is the same trial with 6 runs
always.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp

from flopwatch.records.repeats import RepeatPolicy, interval_of_runs, with_repeats
from flopwatch.records.trial import Measured, TrialResult, TrialSpec
from flopwatch.stats import median
from flopwatch.sweep.supervisor.build_result import step_times

TRIALS = 2000
STEPS = 10
POLICY = RepeatPolicy(until=0.05)
SPEC = TrialSpec("standard", "tiny", 4, 8)

Run = Callable[[random.Random], list[float]]


def normal_run(between: float, within: float) -> Run:
    """Runs that differ by `between` and steps that differ by `within`, both relative standard deviations."""

    def run(rng: random.Random) -> list[float]:
        speed = exp(rng.gauss(0, between))
        return [speed * exp(rng.gauss(0, within)) for _ in range(STEPS)]

    return run


def disturbed_run(between: float, within: float, share: float) -> Run:
    """As `normal_run`, but in a share of the runs a neighbour makes every step 30 % slower."""
    quiet = normal_run(between, within)

    def run(rng: random.Random) -> list[float]:
        slower = 1.3 if rng.random() < share else 1.0
        return [slower * seconds for seconds in quiet(rng)]

    return run


KINDS: dict[str, Run] = {
    "steady machine: runs 0.5 %, steps 2 %": normal_run(0.005, 0.02),
    "usual: runs 1 %, steps 5 %": normal_run(0.01, 0.05),
    "runs 2 %, steps 2 %": normal_run(0.02, 0.02),
    "runs 2 %, steps 10 %": normal_run(0.02, 0.10),
    "runs 5 %, steps 10 %": normal_run(0.05, 0.10),
    "busy: runs 1 %, steps 5 %, every 10th run 30 % slower": disturbed_run(0.01, 0.05, 0.1),
}


@dataclass(frozen=True, slots=True)
class Repeated:
    """A trial after its repeats.

    Attributes:
        runs: How often it ran.
        is_narrow: Whether the interval is narrow enough; otherwise the repeats were used up.
        covers: Whether the interval contains the true step time, which is 1.
    """

    runs: int
    is_narrow: bool
    covers: bool


def repeat(run: Run, rng: random.Random, policy: RepeatPolicy = POLICY) -> Repeated:
    """Run a made-up trial as often as a sweep would."""
    attempts: list[dict[str, object]] = []
    first = step_times(run(rng))
    assert first is not None
    own = first
    while True:
        result = TrialResult("t", "k", SPEC, "ok", measured=with_repeats(Measured(steps=own), attempts))
        if not policy.repeats(result):
            break
        attempts.append({"outcome": "ok", "median_seconds": own.median})
        own = replace(first, median=median(sorted(run(rng))))  # the interval of a later run alone is not used
    steps = result.measured.steps
    assert steps is not None
    assert policy.until is not None
    is_narrow = steps.high - steps.low <= policy.until * steps.median
    return Repeated(len(attempts) + 1, is_narrow, steps.low <= 1.0 <= steps.high)


def covers_with_fixed_runs(run: Run, rng: random.Random, runs: int = 6) -> bool:
    _, low, high = interval_of_runs([median(sorted(run(rng))) for _ in range(runs)])
    return low <= 1.0 <= high


def percent(found: list[bool]) -> str:
    return f"{100 * sum(found) / len(found):5.1f} %" if found else "      –"


def main() -> None:
    print(f"{TRIALS} made-up trials of {STEPS} steps, until 5 %, at most {POLICY.most} repeats")
    print(f"{'':55}  runs  narrow  covered: all  one run  repeated  6 runs always")
    for kind, run in KINDS.items():
        rng = random.Random(kind)
        found = [repeat(run, rng) for _ in range(TRIALS)]
        fixed = [covers_with_fixed_runs(run, rng) for _ in range(TRIALS)]
        columns = [
            f"{sum(one.runs for one in found) / len(found):5.2f}",
            percent([one.is_narrow for one in found]),
            "     " + percent([one.covers for one in found]),
            percent([one.covers for one in found if one.runs == 1]),
            " " + percent([one.covers for one in found if one.runs > 1]),
            "       " + percent(fixed),
        ]
        print(f"{kind:55}", *columns)


if __name__ == "__main__":
    main()
