"""Draw SVG charts of a group: curves of the throughput, and maps of the sizes that fit in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import log
from operator import attrgetter
from typing import TypeAlias

from flopwatch.language import Said, _, sentences
from flopwatch.numbers import byte_size, count, number
from flopwatch.present import svg
from flopwatch.present.document import Drawing, Panels, evenly
from flopwatch.report.cells import METRICS, ShownMetric, cell_text, outcome_class, outcome_word, throughput_metric
from flopwatch.report.records import Group, TrialCell
from flopwatch.report.verdicts import configuration, rate_interval

_Colours: TypeAlias = Mapping[str, int]
_MOST_PANELS = 8
_CURVES = Said("Vertical bars are 95 % intervals. A hollow marker means that the step time is unstable.")
_MAP = Said("Peak memory in GiB; darker means more. A trial that is not ok shows its outcome instead.")


def charts_of(group: Group, colours: _Colours) -> list[Panels]:
    # One panel per sequence length, or a single panel if there is only one batch size.
    along, apart = ("batch", "sequence")
    if len(group.batch_sizes) == 1 and len(group.seq_lens) > 1:
        along, apart = apart, along
    in_all = len({_SIZE_OF[apart](cell) for cell in group.cells})
    some = Said("{shown} of {all} panels are shown, evenly spaced.", shown=_MOST_PANELS, all=in_all)
    about = sentences([_CURVES, some if in_all > _MOST_PANELS else ""])
    title = Said("{metric} by sequence") if along == "sequence" else Said("{metric} by batch")
    rate = throughput_metric(group)
    panels = [
        Panels(_curve_panels(group, along, apart, rate, colours), title.filled(metric=rate.title), about),
        Panels(frontier_maps(group), Said("Which sizes fit"), _MAP),
    ]
    return [one for one in panels if one.drawings]


_MOST_CELLS = 24
_SHADES = 7
_LEAST_SPAN = 8
"""The shades span at least this factor, because peaks that differ little must not look like white and navy."""


def frontier_maps(group: Group) -> list[Drawing]:
    peaks = [cell.peak_bytes for cell in group.cells if cell.peak_bytes]
    span = (min(*peaks, max(1, max(peaks) // _LEAST_SPAN)), max(peaks)) if peaks else (1, 1)
    seqs, batches = evenly(group.seq_lens, _MOST_CELLS), evenly(group.batch_sizes, _MOST_CELLS)
    if len(seqs) * len(batches) < 2:
        return []
    cells = {name: {(c.seq_len, c.batch_size): c for c in group.cells if c.trainer == name} for name in group.trainers}
    return [_map(name, seqs, batches, own, span) for name, own in cells.items()]


def _map(
    trainer: str, seqs: list[int], batches: list[int], cells: Mapping[tuple[int, int], TrialCell], span: tuple[int, int]
) -> Drawing:
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
    return Drawing(trainer, "", "".join(parts), width, bottom + 34)


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


_MOST_POINTS = 60
_LEAST_FACTOR = 4.0
_DENSE = 12
"""Curves with more points than this have small markers."""
_WIDTH, _HEIGHT = 300.0, 214.0
_LEFT, _RIGHT, _BOTTOM, _TOP = 52.0, 290.0, 176.0, 12.0


_SIZE_OF: dict[str, Callable[[TrialCell], int]] = {
    "batch": attrgetter("batch_size"),
    "sequence": attrgetter("seq_len"),
}


def _curve_panels(group: Group, along: str, apart: str, rate: ShownMetric, colours: _Colours) -> list[Drawing]:
    x_of, panel_of = _SIZE_OF[along], _SIZE_OF[apart]
    kept = evenly(sorted({x_of(cell) for cell in group.cells}), _MOST_POINTS)
    panels = evenly(sorted({panel_of(cell) for cell in group.cells}), _MOST_PANELS)
    cells = [cell for cell in group.cells if panel_of(cell) in panels and x_of(cell) in kept]
    values = [value for cell in cells if (value := rate.value(cell)) is not None]
    if not values or len(kept) < 2:  # A single point needs no curve, because the matrix shows it.
        return []
    y = svg.log_scale(values, _BOTTOM, _TOP, least=_LEAST_FACTOR)
    xs = sorted({x_of(cell) for cell in cells})
    x = svg.log_scale(xs, _LEFT + 10, _RIGHT - 8, room=1.0)
    grid = svg.axes(_LEFT, _RIGHT, y, svg.decimal_ticks(y.low, y.high), count)
    for tick in xs if len(xs) <= 7 else svg.binary_ticks(max(x.low, 1), x.high):
        grid += svg.text(x(tick), _BOTTOM + 15, f"{tick:g}", anchor="middle")
    grid += svg.text(
        (_LEFT + _RIGHT) / 2,
        _HEIGHT - 6,
        Said("sequence (log)") if along == "sequence" else Said("batch (log)"),
        anchor="middle",
        style="title",
    )
    drawings = []
    for value in panels:
        own = sorted((cell for cell in cells if panel_of(cell) == value), key=x_of)
        if any(rate.value(cell) is not None for cell in own):
            drawn = grid
            for name in group.trainers:
                known = [cell for cell in own if cell.trainer == name and rate.value(cell) is not None]
                points = [(x(x_of(cell)), y(rate.value(cell) or 1), cell) for cell in known]
                drawn += "".join(_curve(points, rate, colours[name], y))
            drawings.append(Drawing(f"{apart} {value}", "", drawn, _WIDTH, _HEIGHT))
    return drawings


def _curve(
    known: Sequence[tuple[float, float, TrialCell]], metric: ShownMetric, kind: int, y: svg.LogScale
) -> Iterator[str]:
    if len(known) > 1:
        yield svg.polyline(((px, py) for px, py, _ in known), f"l d{kind % 4} k{kind % svg.COLOURS}")
    for px, py, cell in known:
        if ends := rate_interval(cell, metric.value(cell)):
            yield svg.line(px, y(ends[0]), px, y(ends[1]), f"w k{kind % svg.COLOURS}")
        where = Said("{configuration}, sequence {length}", configuration=configuration(cell), length=cell.seq_len)
        lines = [
            where,
            Said("{what}: {facts}", what=metric.title, facts=cell_text(cell, metric)),
            Said("step {time}", time=METRICS["time"].text(cell)) if cell.seconds else "",
            Said("unstable") if cell.is_unstable else "",
        ]
        tip = "\n".join(map(_, filter(None, lines)))
        style = "hollow" if cell.is_unstable else "m"
        yield svg.marker(kind, px, py, tip, style, is_small=len(known) > _DENSE)
