"""What a trainer costs against `standard`, and how far each gets. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from flopwatch.report.records import Cell, CostFactor, FrontierPoint
from flopwatch.trial_records import OUT_OF_MEMORY

BASELINE = "standard"


def cost_factors(cells: Iterable[Cell]) -> tuple[CostFactor, ...]:
    """Every other trainer against `standard` at the same batch size and sequence length, where both ran."""
    ran = [cell for cell in cells if cell.outcome == "ok"]
    # With several columns of `standard` (seeds, options) none of them is the baseline.
    columns = {cell.trainer for cell in ran if cell.privacy == "not private"}
    baseline = next(iter(columns)) if len(columns) == 1 else BASELINE
    standard = {(cell.seq_len, cell.batch_size): cell for cell in ran if cell.trainer == baseline}
    return tuple(
        _factor(cell, standard[cell.seq_len, cell.batch_size])
        for cell in sorted(ran, key=lambda cell: (cell.seq_len, cell.batch_size))
        if cell.trainer != baseline and (cell.seq_len, cell.batch_size) in standard
    )


def frontier(cells: Iterable[Cell]) -> tuple[FrontierPoint, ...]:
    """Per trainer and sequence length: the largest batch that ran, and the smallest out of memory."""
    places: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in cells:
        places[cell.trainer, cell.seq_len].append(cell)
    return tuple(_frontier_point(*place, members) for place, members in places.items())


def _factor(cell: Cell, standard: Cell) -> CostFactor:
    is_bound = cell.is_lower_bound or standard.is_lower_bound  # the ratio of two bounds bounds nothing
    return CostFactor(
        cell.trainer,
        cell.batch_size,
        cell.seq_len,
        time=_ratio(cell.seconds, standard.seconds),
        low_time=_ratio(cell.low_seconds, standard.high_seconds),
        high_time=_ratio(cell.high_seconds, standard.low_seconds),
        memory=_ratio(cell.peak_bytes, standard.peak_bytes),
        memory_above_start=_ratio(cell.above_start_bytes, standard.above_start_bytes),
        flops=None if is_bound else _ratio(cell.hardware_flops, standard.hardware_flops),
    )


def _ratio(value: float | None, standard: float | None) -> float | None:
    return value / standard if value is not None and standard else None


def _frontier_point(trainer: str, seq_len: int, members: Sequence[Cell]) -> FrontierPoint:
    ran = [cell.batch_size for cell in members if cell.outcome == "ok"]
    too_large = {cell.batch_size: cell.outcome for cell in members if cell.outcome in OUT_OF_MEMORY}
    largest_ok, smallest_oom = max(ran, default=None), min(too_large, default=None)
    return FrontierPoint(
        trainer,
        seq_len,
        largest_ok,
        smallest_oom,
        is_inferred=smallest_oom is not None and too_large[smallest_oom] == "oom_inferred",
        is_monotone=largest_ok is None or smallest_oom is None or largest_ok < smallest_oom,
    )
