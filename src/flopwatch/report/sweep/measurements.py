"""What the report of a sweep says about a group of comparable trials: charts, matrices, limits, costs, crossovers."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from flopwatch.numbers import UNKNOWN, byte_size, factor
from flopwatch.present import document as doc
from flopwatch.report.cells import (
    ShownMetric,
    best_trials,
    cell_text,
    device_capacity,
    epsilon_text,
    known_metrics,
    outcome_class,
    outcome_word,
    table_of,
)
from flopwatch.report.records import CostFactor, Crossover, FrontierPoint, Group, PrivacyRow, TrialCell
from flopwatch.report.summary import MOST_COLUMNS
from flopwatch.report.sweep import charts

_ROWS = doc.Most(24, 60, 60)
_SIZES = (doc.Head("sequence", is_number=True, short="seq"), *doc.numbers("batch"))


def group_parts(group: Group, metrics: Sequence[ShownMetric], colours: Mapping[str, int]) -> list[doc.Part]:
    group = narrowed(group)
    return [
        doc.Legend([(name, colours[name]) for name in group.trainers]),
        doc.Only(("html",), doc.Lazy([group], lambda one: doc.Beside(charts.charts_of(one, colours)))),
        doc.Beside([_matrices(group, metrics or known_metrics(group)), _frontier(group), *_factors(group)]),
        *_privacy(group),
        *_crossovers(group),
    ]


def narrowed(group: Group) -> Group:
    kept = group.trainers[:MOST_COLUMNS]
    return replace(
        group,
        trainers=kept,
        cells=tuple(cell for cell in group.cells if cell.trainer in kept),
        cost_factors=tuple(one for one in group.cost_factors if one.trainer in kept),
        frontier=tuple(point for point in group.frontier if point.trainer in kept),
    )


def _matrices(group: Group, metrics: Sequence[ShownMetric]) -> doc.Tabs:
    columns, rows = [*_SIZES, *doc.numbers(*group.trainers)], list(matrix_rows(group).items())
    tables = [_sized(columns, doc.Lazy(rows, partial(_matrix_cells, one)), one.title) for one in metrics]
    return doc.Tabs(tables, " ".join(_matrix_notes(group)) if metrics else "")


def matrix_rows(group: Group) -> dict[tuple[int, int], list[TrialCell | None]]:
    by_place = {(cell.seq_len, cell.batch_size, cell.trainer): cell for cell in group.cells}
    places = sorted({(cell.seq_len, cell.batch_size) for cell in group.cells})
    return {place: [by_place.get((*place, name)) for name in group.trainers] for place in places}


def _matrix_cells(metric: ShownMetric, row: tuple[tuple[int, int], list[TrialCell | None]]) -> list[doc.Cell | str]:
    place, found = row
    best = best_trials(found, metric)
    cells: list[doc.Cell | str] = [*map(str, place)]
    for cell in found:
        tone: doc.Tone = "" if not cell or cell.outcome == "ok" else outcome_class(cell.outcome)
        tone = "best" if cell and cell.trial in best else tone
        cells.append(doc.Cell(cell_text(cell, metric), tone) if cell else "")
    return cells


_sized = partial(doc.Grid, most=_ROWS, pick=doc.spaced, fixed=len(_SIZES), merges=True, fits=True)
"""A table whose rows begin with the sequence length and the batch size."""


_BOLD = "Bold marks the best value in each privacy class (private, not private, unknown) if it is measurably better."
_TIMES = "± is half the width of the median's 95 % interval. ~ marks an unstable step time: ignore small differences."
_ENDINGS = (
    "OOM: out of memory. OOM*: not run, because a smaller trial ran out of memory. n/a: the trainer does not support "
    "the model."
)


def _matrix_notes(group: Group) -> Iterator[str]:
    if any(cell.seconds for cell in group.cells):
        yield from [_BOLD, _TIMES] if len(group.trainers) > 1 else [_TIMES]
    if any(outcome_class(cell.outcome) == "oom" or cell.outcome == "unsupported" for cell in group.cells):
        yield _ENDINGS
    if any(cell.seeds > 1 for cell in group.cells):
        yield "Of several seeds, the time is the geometric mean and the memory the largest."
    if any(cell.is_lower_bound for cell in group.cells):
        yield "> marks a lower bound: some ops have no FLOPs formula."
    if group.denominators:
        yield f"MFU and HFU are shares of {', '.join(group.denominators)}."


def _frontier(group: Group) -> doc.Grid:
    points = {(point.trainer, point.seq_len): point for point in group.frontier}

    def cells(seq_len: int) -> list[str]:
        found = [points.get((name, seq_len)) for name in group.trainers]
        return [str(seq_len), *(frontier_words(point) if point else "" for point in found)]

    capacity, notes = device_capacity(group.cells), []
    if capacity:
        notes.append(f"The device has {byte_size(capacity)}.")
    if not all(point.is_monotone for point in group.frontier):
        notes.append("! A batch ran although a smaller one ran out of memory: the limit is unclear.")
    columns, rows = [_SIZES[0], *doc.numbers(*group.trainers)], doc.Lazy(group.seq_lens, cells)
    title = "Largest batch that ran (smallest out of memory)"
    return doc.Grid(columns, rows, title, " ".join(notes), _ROWS, doc.spaced, fits=True)


def frontier_words(point: FrontierPoint) -> str:
    """Return a memory limit such as `32 (64 OOM)`: batch 32 ran, and batch 64 ran out of memory."""
    ran = "none ran" if point.largest_ok is None else str(point.largest_ok)
    if point.smallest_oom is None:
        return f"≥ {ran}" if point.largest_ok else ran
    word = outcome_word("oom_inferred" if point.is_inferred else "oom_device")
    return f"{ran} ({point.smallest_oom} {word})" + ("" if point.is_monotone else " !")


def _factors(group: Group) -> Iterator[doc.Part]:
    by_place: dict[tuple[int, int], dict[str, CostFactor]] = defaultdict(dict)
    for one in group.cost_factors:
        by_place[one.seq_len, one.batch_size][one.trainer] = one
    trainers = [name for name in group.trainers if any(name in found for found in by_place.values())]

    def cells(place: tuple[int, int]) -> Iterator[doc.Cell | str]:
        yield from map(str, place)
        for one in (by_place[place].get(name) for name in trainers):
            if one is None:
                yield from [doc.Cell(UNKNOWN, "soft")] * 3
                continue
            between = f"95 % intervals: {factor(one.low_time)} to {factor(one.high_time)}"
            yield doc.Cell(("~" if one.is_unstable and one.time else "") + factor(one.time), tip=between)
            yield from (factor(one.memory), factor(one.flops))

    columns = [doc.Head(word, is_number=True, group=name) for name in trainers for word in ("time", "memory", "FLOPs")]
    note = "2× means twice as much as the standard trainer at the same batch size and sequence length."
    if any(one.memory_above_start is not None for one in group.cost_factors):
        note += " Memory includes Python and torch themselves, so its factor is smaller than that of the model alone."
    if by_place:
        rows = doc.Lazy(list(by_place), lambda place: list(cells(place)))
        yield _sized([*_SIZES, *columns], rows, "Cost relative to standard: time, memory, FLOPs", note)
    ran = [cell for cell in group.cells if cell.outcome == "ok"]
    without = {cell.trainer for cell in ran if cell.privacy != "not private"} - set(trainers)
    if without and any(cell.privacy == "not private" for cell in ran):
        names = ", ".join(name for name in group.trainers if name in without)
        yield doc.Text(
            f"No cost relative to standard for {names}: the standard trainer did not run with the same options, batch "
            "size and sequence length.",
            "note",
        )


def _privacy(group: Group) -> Iterator[doc.Part]:
    if group.privacy_spent:
        columns = [(doc.Head(name, is_number=name != "trainers"), text) for name, text in _PRIVACY.items()]
        yield table_of(group.privacy_spent, columns, title="Privacy", most=_ROWS, pick=doc.spaced, fits=True)
        yield doc.Text(
            "Epsilon is for a whole training with these settings, computed by Opacus's accountant and rounded up. It "
            "holds if each logical batch is drawn by Poisson sampling. The trials themselves train on random data, so "
            "they spend no privacy.",
            "note",
        )
        batches: dict[tuple[str, str], list[str]] = defaultdict(list)
        for row in group.privacy_spent:
            if row.spent.note:
                batches[row.spent.note, ", ".join(row.trainers)].append(str(row.batch_size))
        for (note, trainers), sizes in batches.items():
            yield doc.Text(f"Batch {', '.join(dict.fromkeys(sizes))} of {trainers}: {note}.", "note")
    elif any(cell.privacy == "private" and cell.outcome == "ok" for cell in group.cells):
        yield doc.Text(
            "To see the epsilon that a training would spend, add `privacy: {dataset_size: N, epochs: M}` to the "
            "matrix.",
            "note",
        )


_PRIVACY: Mapping[str, Callable[[PrivacyRow], str]] = {
    "batch": lambda row: str(row.batch_size),
    "noise": lambda row: UNKNOWN if row.spent.noise_multiplier is None else f"{row.spent.noise_multiplier:.4g}",
    "sampling rate": lambda row: f"{row.spent.sample_rate:.4g}",
    "steps": lambda row: f"{row.spent.steps:,}",
    "delta": lambda row: f"{row.spent.delta:.3g}",
    "accountant": lambda row: row.spent.accountant,
    "epsilon": lambda row: epsilon_text(row.spent.epsilon),
    "trainers": lambda row: ", ".join(row.trainers),
}


_INTERPOLATED = "Values are interpolated between two measured ones, in logarithms."
_UNSTABLE = "A crossover of unstable step times may lie elsewhere: measure these trials again on an idle machine."


def _crossovers(group: Group) -> Iterator[doc.Part]:
    if not group.crossovers:
        return
    claimed = [crossover for crossover in group.crossovers if crossover.is_claimed]
    undecided = [crossover_sentence(one) for one in group.crossovers if not one.is_claimed]
    digest = crossover_digest(claimed)
    parts: list[doc.Part] = [doc.Text(_INTERPOLATED, "note")]
    if any(crossover.is_unstable for crossover in group.crossovers):
        parts.append(doc.Text(_UNSTABLE, "note"))
    parts += [doc.Items(digest)] if digest else []
    folded: list[tuple[str, Sequence[str]]] = []
    if len(digest) < len(claimed):
        folded.append((f"All {len(claimed):,} crossovers, one by one", doc.Lazy(claimed, crossover_sentence)))
    if undecided:
        more = " more" if digest else ""
        said = f"{len(undecided):,}{more} uncertain: medians cross, but no interval tells them apart"
        parts.append(doc.Only(("terminal", "markdown"), [doc.Text(said, "note")]))
        folded.append((said, undecided))
    parts.append(doc.Only(("html",), [doc.Section(title, [doc.Items(all_)], is_open=False) for title, all_ in folded]))
    yield doc.Section("Crossovers", parts)


def crossover_sentence(one: Crossover) -> str:
    """Return a text such as `ghost beats dpsgd below sequence 480 at batch 8 (between 256 and 512 measured; time)`."""
    where, beats = f"at {_other(one)} {one.fixed}", f"{one.below} beats {one.above}"
    measured = f"(between {one.low} and {one.high} measured; {_quantity([one])})"
    if not one.is_claimed:
        return f"perhaps {beats} below some {one.axis} {where}, but the intervals overlap {measured}"
    if one.at is None:
        equal = ", ".join(map(str, one.equal_at))
        return f"{beats} up to {one.axis} {one.low} {where}, no measurable difference at {equal} {measured}"
    at = rounded(one.at)
    # Rounding may move the crossover out of the measured interval.
    limit = f"below {one.axis} {at}" if one.low < at <= one.high else f"up to {one.axis} {one.low}"
    return f"{beats} {limit} {where} {measured}"


def _other(one: Crossover) -> str:
    return "batch" if one.axis == "sequence" else "sequence"


def crossover_digest(claimed: Iterable[Crossover]) -> list[str]:
    """Write crossovers (sizes above which another trainer is better) as sentences, one for each pair of trainers."""
    alike: dict[tuple[str, ...], list[Crossover]] = defaultdict(list)
    for one in claimed:
        alike[one.quantity, one.axis, one.below, one.above].append(one)
    return [crossover_sentence(same[0]) if len(same) == 1 else _many(same) for same in alike.values()]


def _many(same: Sequence[Crossover]) -> str:
    first, fixed = same[0], sorted(one.fixed for one in same)
    low = min(max(rounded(one.at), one.low) if one.at is not None else one.low for one in same)
    high = max(min(rounded(one.at), one.high) if one.at is not None else one.high for one in same)
    values = ", ".join(map(str, fixed)) if len(fixed) <= 4 else f"{fixed[0]} to {fixed[-1]}, {len(fixed)} of them"
    span = str(low) if low == high else f"{low} to {high}"
    return f"{first.below} beats {first.above} below {first.axis} {span} ({_other(first)} {values}; {_quantity(same)})"


def _quantity(same: Sequence[Crossover]) -> str:
    return f"{same[0].quantity}, unstable" if any(one.is_unstable for one in same) else same[0].quantity


def rounded(value: float) -> int:
    """Round to two digits, because an interpolated crossover is not more precise than that.

    >>> rounded(376.7), rounded(7.61), rounded(12345.0)
    (380, 8, 12000)
    """
    unit = int("1" + "0" * max(len(str(int(value))) - 2, 0))
    return round(value / unit) * unit
