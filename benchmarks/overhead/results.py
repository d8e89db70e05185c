"""What the measured seconds say: the figures of the cost tables."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flopwatch.stats import percentile
from overhead.intervals import Interval, Pair, bootstrap, ratio_of_blocks, ratio_of_medians

Raw = Mapping[str, Any]
"""The answer of `overhead_worker.py` to one plan."""

OWN_TIME_BAR = 0.001
CALL_BAR_SECONDS = 15e-6


@dataclass(frozen=True)
class CallTimes:
    """Seconds of one `log_step` call on ordinary steps."""

    median: float
    p90: float
    p99: float

    @staticmethod
    def of(seconds: list[float]) -> "CallTimes":
        return CallTimes(*(percentile(sorted(seconds), share) for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True)
class Free:
    """Bare against our monitor.

    Attributes:
        repeats: How often both were run.
        steps: Steps of each in one repeat.
        step_seconds: Median of the bare steps.
        ratio: Median step time with over without.
        own_seconds: Per step: our calls in the training thread, and the CPU time of our threads.
        own_cpu_seconds: The same with the CPU time of the calls: without what other processes took in mid-call.
        thread_seconds: The part of the threads.
        count_seconds: Once: counting the model and fitting its law.
        sinks_start_cpu_seconds: Once: CPU time of the sinks' threads before the first row is out.
        calls: Of `log_step`, by what it is given and where it is timed.
    """

    repeats: int
    steps: int
    step_seconds: float
    ratio: Interval
    own_seconds: float
    own_cpu_seconds: float
    thread_seconds: float
    count_seconds: float
    sinks_start_cpu_seconds: float
    calls: dict[str, CallTimes]

    def share(self, seconds: float) -> float:
        return seconds / self.step_seconds


def free(raw: Raw) -> Free:
    pairs = raw["pairs"]["flopwatch"]
    return Free(
        repeats=len(pairs),
        steps=len(pairs[0][0]),
        step_seconds=bare_step_seconds(raw),
        ratio=bootstrap(ratio_of_medians, pairs),
        own_seconds=raw["own_seconds_per_step"],
        own_cpu_seconds=raw["own_cpu_seconds_per_step"],
        thread_seconds=raw["thread_seconds_per_step"],
        count_seconds=raw["count_seconds"],
        sinks_start_cpu_seconds=raw["sinks_start_cpu_seconds"],
        calls={name: CallTimes.of(seconds) for name, seconds in raw["calls"].items()},
    )


def overheads(raw: Raw) -> dict[str, Interval]:
    """Share by which each contender's steps take longer than the bare ones they were in turns with."""
    ratios = {name: bootstrap(ratio_of_blocks, pairs) for name, pairs in raw["pairs"].items()}
    return {name: Interval(r.value - 1, r.low - 1, r.high - 1) for name, r in ratios.items()}


def bare_step_seconds(raw: Raw) -> float:
    everybody: list[list[Pair]] = list(raw["pairs"].values())
    return statistics.median(seconds for pairs in everybody for without, _ in pairs for seconds in without)


def side_effects(plain: Raw, compiled: Raw) -> list[str]:
    """What a tool does to a training besides watching it, in words."""
    if "failure" in plain:
        return [f"stops the training: {plain['failure']}"]
    before, after = plain["bare"], plain["watched"]
    found = []
    if after["parameters"] != before["parameters"]:
        found.append("the parameters become other ones")
    if not after["is_training"]:
        found.append("leaves the model in `eval()`")
    if after["hooks"] > before["hooks"]:
        found.append(f"leaves {after['hooks'] - before['hooks']} hooks on the model")
    if after["patched"]:
        found.append(f"replaces {', '.join(f'`{name}`' for name in after['patched'])}")
    return found + _of_compiled(compiled)


def _of_compiled(compiled: Raw) -> list[str]:
    if "failure" in compiled:
        return [f"stops a compiled model: {compiled['failure']}"]
    before, after = compiled["bare"], compiled["watched"]
    if after["calls_of_the_last_steps"] < before["calls_of_the_last_steps"]:
        return ["a compiled model runs uncompiled from then on"]
    if after["graphs"] != before["graphs"]:
        return [f"a compiled model has {after['graphs']} graphs instead of {before['graphs']}"]
    return []
