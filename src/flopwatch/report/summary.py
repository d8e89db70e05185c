"""Summarise a sweep: groups of comparable trials, totals, failures and warnings."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from flopwatch.language import Said, counted
from flopwatch.records.privacy import PrivacySpent
from flopwatch.records.trial import NOT_RUN, OUT_OF_MEMORY, TrialResult, TrialSpec
from flopwatch.report import cells, problems, verdicts
from flopwatch.report.capture import Capture
from flopwatch.report.records import Group, PrivacyRow, SweepSummary, SweepTotals, TrainerTotals, TrialCell

MOST_COLUMNS = 16
"""A table shows at most this many trainers."""


class _Member(NamedTuple):
    cell: TrialCell
    spec: TrialSpec
    result: TrialResult | None


RESUME = Said("run the same sweep command again to resume")


def summarise(capture: Capture, next_step: str = RESUME) -> SweepSummary:
    """Compute everything that the report shows; `next_step` is what to do about trials without a result."""
    results = list(capture.results.values())
    members = _grouped(capture)
    settings = [cells.group_settings(group[0].spec) for group in members]
    varying = [name for name in (settings[0] if settings else ()) if len({one[name] for one in settings}) > 1]
    groups = tuple(_group(group, varying) for group in members)
    missing, of_group = len(capture.missing), Said("{what}: {facts}")
    unfinished = counted(
        missing,
        "{n} trial has no result yet; {next_step}",
        "{n} trials have no result yet; {next_step}",
        next_step=next_step,
    )
    return SweepSummary(
        name=capture.folder.resolve().name,
        folder=str(capture.folder),
        engine=capture.engine,
        created=capture.created,
        totals=_totals(results, missing),
        trainers=_trainer_totals(results, capture.missing.values()),
        groups=groups,
        failures=problems.group_failures(results),
        environments=problems.distinct_environments(results),
        warnings=(
            *capture.troubles,
            *(of_group.filled(what=group.title, facts=text) for group in groups for text in group.warnings),
            *([unfinished] if missing else []),
            *problems.sweep_warnings(results),
        ),
        rows=tuple(
            cells.make_row(m.cell, m.spec, place, m.result) for place, group in enumerate(members) for m in group
        ),
    )


def _grouped(capture: Capture) -> list[list[_Member]]:
    columns = cells.column_names({name: spec for name, spec, _ in capture.trials()})
    groups: dict[tuple[Any, ...], list[_Member]] = defaultdict(list)
    for name, spec, result in capture.trials():
        cell = cells.make_cell(name, spec, result, columns[name])
        groups[cells.group_key(spec)].append(_Member(cell, spec, result))
    return sorted(groups.values(), key=lambda group: -sum(member.cell.outcome == "ok" for member in group))


def _group(members: Sequence[_Member], varying: Sequence[str]) -> Group:
    settings = cells.group_settings(members[0].spec)
    places: dict[tuple[str, int, int], list[TrialCell]] = defaultdict(list)
    for cell in (member.cell for member in members):
        places[cell.trainer, cell.seq_len, cell.batch_size].append(cell)
    measured = tuple(map(cells.over_seeds, places.values()))
    if any(cell.device_bytes for cell in measured):  # Peaks of host memory are not comparable with those of devices.
        measured = tuple(cell if cell.device_bytes else replace(cell, peak_bytes=None) for cell in measured)
    trainers = cells.trainer_order((member.cell.trainer, member.spec.trainer) for member in members)
    results = [member.result for member in members if member.result is not None]
    counts = Counter(result.measured.parameters for result in results if result.measured.parameters)
    unused = {
        name: "" for name in ("model", "dtype") if not any(cells.takes_setting(member.spec, name) for member in members)
    }
    too_many = Said(
        "there are {n:,} combinations of trainers and options: only the first {most} are shown",
        n=len(trainers),
        most=MOST_COLUMNS,
    )
    return Group(
        title=cells.group_title(settings | unused, varying),
        settings=settings,
        parameters=counts.most_common(1)[0][0] if counts else None,
        trainers=trainers,
        batch_sizes=tuple(sorted({cell.batch_size for cell in measured})),
        seq_lens=tuple(sorted({cell.seq_len for cell in measured})),
        cells=measured,
        choices=verdicts.choose(measured),
        frontier=tuple(verdicts.frontier(measured)),
        denominators=problems.denominators(results),
        warnings=(*problems.group_warnings(results), *([too_many] if len(trainers) > MOST_COLUMNS else [])),
        privacy_spent=_privacy_rows((m.cell.trainer, m.result) for m in members if m.result is not None),
    )


def _privacy_rows(trials: Iterable[tuple[str, TrialResult]]) -> tuple[PrivacyRow, ...]:
    found: dict[tuple[int, PrivacySpent], list[str]] = {}
    for column, result in trials:
        if result.outcome == "ok" and result.measured.privacy is not None:
            found.setdefault((result.spec.batch_size, result.measured.privacy), []).append(column)
    rows = [PrivacyRow(batch, tuple(dict.fromkeys(columns)), spent) for (batch, spent), columns in found.items()]
    return tuple(sorted(rows, key=lambda row: (row.batch_size, row.spent.noise_multiplier or 0.0)))


def _totals(results: Sequence[TrialResult], missing: int) -> SweepTotals:
    counts = Counter(str(result.outcome) for result in results) + Counter(missing=missing)
    attempts = [attempt for result in results for attempt in result.earlier_attempts]
    lives = [(result.unix_time, cells.positive(result.seconds) or 0.0) for result in results]
    lives += [(cells.positive(one.get("unix_time")), cells.positive(one.get("seconds")) or 0.0) for one in attempts]
    ran = [(start, start + seconds) for start, seconds in lives if start is not None]
    ends = [end for _, end in ran]
    return SweepTotals(
        trials=len(results) + missing,
        by_outcome=dict(counts.most_common()),
        trial_seconds=sum(seconds for _, seconds in lives),
        wall_seconds=max(ends) - min(ran)[0] if ran else None,
    )


def _trainer_totals(results: Iterable[TrialResult], missing: Collection[TrialSpec]) -> tuple[TrainerTotals, ...]:
    by_trainer: dict[str, list[TrialResult]] = defaultdict(list)
    specs: dict[str, TrialSpec] = {}
    for result in results:
        by_trainer[cells.trainer_name(result.spec)].append(result)
        specs.setdefault(cells.trainer_name(result.spec), result.spec)
    missing_of = Counter(cells.trainer_name(spec) for spec in missing)
    specs = {cells.trainer_name(spec): spec for spec in missing} | specs
    names = cells.trainer_order((name, spec.trainer) for name, spec in specs.items())
    return tuple(_one_trainer(specs[name], by_trainer[name], missing_of[name]) for name in names)


def _one_trainer(spec: TrialSpec, results: Sequence[TrialResult], missing: int) -> TrainerTotals:
    # Those that ran count for the success rate; cancelled trials do not.
    ran = [result for result in results if result.outcome not in (*NOT_RUN, "cancelled")]
    tried = [result for result in ran if result.outcome != "invalid" or result.unix_time is not None]
    ok = sum(result.outcome == "ok" for result in tried)
    too_large = sum(result.outcome in OUT_OF_MEMORY for result in tried)
    known = (cells.positive(result.measured.memory.peak_bytes) for result in tried if result.outcome == "ok")
    peaks = [peak for peak in known if peak]
    return TrainerTotals(
        trainer=cells.trainer_name(spec),
        privacy=cells.privacy_of(spec, *results),
        tried=len(tried),
        ok=ok,
        out_of_memory=too_large,
        failed=len(tried) - ok - too_large,
        not_run=len(results) - len(tried) + missing,
        success_rate=ok / len(tried) if tried else None,
        mean_peak_bytes=fmean(peaks) if peaks else None,
        by_outcome=Counter(str(result.outcome) for result in results) + Counter(missing=missing),
    )
