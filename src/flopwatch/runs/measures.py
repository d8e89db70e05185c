"""The measures that `flopwatch compare` compares, and how they are computed from the steps of a run.

A rate such as tokens per second is the sum of all tokens divided by the sum of all seconds, as in the log. The mean of
the rates of single steps would give fast steps too much weight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

from flopwatch.records.run import Provenance, Row
from flopwatch.runs import RunLog, provenance_at
from flopwatch.stats import median, percentile


class SteadyStep(NamedTuple):
    """A step that can be compared, because it was timed and is not warm-up. Unknown values are None.

    `seconds` includes `input_wait_seconds`, `tokens` includes padding while `real_tokens` does not, and
    `peak_flops_per_s` is the sum over all devices.
    """

    seconds: float
    input_wait_seconds: float | None
    samples: int | None
    tokens: int | None
    real_tokens: int | None
    model_flops: int | None
    hardware_flops: int | None
    peak_flops_per_s: float | None


_COLUMNS = SteadyStep._fields[:-1]


def steady_steps(log: RunLog) -> list[SteadyStep]:
    """Return the timed steps of a log that are not warm-up, in order."""
    return [step for row in log.rows for step in _of_row(row, provenance_at(log, row.step))]


def _of_row(row: Row, provenance: Provenance | None) -> Iterator[SteadyStep]:
    peak = float(provenance.peak["flops_per_s"]) * provenance.device_count if provenance and provenance.peak else None
    numbers = row.steps.get("step", ())
    nothing: Sequence[Any] = [None] * len(numbers)
    columns = [*(row.steps.get(name, nothing) for name in _COLUMNS), [peak] * len(numbers)]
    for is_warm_up, *cells in zip(row.steps.get("warm_up", nothing), *columns, strict=True):
        if cells[0] and not is_warm_up:
            yield SteadyStep(*cells)


Unit = Literal["s", "tokens/s", "samples/s", "steps/s", "%", "% of peak", "x", "per step"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure, and how the bootstrap computes it from blocks of consecutive steps.

    Attributes:
        words: The verdicts on run B if its value is higher and if it is lower; None for a measure without a verdict.
        of_block: Reduces one block of steps to an intermediate result, such as (tokens, seconds).
        pool: Combines the intermediate results of all blocks in a bootstrap draw.
        value: Computes the value of the measure from the combined result; None if it is unknown.
        sorts: True if `pool` sorts the steps, so that long blocks must be thinned first.
    """

    key: str
    label: str
    unit: Unit
    words: tuple[str, str] | None
    of_block: Callable[[Sequence[SteadyStep]], Any]
    pool: Callable[[Sequence[Any]], Any]
    value: Callable[[Any], float | None]
    sorts: bool = False


def _sorted_seconds(steps: Sequence[SteadyStep]) -> list[float]:
    return sorted([step.seconds for step in steps])


def _merged(blocks: Sequence[list[float]]) -> list[float]:
    return sorted(chain.from_iterable(blocks))


def _of_times(
    key: str, label: str, unit: Unit, words: tuple[str, str], value: Callable[[Sequence[float]], float]
) -> Measure:
    def known(ordered: Sequence[float]) -> float | None:
        return value(ordered) if ordered else None

    return Measure(key, label, unit, words, _sorted_seconds, _merged, known, sorts=True)


Part = Callable[[SteadyStep], tuple[float | None, float | None]]
"""Returns what a step adds to the numerator and the denominator of a rate; if either is None, the step is left out."""


def _quotient(key: str, label: str, unit: Unit, words: tuple[str, str] | None, part: Part) -> Measure:
    factor = 100 if unit in ("%", "% of peak") else 1

    def sums(steps: Sequence[SteadyStep]) -> tuple[float, float]:
        known = [(over, under) for over, under in map(part, steps) if over is not None and under is not None]
        return sum([over for over, _ in known]), sum([under for _, under in known])

    def pool(blocks: Sequence[tuple[float, float]]) -> tuple[float, float]:
        return sum([over for over, _ in blocks]), sum([under for _, under in blocks])

    return Measure(
        key, label, unit, words, sums, pool, lambda pooled: factor * pooled[0] / pooled[1] if pooled[1] else None
    )


def _capacity(step: SteadyStep) -> float | None:
    return None if step.peak_flops_per_s is None else step.seconds * step.peak_flops_per_s


def _padding(step: SteadyStep) -> tuple[float | None, float | None]:
    if step.tokens is None or step.real_tokens is None:
        return None, None
    return step.tokens - step.real_tokens, step.tokens


_TIME = ("slower", "faster")
_RATE = ("faster", "slower")
_SHARE = ("higher", "lower")

MEASURES = (
    _of_times("step_time_median", "step time, median", "s", _TIME, median),
    _of_times("step_time_p90", "step time, p90", "s", _TIME, lambda ordered: percentile(ordered, 0.9)),
    _of_times(
        "step_time_p90_over_median",
        "p90 over median",
        "x",
        ("less steady", "steadier"),
        lambda ordered: percentile(ordered, 0.9) / median(ordered),
    ),
    _quotient("steps_per_second", "steps/s", "steps/s", _RATE, lambda step: (1, step.seconds)),
    _quotient("tokens_per_second", "tokens/s", "tokens/s", _RATE, lambda step: (step.tokens, step.seconds)),
    _quotient(
        "real_tokens_per_second", "real tokens/s", "tokens/s", _RATE, lambda step: (step.real_tokens, step.seconds)
    ),
    _quotient("samples_per_second", "samples/s", "samples/s", _RATE, lambda step: (step.samples, step.seconds)),
    _quotient("mfu_percent", "MFU", "% of peak", _SHARE, lambda step: (step.model_flops, _capacity(step))),
    _quotient("hfu_percent", "HFU", "% of peak", _SHARE, lambda step: (step.hardware_flops, _capacity(step))),
    _quotient("input_wait_percent", "input wait", "%", _SHARE, lambda step: (step.input_wait_seconds, step.seconds)),
    _quotient("padding_percent", "padding", "%", _SHARE, _padding),
    _quotient("samples_per_step", "samples per step", "per step", None, lambda step: (step.samples, 1)),
    _quotient("tokens_per_step", "tokens per step", "per step", None, lambda step: (step.tokens, 1)),
)

SPEED = ("real_tokens_per_second", "tokens_per_second", "samples_per_second", "steps_per_second")
"""The first of these measures that is known in both runs decides which run is faster.

Real tokens come first because padding is not useful work, and steps come last because steps may differ in size.
"""
