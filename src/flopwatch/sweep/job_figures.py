"""The figures of a whole trial from those of its processes. Pure arithmetic, exact for FLOPs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flopwatch.records import Peak
from flopwatch.sweep.step_statistics import median
from flopwatch.trial_records import MemoryUse, StepCost


def job_cost(costs: Sequence[StepCost]) -> StepCost:
    """FLOPs of all processes together; unknown where one does not know its own.

    >>> job_cost([StepCost(model_flops=10, hardware_flops=12), StepCost(model_flops=10)]).model_flops
    20
    """
    coverages = [cost.coverage for cost in costs if cost.coverage is not None]
    return replace(
        costs[0],
        model_flops=_sum([cost.model_flops for cost in costs]),
        hardware_flops=_sum([cost.hardware_flops for cost in costs]),
        coverage=min(coverages, default=None),
        is_lower_bound=any(cost.is_lower_bound for cost in costs),
        notes=tuple(dict.fromkeys(note for cost in costs for note in cost.notes)),
    )


def job_peak(told: Sequence[tuple[bool, Peak | None]]) -> Peak | None:
    """The sum over the devices: each entry says whether its process speaks for a device, and the device's peak.

    >>> one = Peak(1e12, "a GPU", "bf16", "its datasheet", "datasheet", "high")
    >>> job_peak([(True, one), (True, one), (False, None)]).flops_per_s
    2000000000000.0
    """
    peaks = [peak for speaks, peak in told if speaks]
    known = [peak for peak in peaks if peak is not None]
    if len(known) < len(peaks) or not known:
        return None
    if len(known) == 1:
        return known[0]
    names = dict.fromkeys(peak.device for peak in known)
    return replace(
        known[0],
        flops_per_s=sum(peak.flops_per_s for peak in known),
        device=", ".join(f"{sum(peak.device == name for peak in known)} x {name}" for name in names),
        source=f"{known[0].source}; summed over {len(known)} devices",
    )


def job_memory(memories: Sequence[MemoryUse]) -> MemoryUse:
    """What the fullest accelerator held. Resident memory is the first process's; the supervisor knows that of all."""
    parts = dict.fromkeys(part for memory in memories for part in memory.by_phase)
    return replace(
        memories[0],
        allocated_bytes=_most([memory.allocated_bytes for memory in memories]),
        reserved_bytes=_most([memory.reserved_bytes for memory in memories]),
        alloc_retries=_most([memory.alloc_retries for memory in memories]),
        by_phase={part: max(memory.by_phase.get(part, 0) for memory in memories) for part in parts},
    )


def slowest_rows(rows_by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of the process with the longest median among the measured steps, each with its rank.

    >>> fast, slow = ({"phase": "measure", "seconds": seconds} for seconds in (1.0, 2.0))
    >>> slowest_rows([[fast], [slow]])
    [{'phase': 'measure', 'seconds': 2.0, 'rank': 1}]
    """

    def typical(rank: int) -> float:
        timed = sorted(row["seconds"] for row in rows_by_rank[rank] if row["phase"] == "measure")
        return median(timed) if timed else 0.0

    slowest = max(range(len(rows_by_rank)), key=typical)
    return [{**row, "rank": slowest} for row in rows_by_rank[slowest]]


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
