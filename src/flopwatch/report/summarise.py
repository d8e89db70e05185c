"""From what lies in the folder to one summary. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flopwatch.report.capture import Capture
from flopwatch.report.cells import make_cell, make_row, missing_cell
from flopwatch.report.choices import choose, pareto_trials
from flopwatch.report.columns import column_names, group_key, group_settings, group_title, place_key, trainer_order
from flopwatch.report.crossovers import find_crossovers
from flopwatch.report.denominators import denominators, peak_warnings
from flopwatch.report.environments import distinct_environments, mixed_warnings
from flopwatch.report.factors import cost_factors, frontier
from flopwatch.report.failures import group_failures
from flopwatch.report.incomplete import host_memory_warnings, incomplete_warnings
from flopwatch.report.privacy import privacy_rows
from flopwatch.report.records import Cell, Group, SweepSummary, TrialRow
from flopwatch.report.retried import retried_warnings
from flopwatch.report.selection import MOST_COLUMNS
from flopwatch.report.totals import sweep_totals, trainer_totals
from flopwatch.trial_records import TrialResult, TrialSpec


class _Member(NamedTuple):
    cell: Cell
    spec: TrialSpec
    result: TrialResult | None


def summarise(capture: Capture) -> SweepSummary:
    """Everything the report says."""
    results = list(capture.results.values())
    members = _grouped(capture)
    varying = _varying([group_settings(group[0].spec) for group in members])
    groups = tuple(_group(group, varying) for group in members)
    totals = sweep_totals(results, len(capture.missing))
    return SweepSummary(
        name=capture.folder.resolve().name,
        folder=str(capture.folder),
        engine=capture.engine,
        created=capture.created,
        totals=totals,
        trainers=trainer_totals(results, capture.missing.values()),
        groups=groups,
        failures=group_failures(results, _largest_ok(results)),
        environments=distinct_environments(results),
        preflight=capture.preflight,
        warnings=(
            *capture.troubles,
            *_warnings(groups, totals.by_outcome),
            *incomplete_warnings(results),
            *retried_warnings(results),
        ),
        rows=_rows(members),
    )


def _grouped(capture: Capture) -> list[list[_Member]]:
    """Comparable trials together, the groups with the most that ran first."""
    specs = {name: result.spec for name, result in capture.results.items()} | dict(capture.missing)
    columns = column_names(specs)
    groups: dict[tuple[Any, ...], list[_Member]] = defaultdict(list)
    for name, spec in specs.items():
        result = capture.results.get(name)
        cell = make_cell(result, columns[name]) if result else missing_cell(name, spec, columns[name])
        groups[group_key(spec)].append(_Member(cell, spec, result))
    return sorted(groups.values(), key=lambda group: -sum(member.cell.outcome == "ok" for member in group))


def _group(members: Sequence[_Member], varying: Sequence[str]) -> Group:
    settings = group_settings(members[0].spec)
    cells = _with_like_peaks([member.cell for member in members])
    trainers = trainer_order((member.cell.trainer, member.spec.trainer) for member in members)
    results = [member.result for member in members if member.result is not None]
    counts = Counter(result.measured.parameters for result in results if result.measured.parameters)
    return Group(
        title=group_title(settings, varying),
        settings=settings,
        parameters=counts.most_common(1)[0][0] if counts else None,
        trainers=trainers,
        batch_sizes=tuple(sorted({cell.batch_size for cell in cells})),
        seq_lens=tuple(sorted({cell.seq_len for cell in cells})),
        cells=cells,
        choices=choose(cells),
        cost_factors=cost_factors(cells),
        frontier=frontier(cells),
        crossovers=find_crossovers(cells, trainers) if len(trainers) <= MOST_COLUMNS else (),
        pareto=pareto_trials(cells),
        denominators=denominators(results),
        warnings=(
            *mixed_warnings(results),
            *peak_warnings(results),
            *host_memory_warnings(results),
            *_too_many(len(trainers)),
        ),
        privacy_spent=privacy_rows((m.cell.trainer, m.result) for m in members if m.result is not None),
    )


def _with_like_peaks(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Beside trials that tell of an accelerator's memory, the host memory of a command is none to compare."""
    if not any(cell.device_bytes for cell in cells):
        return tuple(cells)
    return tuple(cell if cell.device_bytes else replace(cell, peak_bytes=None) for cell in cells)


def _too_many(columns: int) -> tuple[str, ...]:
    if columns <= MOST_COLUMNS:
        return ()
    return (f"{columns:,} trainers, options or seeds: {MOST_COLUMNS} are shown, and crossovers were not looked for",)


def _rows(groups: Sequence[Sequence[_Member]]) -> tuple[TrialRow, ...]:
    return tuple(
        make_row(member.cell, member.spec, place, member.result)
        for place, group in enumerate(groups)
        for member in group
    )


def _varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in (settings[0] if settings else ()) if len({group[name] for group in settings}) > 1]


def _largest_ok(results: Sequence[TrialResult]) -> dict[tuple[Any, ...], int]:
    largest: dict[tuple[Any, ...], int] = {}
    for result in results:
        if result.outcome == "ok":
            place = place_key(result.spec)
            largest[place] = max(largest.get(place, 0), result.spec.batch_size)
    return largest


def _warnings(groups: Sequence[Group], by_outcome: Mapping[str, int]) -> tuple[str, ...]:
    warnings = [f"{group.title}: {warning}" for group in groups for warning in group.warnings]
    if missing := by_outcome.get("missing", 0):
        verb = "trial has" if missing == 1 else "trials have"
        warnings.append(f"{missing:,} {verb} no result yet; start the same sweep again and it goes on")
    return tuple(warnings)
