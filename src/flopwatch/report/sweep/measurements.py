"""What the report of a sweep says about a group of comparable trials: matrices, limits, privacy."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from flopwatch.language import Said, sentences
from flopwatch.numbers import UNKNOWN, byte_size
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
from flopwatch.report.records import FrontierPoint, Group, PrivacyRow, TrialCell
from flopwatch.report.summary import MOST_COLUMNS

_ROWS = doc.Most(24, 60, 60)
_SIZES = (doc.Head(Said("sequence"), is_number=True, short=Said("seq")), *doc.numbers("batch"))


def group_parts(group: Group, metrics: Sequence[ShownMetric]) -> list[doc.Part]:
    group = narrowed(group)
    return [
        *_matrices(group, metrics or known_metrics(group)),
        _frontier(group),
        *_privacy(group),
    ]


def narrowed(group: Group) -> Group:
    kept = group.trainers[:MOST_COLUMNS]
    return replace(
        group,
        trainers=kept,
        cells=tuple(cell for cell in group.cells if cell.trainer in kept),
        frontier=tuple(point for point in group.frontier if point.trainer in kept),
    )


def _matrices(group: Group, metrics: Sequence[ShownMetric]) -> Iterator[doc.Part]:
    columns, rows = [*_SIZES, *doc.english_numbers(*group.trainers)], list(matrix_rows(group).items())
    for one in metrics:
        note = sentences(_matrix_notes(group)) if one is metrics[-1] else ""
        yield _sized(columns, [_matrix_cells(one, row) for row in rows], one.title, note)


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


_sized = partial(doc.Grid, most=_ROWS, is_spaced=True, fixed=len(_SIZES), merges=True, fits=True)
"""A table whose rows begin with the sequence length and the batch size."""


_BOLD = Said(
    "Bold marks the best value in each privacy class (private, not private, unknown) if it is measurably better."
)
_TIMES = Said(
    "± is half the width of the median's 95 % interval. ~ marks an unstable step time: ignore small differences."
)
_ENDINGS = Said(
    "OOM: out of memory. OOM*: not run, because a smaller trial ran out of memory. n/a: the trainer does not support "
    "the model."
)


def _matrix_notes(group: Group) -> Iterator[str]:
    if any(cell.seconds for cell in group.cells):
        yield from [_BOLD, _TIMES] if len(group.trainers) > 1 else [_TIMES]
    if any(outcome_class(cell.outcome) == "oom" or cell.outcome == "unsupported" for cell in group.cells):
        yield _ENDINGS
    if any(cell.seeds > 1 for cell in group.cells):
        yield Said("Of several seeds, the time is the geometric mean and the memory the largest.")
    if any(cell.is_lower_bound for cell in group.cells):
        yield Said("> marks a lower bound: some ops have no FLOPs formula.")
    if group.denominators:
        yield Said("MFU and HFU are shares of {peaks}.", peaks=", ".join(group.denominators))


def _frontier(group: Group) -> doc.Grid:
    points = {(point.trainer, point.seq_len): point for point in group.frontier}

    def cells(seq_len: int) -> list[str]:
        found = [points.get((name, seq_len)) for name in group.trainers]
        return [str(seq_len), *(frontier_words(point) if point else "" for point in found)]

    capacity, notes = device_capacity(group.cells), []
    if capacity:
        notes.append(Said("The device has {size}.", size=byte_size(capacity)))
    if not all(point.is_monotone for point in group.frontier):
        notes.append(Said("! A batch ran although a smaller one ran out of memory: the limit is unclear."))
    columns, rows = [_SIZES[0], *doc.english_numbers(*group.trainers)], list(map(cells, group.seq_lens))
    title = Said("Largest batch that ran (smallest out of memory)")
    return doc.Grid(columns, rows, title, sentences(notes), _ROWS, is_spaced=True, fits=True)


def frontier_words(point: FrontierPoint) -> str:
    """Return a memory limit such as `32 (64 OOM)`: batch 32 ran, and batch 64 ran out of memory."""
    ran: str = Said("none ran") if point.largest_ok is None else str(point.largest_ok)
    if point.smallest_oom is None:
        return f"≥ {ran}" if point.largest_ok else ran
    word = outcome_word("oom_inferred" if point.is_inferred else "oom_device")
    limit = Said("{ran} ({size} {outcome})") if point.is_monotone else Said("{ran} ({size} {outcome}) !")
    return limit.filled(ran=ran, size=point.smallest_oom, outcome=word)


def _privacy(group: Group) -> Iterator[doc.Part]:
    if group.privacy_spent:
        columns = [(doc.Head(name, is_number=name != "trainers"), text) for name, text in _PRIVACY.items()]
        yield table_of(group.privacy_spent, columns, title=Said("Privacy"), most=_ROWS, is_spaced=True, fits=True)
        yield doc.Text(
            Said(
                "Epsilon is for a whole training with these settings, computed by Opacus's accountant and rounded up. "
                "It holds if each logical batch is drawn by Poisson sampling. The trials themselves train on random "
                "data, so they spend no privacy."
            ),
            "note",
        )
        batches: dict[tuple[str, str], list[str]] = defaultdict(list)
        for row in group.privacy_spent:
            if row.spent.note:
                batches[row.spent.note, ", ".join(row.trainers)].append(str(row.batch_size))
        for (note, trainers), sizes in batches.items():
            of_batches = Said("Batch {sizes} of {trainers}: {note}.")
            yield doc.Text(
                of_batches.filled(sizes=", ".join(dict.fromkeys(sizes)), trainers=trainers, note=note), "note"
            )
    elif any(cell.privacy == "private" and cell.outcome == "ok" for cell in group.cells):
        yield doc.Text(
            Said(
                "To see the epsilon that a training would spend, add `{setting}` to the matrix.",
                setting="privacy: {dataset_size: N, epochs: M}",
            ),
            "note",
        )


_PRIVACY: Mapping[str, Callable[[PrivacyRow], str]] = {
    Said("batch"): lambda row: str(row.batch_size),
    Said("noise"): lambda row: UNKNOWN if row.spent.noise_multiplier is None else f"{row.spent.noise_multiplier:.4g}",
    Said("sampling rate"): lambda row: f"{row.spent.sample_rate:.4g}",
    Said("steps"): lambda row: f"{row.spent.steps:,}",
    Said("delta"): lambda row: f"{row.spent.delta:.3g}",
    Said("accountant"): lambda row: row.spent.accountant,
    Said("epsilon"): lambda row: epsilon_text(row.spent.epsilon),
    Said("trainers"): lambda row: ", ".join(row.trainers),
}
