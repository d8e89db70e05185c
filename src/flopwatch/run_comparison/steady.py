"""The steps of a run that can be compared: timed, and not warm-up."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flopwatch.run_log import RunLog, provenance_at
from flopwatch.run_records import Provenance, Row


class SteadyStep(NamedTuple):
    """One step. Unknown is None.

    Attributes:
        seconds: Step time, input wait included.
        input_wait_seconds: The part of it before the batch was there.
        samples: Rows of its batches.
        tokens: Positions of its batches, padding included.
        real_tokens: Positions that are not padding.
        model_flops: The numerator of MFU.
        hardware_flops: The numerator of HFU.
        peak_flops_per_s: Of all its devices.
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
    """In the order they ran."""
    return [step for row in log.rows for step in _of_row(row, provenance_at(log, row.step))]


def step_count(log: RunLog) -> int:
    """All steps in the log's columns, the ones that cannot be compared too."""
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
