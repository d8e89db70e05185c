"""Bars: MFU and HFU, memory by phase. Maps: how far each trainer gets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import log
from typing import NamedTuple

from flopwatch.report.figures import digits, memory, outcome_word, share
from flopwatch.report.records import Cell, Group
from flopwatch.report.selection import evenly
from flopwatch.report.sentences import configuration
from flopwatch.report.svg import esc, figure, text, tipped
from flopwatch.trial_records import FAILED, OUT_OF_MEMORY

MOST_PANELS = 8
MOST_CELLS = 24
PHASES = ("build", "forward", "backward", "optimizer")
_WIDTH = 280.0
_LABEL, _END = 70.0, 208.0
_SHADES = 7


class Bar(NamedTuple):
    """One bar; `behind` is a paler, longer one."""

    label: str
    kind: int
    value: float
    words: str
    tip: str
    behind: float | None = None


def outcome_class(outcome: str) -> str:
    """Of colours: `ok`, `oom`, `failed` or `not-run`."""
    if outcome in OUT_OF_MEMORY:
        return "oom"
    return "failed" if outcome in FAILED else "ok" if outcome == "ok" else "not-run"


def utilisation_panels(group: Group, colours: Mapping[str, int]) -> list[str]:
    """MFU and HFU of all trainers at the largest batch they all ran, for each sequence length."""
    known = [cell for cell in group.cells if cell.mfu is not None or cell.hfu is not None]
    chosen = _largest_shared(known, group.seq_lens)
    shown = [(seq, chosen[seq]) for seq in evenly(sorted(chosen), MOST_PANELS)]
    longest = max((max(c.mfu or 0, c.hfu or 0) for _, cells in shown for c in cells), default=0)
    return [
        _bars(f"sequence {seq}, batch {cells[0].batch_size}", [_utilisation(c, colours) for c in cells], longest)
        for seq, cells in shown
    ]


def phase_panels(group: Group, colours: Mapping[str, int]) -> list[str]:
    """Peak memory in each phase, at the largest configuration that all trainers ran."""
    known = [cell for cell in group.cells if cell.bytes_by_phase]
    chosen = _largest_shared(known, group.seq_lens)
    if not chosen:
        return []
    cells = chosen[max(chosen)]
    longest = max(max(cell.bytes_by_phase.values()) for cell in cells)
    where = f"sequence {cells[0].seq_len}, batch {cells[0].batch_size}"
    return [_bars(cell.trainer, list(_phases(cell, colours)), longest, where) for cell in cells]


def frontier_maps(group: Group) -> list[str]:
    """A map for each trainer: sequence length x batch size, shaded by peak memory, with what did not run."""
    peaks = [cell.peak_bytes for cell in group.cells if cell.peak_bytes]
    span = (min(peaks), max(peaks)) if peaks else (1, 1)
    seqs, batches = evenly(group.seq_lens, MOST_CELLS), evenly(group.batch_sizes, MOST_CELLS)
    if len(seqs) * len(batches) < 2:
        return []
    places = {(cell.trainer, cell.seq_len, cell.batch_size): cell for cell in group.cells}
    return [_map(name, seqs, batches, places, span) for name in group.trainers]


def _utilisation(cell: Cell, colours: Mapping[str, int]) -> Bar:
    bound = "≥ " if cell.is_lower_bound else ""
    words = f"{bound}{share(cell.mfu)} | {share(cell.hfu)}"
    tip = f"{configuration(cell)}\nMFU {bound}{share(cell.mfu)}, HFU {bound}{share(cell.hfu)}"
    return Bar(cell.trainer, colours[cell.trainer], cell.mfu or 0, words, tip, cell.hfu)


def _phases(cell: Cell, colours: Mapping[str, int]) -> Iterator[Bar]:
    for phase in (*PHASES, *sorted(set(cell.bytes_by_phase) - set(PHASES))):
        if phase in cell.bytes_by_phase:
            held = cell.bytes_by_phase[phase]
            yield Bar(
                phase, colours[cell.trainer], held, memory(held), f"{configuration(cell)}, {phase}: {memory(held)}"
            )


def _bars(title: str, bars: Sequence[Bar], longest: float, remark: str = "") -> str:
    parts = []
    for place, bar in enumerate(bars):
        top = 6 + 22 * place
        parts.append(text(_LABEL - 7, top + 11.5, _cut(bar.label, 11), anchor="end"))
        reach = max(bar.value, bar.behind or 0)
        if bar.behind:
            parts.append(_rect(_LABEL, top + 3, _length(bar.behind, longest), 8, f"thin k{bar.kind % 8}", bar.tip))
        parts.append(_rect(_LABEL, top, _length(bar.value, longest), 14, f"fill k{bar.kind % 8}", bar.tip))
        end = _LABEL + _length(reach, longest)
        parts.append(text(min(end + 5, _END + 2), top + 11.5, bar.words, style="val"))
    return figure(title, remark, "".join(parts), _WIDTH + 22, 8 + 22 * max(len(bars), 1))


def _map(
    trainer: str,
    seqs: Sequence[int],
    batches: Sequence[int],
    places: Mapping[tuple[str, int, int], Cell],
    span: tuple[int, int],
) -> str:
    left, width = 40.0, 300.0
    across = (width - left - 4) / len(seqs)
    high = min(26.0, max(9.0, 260 / len(batches)))
    parts = []
    for row, batch in enumerate(reversed(batches)):
        if len(batches) <= 14 or row % 2 == 0:
            parts.append(text(left - 6, row * high + high / 2 + 3.5, str(batch), anchor="end"))
        for column, seq in enumerate(seqs):
            cell = places.get((trainer, seq, batch))
            if cell is not None:
                parts.append(_map_cell(cell, left + column * across, row * high, across, high, span))
    bottom = len(batches) * high
    every = max(1, -(-len(seqs) // 8))
    for column, seq in enumerate(seqs):
        if column % every == 0:
            parts.append(text(left + (column + 0.5) * across, bottom + 13, str(seq), anchor="middle"))
    parts.append(text((left + width) / 2, bottom + 28, "sequence", anchor="middle", style="title"))
    parts.append(text(left - 6, bottom + 13, "batch", anchor="end", style="title"))
    return figure(trainer, "", "".join(parts), width, bottom + 34)


def _map_cell(cell: Cell, x: float, y: float, across: float, high: float, span: tuple[int, int]) -> str:
    kind = outcome_class(cell.outcome)
    tip = f"{configuration(cell)}, sequence {cell.seq_len}\n"
    has_room = across >= 30 and high >= 14
    middle = x + across / 2
    if cell.outcome == "ok":
        shade = _shade(cell.peak_bytes, span)
        words = digits((cell.peak_bytes or 0) / 2**30) if cell.peak_bytes else "ok"
        tip += f"peak {memory(cell.peak_bytes)}"
        label = text(middle, y + high / 2 + 3.5, words, anchor="middle", style="td" if shade > 3 else "tl")
        return _rect(x, y, across - 1.5, high - 1.5, f"s{shade}", tip) + (label if has_room else "")
    word = outcome_word(cell.outcome)
    label = text(middle, y + high / 2 + 3.5, word if has_room else "×", anchor="middle", style=f"t-{kind}")
    size = f'x="{x:.1f}" y="{y:.1f}" width="{across:.1f}" height="{high:.1f}"'
    area = f'<rect {size} fill="transparent"{tipped(tip + cell.outcome)}/>'
    return _rect(x + 0.6, y + 0.6, across - 2.7, high - 2.7, f"c-{kind}", "") + label + area


def _shade(peak_bytes: int | None, span: tuple[int, int]) -> int:
    if peak_bytes is None or span[1] <= span[0]:
        return 0
    return min(_SHADES - 1, int(_SHADES * log(peak_bytes / span[0]) / log(span[1] / span[0])))


def _largest_shared(cells: Iterable[Cell], seq_lens: Sequence[int]) -> dict[int, list[Cell]]:
    """Per sequence length the cells of the largest batch that most trainers have."""
    by_place: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        by_place.setdefault((cell.seq_len, cell.batch_size), []).append(cell)
    chosen: dict[int, list[Cell]] = {}
    for (seq_len, _), found in sorted(by_place.items()):
        if len(found) >= len(chosen.get(seq_len, ())):
            chosen[seq_len] = found
    most = max((len(found) for found in chosen.values()), default=0)
    return {seq_len: chosen[seq_len] for seq_len in seq_lens if len(chosen.get(seq_len, ())) == most > 0}


def _length(value: float, longest: float) -> float:
    return (_END - _LABEL) * value / longest if longest else 0


def _rect(x: float, y: float, width: float, height: float, style: str, tip: str) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{max(height, 0.5):.1f}"'
    return f'<rect class="{esc(style)}" {size} rx="2"{tipped(tip)}/>'


def _cut(words: str, at_most: int) -> str:
    return words if len(words) <= at_most else words[: at_most - 1] + "…"
