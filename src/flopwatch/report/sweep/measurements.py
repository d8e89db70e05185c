"""What the report of a sweep says about a group of comparable trials: which sizes fit, matrices, limits, privacy."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import log

from flopwatch.language import Said, sentences
from flopwatch.numbers import UNKNOWN, byte_size, number
from flopwatch.present import document as doc
from flopwatch.present import svg
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
from flopwatch.report.verdicts import configuration

_ROWS = doc.Most(24, 60, 60)
_SIZES = (doc.Head(Said("sequence"), is_number=True, short=Said("seq")), *doc.numbers("batch"))


def group_parts(group: Group, metrics: Sequence[ShownMetric]) -> list[doc.Part]:
    group = narrowed(group)
    return [
        doc.Only(("html",), doc.Lazy([group], size_maps)),
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
        yield _sized(columns, doc.Lazy(rows, partial(_matrix_cells, one)), one.title, note)


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
    columns, rows = [_SIZES[0], *doc.english_numbers(*group.trainers)], doc.Lazy(group.seq_lens, cells)
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


_MAP = Said("Peak memory in GiB; darker means more. A trial that is not ok shows its outcome instead.")
_MOST_CELLS = 24
_SHADES = 7
_LEAST_SPAN = 8
"""The shades span at least this factor, because peaks that differ little must not look like white and navy."""


def size_maps(group: Group) -> doc.Panels:
    peaks = [cell.peak_bytes for cell in group.cells if cell.peak_bytes]
    span = (min(*peaks, max(1, max(peaks) // _LEAST_SPAN)), max(peaks)) if peaks else (1, 1)
    seqs, batches = doc.evenly(group.seq_lens, _MOST_CELLS), doc.evenly(group.batch_sizes, _MOST_CELLS)
    if len(seqs) * len(batches) < 2:
        return doc.Panels([])
    cells = {name: {(c.seq_len, c.batch_size): c for c in group.cells if c.trainer == name} for name in group.trainers}
    drawn = [_map(name, seqs, batches, own, span) for name, own in cells.items()]
    return doc.Panels(drawn, Said("Which sizes fit"), _MAP)


def _map(
    trainer: str, seqs: list[int], batches: list[int], cells: Mapping[tuple[int, int], TrialCell], span: tuple[int, int]
) -> doc.Drawing:
    left, width = 40.0, 300.0
    across, high = (width - left - 4) / len(seqs), min(26.0, max(9.0, 260 / len(batches)))
    parts, bottom = [], len(batches) * high
    for row, batch in enumerate(reversed(batches)):
        if len(batches) <= 14 or row % 2 == 0:
            parts.append(svg.text(left - 6, row * high + high / 2 + 3.5, str(batch), anchor="end"))
        for column, seq in enumerate(seqs):
            if cell := cells.get((seq, batch)):
                parts.append(_map_cell(cell, left + column * across, row * high, across, high, span))
    every = max(1, -(-len(seqs) // 8))
    for column, seq in list(enumerate(seqs))[::every]:
        parts.append(svg.text(left + (column + 0.5) * across, bottom + 13, str(seq), anchor="middle"))
    parts.append(svg.text((left + width) / 2, bottom + 28, Said("sequence"), anchor="middle", style="title"))
    parts.append(svg.text(left - 6, bottom + 13, Said("batch"), anchor="end", style="title"))
    return doc.Drawing(trainer, "", "".join(parts), width, bottom + 34)


def _map_cell(cell: TrialCell, x: float, y: float, across: float, high: float, span: tuple[int, int]) -> str:
    where = Said("{configuration}, sequence {length}", configuration=configuration(cell), length=cell.seq_len)
    has_room = across >= 30 and high >= 14
    label = partial(svg.text, x + across / 2, y + high / 2 + 3.5, anchor="middle")
    if cell.outcome == "ok":
        shade, (least, most) = 0, span
        if cell.peak_bytes is not None and most > least:
            shade = min(_SHADES - 1, int(_SHADES * log(cell.peak_bytes / least) / log(most / least)))
        words = number(cell.peak_bytes / 2**30) if cell.peak_bytes else "ok"
        tip = Said("{where}\npeak {size}", where=where, size=byte_size(cell.peak_bytes))
        drawn = svg.rect(x, y, across - 1.5, high - 1.5, f"s{shade}", tip)
        return drawn + (label(words, style="td" if shade > 3 else "tl") if has_room else "")
    kind = outcome_class(cell.outcome)
    drawn = svg.rect(x + 0.6, y + 0.6, across - 2.7, high - 2.7, f"c-{kind}", "")
    drawn += label(outcome_word(cell.outcome) if has_room else "×", style=f"t-{kind}")
    return drawn + svg.tip_area(x, y, across, high, Said("{where}\n{outcome}", where=where, outcome=cell.outcome))


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
