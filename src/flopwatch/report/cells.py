"""A trial's result as a cell of a matrix. Pure."""

import sys
from typing import Any

from flopwatch.report.columns import privacy_of
from flopwatch.report.records import Cell, TrialRow
from flopwatch.trial_records import MemoryUse, StepCost, TrialResult, TrialSpec

FEWEST_STEPS = 6
"""Below this many measured steps no interval is believed: of 5, least and most hold the median 94 % of the time."""

MOST_FINITE = sys.float_info.max
"""JSON may hold integers beyond it, and those cannot be divided."""


def make_cell(result: TrialResult, column: str) -> Cell:
    """Numbers only where the trial ran to its end: half a trial has not met its peak yet."""
    spec, measured = result.spec, result.measured
    place = (result.name, column, privacy_of(spec), spec.batch_size, spec.seq_len, str(result.outcome))
    if result.outcome != "ok":
        return Cell(*place, device_bytes=measured.memory.device_bytes)
    steps, cost, memory = measured.steps, measured.cost or StepCost(), measured.memory
    # The interval of one or two steps is a point or a pair: it would decide what it does not know.
    interval = steps if steps and steps.count >= FEWEST_STEPS else None
    return Cell(
        *place,
        seconds=positive(steps and steps.median),
        low_seconds=positive(interval and interval.low),
        high_seconds=positive(interval and interval.high),
        is_unstable=bool(steps and steps.unstable),
        peak_bytes=positive(memory.peak_bytes) if _tells_peak(result) else None,
        above_start_bytes=_above_start(memory),
        device_bytes=positive(memory.device_bytes),
        alloc_retries=memory.alloc_retries,
        bytes_by_phase={name: value for name, value in memory.by_phase.items() if positive(value)},
        samples_per_s=positive(measured.samples_per_s),
        tokens_per_s=positive(measured.tokens_per_s),
        mfu=positive(cost.mfu),
        hfu=positive(cost.hfu),
        hardware_flops=positive(cost.hardware_flops),
        is_lower_bound=cost.is_lower_bound,
    )


def missing_cell(name: str, spec: TrialSpec, column: str) -> Cell:
    return Cell(name, column, privacy_of(spec), spec.batch_size, spec.seq_len, "missing")


def make_row(cell: Cell, spec: TrialSpec, group: int, result: TrialResult | None) -> TrialRow:
    return TrialRow(
        name=cell.trial,
        group=group,
        trainer=cell.trainer,
        model=spec.model,
        dtype=spec.dtype,
        checkpointing=spec.checkpointing,
        batch_size=spec.batch_size,
        seq_len=spec.seq_len,
        outcome=cell.outcome,
        reason=result.reason if result else "in the plan, without a result yet",
        total_seconds=positive(result.seconds) if result else None,
        step_seconds=cell.seconds,
        is_unstable=cell.is_unstable,
        tokens_per_s=cell.tokens_per_s,
        samples_per_s=cell.samples_per_s,
        peak_bytes=cell.peak_bytes,
        mfu=cell.mfu,
        hfu=cell.hfu,
        command=result.command if result else "",
        trace=result.measured.trace if result else None,
        epsilon=positive(result.measured.privacy.epsilon) if result and result.measured.privacy else None,
    )


def positive(value: Any) -> Any:
    """The number; None when it is no finite number above 0, which no measurement is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value <= MOST_FINITE else None


def _tells_peak(result: TrialResult) -> bool:
    """On an accelerator whose allocator does not tell, the host's memory is not what decides."""
    on_cpu = str(result.environment.get("device", "cpu")).startswith("cpu")
    return on_cpu or result.measured.memory.reserved_bytes is not None


def _above_start(memory: MemoryUse) -> int | None:
    host = memory.host_peak_bytes
    if memory.reserved_bytes is not None or host is None or memory.baseline_bytes is None:
        return None
    above: int | None = positive(host - memory.baseline_bytes)
    return above
