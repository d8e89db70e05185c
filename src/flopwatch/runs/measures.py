"""The measures that `flopwatch compare` compares, and how they are computed from the steps of a run.

Rates and shares are sums divided by sums, as in the log: a mean of per-step rates would weight fast steps too much.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

from flopwatch.records.run import Provenance, Row
from flopwatch.runs import RunLog, provenance_at
from flopwatch.spread import median, percentile


class SteadyStep(NamedTuple):
    """A step that can be compared: timed, and not warm-up. Unknown is None.

    Attributes:
        seconds: Step time, input wait included.
        input_wait_seconds: The part of it spent waiting for the batch.
        samples: Rows of its batches.
        tokens: Positions of its batches, padding included.
        real_tokens: Positions that are not padding.
        model_flops: The numerator of MFU.
        hardware_flops: The numerator of HFU.
        peak_flops_per_s: Sum over its devices.
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
    """The comparable steps of a log, in order."""
    return [step for row in log.rows for step in _of_row(row, provenance_at(log, row.step))]


def step_count(log: RunLog) -> int:
    """All steps in the log's columns, also those that cannot be compared."""
    return sum(len(row.steps.get("step", ())) for row in log.rows)


def _of_row(row: Row, provenance: Provenance | None) -> Iterator[SteadyStep]:
    peak = None if provenance is None else _whole_peak(provenance)
    numbers = row.steps.get("step", ())
    nothing: Sequence[Any] = [None] * len(numbers)
    columns = [*(row.steps.get(name, nothing) for name in _COLUMNS), [peak] * len(numbers)]
    for is_warm_up, *cells in zip(row.steps.get("warm_up", nothing), *columns, strict=True):
        if cells[0] and not is_warm_up:
            yield SteadyStep(*cells)


def _whole_peak(provenance: Provenance) -> float | None:
    if provenance.peak is None:
        return None
    return float(provenance.peak["flops_per_s"]) * provenance.device_count


Unit = Literal["s", "tokens/s", "samples/s", "steps/s", "%", "% of peak", "x", "per step"]


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table.

    Attributes:
        key: Its name in JSON.
        label: Its name on the screen.
        unit: Unit of the value.
        words: What B is called if its value is higher, and if it is lower; None if neither is better.
        of_block: Reduces a block to what a draw needs.
        pool: Combines the reduced blocks of a draw.
        value: The value of a pool; None where it is unknown.
        sorts: Whether every draw sorts its blocks, which must be thinned if they are long.
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
    """A measure of the sorted step times."""

    def known(ordered: Sequence[float]) -> float | None:
        return value(ordered) if ordered else None

    return Measure(key, label, unit, words, _sorted_seconds, _merged, known, sorts=True)


Part = Callable[[SteadyStep], tuple[float | None, float | None]]
"""Numerator and denominator of one step; a step of which either is unknown is in neither sum."""


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
"""In the order of the table."""

SPEED = ("real_tokens_per_second", "tokens_per_second", "samples_per_second", "steps_per_second")
"""The measures that decide which run is faster: the first that both runs know. Padding is no work, and steps may differ
in size."""
