"""Curves: memory and throughput against batch size, and the two against each other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flopwatch.report.figures import digits, memory, outcome_word, step_seconds
from flopwatch.report.matrices import METRICS, Metric, cell_text
from flopwatch.report.records import Cell, Group
from flopwatch.report.selection import evenly
from flopwatch.report.sentences import configuration, throughput
from flopwatch.report.svg import Scale, axes, binary_ticks, decimal_ticks, figure, line, log_scale, marker, text, tipped
from flopwatch.trial_records import OUT_OF_MEMORY

MOST_LINE_PANELS = 8
MOST_POINTS = 60
_LEAST_FACTOR = 4.0
_DENSE = 12
"""Points of a curve from which on markers are small."""
_LINES_WIDTH, _HEIGHT = 300.0, 214.0
_LEFT, _RIGHT, _BOTTOM, _TOP = 52.0, 290.0, 176.0, 38.0


class Layout(NamedTuple):
    """What runs along x, and what makes the panels: batch size over sequence lengths, or the other way round."""

    x_name: str
    x_of: Callable[[Cell], int]
    panel_name: str
    panel_of: Callable[[Cell], int]
    panels: list[int]
    panels_in_all: int


def layout_of(group: Group) -> Layout:
    """Panels by sequence length, unless only the sequence length varies."""
    seqs, batches = group.seq_lens, group.batch_sizes
    if len(batches) == 1 and len(seqs) > 1:
        return Layout("sequence", _seq_len, "batch", _batch_size, list(batches), 1)
    return Layout("batch", _batch_size, "sequence", _seq_len, evenly(seqs, MOST_LINE_PANELS), len(seqs))


def curve_panels(group: Group, metric: Metric, colours: Mapping[str, int]) -> list[str]:
    """One figure per panel, all with the same axes so that they can be compared; logarithmic both."""
    layout = layout_of(group)
    kept = set(evenly(sorted({layout.x_of(cell) for cell in group.cells}), MOST_POINTS))
    cells = [cell for cell in group.cells if layout.panel_of(cell) in layout.panels and layout.x_of(cell) in kept]
    measured = [cell for cell in cells if metric.value(cell) is not None]
    if not measured or len(kept) < 2:  # one point is no curve; the matrix tells it
        return []
    in_bytes = metric.key == "memory"
    capacity = _capacity(cells) if in_bytes else None
    values = [metric.value(cell) or 0 for cell in measured]
    y = log_scale(
        [*values, capacity] if capacity and capacity < 8 * max(values) else values, _BOTTOM, _TOP, least=_LEAST_FACTOR
    )
    x = log_scale([layout.x_of(cell) for cell in cells], _LEFT + 10, _RIGHT - 8, room=1.0)
    grid = _grid(x, y, layout.x_name, in_bytes=in_bytes, xs=sorted({layout.x_of(cell) for cell in cells}))
    if capacity and y.low <= capacity <= y.high:
        grid += line(_LEFT, y(capacity), _RIGHT, y(capacity), "cap")
        grid += text(_LEFT + 2, y(capacity) - 3, f"device {memory(capacity)}")
    return [
        _panel(value, grid, _by_trainer(group, cells, layout, value), metric, colours, x, y, layout)
        for value in layout.panels
        if any(layout.panel_of(cell) == value for cell in measured)
    ]


def pareto_panels(group: Group, colours: Mapping[str, int]) -> list[str]:
    """Memory against throughput, a panel for each sequence length, with the front of each privacy class."""
    rate = _rate(group)
    known = [cell for cell in group.cells if cell.peak_bytes is not None and rate.value(cell) is not None]
    panels = []
    for seq_len in evenly(sorted({cell.seq_len for cell in known}), MOST_LINE_PANELS):
        cells = evenly([cell for cell in known if cell.seq_len == seq_len], 4 * MOST_POINTS)
        x = log_scale([cell.peak_bytes or 0 for cell in cells], _LEFT + 8, _RIGHT - 14, least=_LEAST_FACTOR)
        y = log_scale([rate.value(cell) or 0 for cell in cells], _BOTTOM, _TOP, least=_LEAST_FACTOR)
        drawing = _pareto_grid(x, y) + "".join(_pareto_parts(group, cells, rate, colours, x, y))
        panels.append(figure(f"sequence {seq_len}", rate.title.lower(), drawing, _LINES_WIDTH, _HEIGHT))
    return panels


def _panel(
    value: int,
    grid: str,
    by_trainer: Mapping[str, Sequence[Cell]],
    metric: Metric,
    colours: Mapping[str, int],
    x: Scale,
    y: Scale,
    layout: Layout,
) -> str:
    parts = [grid]
    crosses = []
    for place, (trainer, own) in enumerate(by_trainer.items()):
        parts += _curve(own, metric, colours[trainer], x, y, layout)
        height = 6 + 16 * (place + 0.5) / len(by_trainer)
        for cell in own:
            if cell.outcome in OUT_OF_MEMORY:
                tip = f"{configuration(cell)}: {outcome_word(cell.outcome)}"
                crosses.append(_cross(x(layout.x_of(cell)), height, colours[trainer], tip))
    if crosses:
        parts.append(f'<rect class="band" x="{_LEFT}" y="4" width="{_RIGHT - _LEFT}" height="20" rx="3"/>')
        parts.append(text(_LEFT - 6, 17, "OOM", anchor="end"))
    return figure(f"{layout.panel_name} {value}", "", "".join(parts + crosses), _LINES_WIDTH, _HEIGHT)


def _curve(own: Sequence[Cell], metric: Metric, kind: int, x: Scale, y: Scale, layout: Layout) -> Iterator[str]:
    known = [(x(layout.x_of(cell)), y(value), cell) for cell in own if (value := metric.value(cell)) is not None]
    if len(known) > 1:
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in known)
        yield f'<polyline class="l k{kind % 8}" points="{points}"/>'
    for px, py, cell in known:
        if metric.key in ("tokens", "samples", "time"):
            yield _whisker(cell, metric, px, y, kind)
        tip = f"{configuration(cell)}, sequence {cell.seq_len}\n{metric.title}: {cell_text(cell, metric)}"
        tip += f"\nstep {METRICS['time'].text(cell)}" if metric.key != "time" and cell.seconds else ""
        tip += "\nunstable" if cell.is_unstable else ""
        style = "hollow" if cell.is_unstable and metric.key != "memory" else "m"
        yield marker(kind, px, py, tip, style, is_small=len(known) > _DENSE)


def _whisker(cell: Cell, metric: Metric, px: float, y: Scale, kind: int) -> str:
    value = metric.value(cell)
    if value is None or not (cell.seconds and cell.low_seconds and cell.high_seconds):
        return ""
    ends = [value * cell.seconds / cell.high_seconds, value * cell.seconds / cell.low_seconds]
    return line(px, y(ends[0]), px, y(ends[1]), f"w k{kind % 8}")


def _pareto_parts(
    group: Group, cells: Sequence[Cell], rate: Metric, colours: Mapping[str, int], x: Scale, y: Scale
) -> Iterator[str]:
    best = set(group.pareto)
    for privacy, style in (("not private", "front dash"), ("private", "front"), ("unknown", "front dash")):
        front = sorted((c for c in cells if c.trial in best and c.privacy == privacy), key=lambda c: c.peak_bytes or 0)
        if len(front) > 1:
            points = " ".join(f"{x(c.peak_bytes or 1):.1f},{y(rate.value(c) or 1):.1f}" for c in front)
            yield f'<polyline class="{style}" points="{points}"/>'
    for cell in sorted(cells, key=lambda cell: cell.trial in best):  # the front on top
        px, py = x(cell.peak_bytes or 1), y(rate.value(cell) or 1)
        front_word = "\non the front of its class" if cell.trial in best else ""
        tip = f"{configuration(cell)}, {cell.privacy}\n{throughput(cell)}, {memory(cell.peak_bytes)}"
        tip += f"\nstep {step_seconds(cell.seconds)}{front_word}"
        style = "m" if cell.trial in best else "hollow"
        yield marker(colours[cell.trainer], px, py, tip, style, is_small=len(cells) > 4 * _DENSE)
        if cell.trial in best and len(cells) <= 4 * _DENSE:
            yield text(px - 5, py - 6, str(cell.batch_size), anchor="end")


def _grid(x: Scale, y: Scale, x_name: str, *, in_bytes: bool, xs: Sequence[int]) -> str:
    ticks = (binary_ticks if in_bytes else decimal_ticks)(y.low, y.high)
    x_ticks: Sequence[float] = xs if len(xs) <= 7 else binary_ticks(max(x.low, 1), x.high)
    words = axes(Scale(x.low, x.high, _LEFT, _RIGHT), y, [], ticks, _memory_tick if in_bytes else _rate_tick)
    words += "".join(text(x(tick), _BOTTOM + 15, f"{tick:g}", anchor="middle") for tick in x_ticks)
    return words + text((_LEFT + _RIGHT) / 2, _HEIGHT - 6, f"{x_name} (log)", anchor="middle", style="title")


def _pareto_grid(x: Scale, y: Scale) -> str:
    words = axes(Scale(x.low, x.high, _LEFT, _RIGHT), y, [], decimal_ticks(y.low, y.high), _rate_tick)
    ticks = binary_ticks(x.low, x.high, 4)
    words += "".join(text(x(tick), _BOTTOM + 15, _memory_tick(tick), anchor="middle") for tick in ticks)
    return words + text((_LEFT + _RIGHT) / 2, _HEIGHT - 6, "peak memory (log)", anchor="middle", style="title")


def _memory_tick(value: float) -> str:
    unit, prefix = (2**30, "Gi") if value >= 2**30 else (2**20, "Mi")
    return f"{value / unit:g} {prefix}B"


def _rate_tick(value: float) -> str:
    for unit, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{prefix}"
    return f"{digits(value) if value < 1 else f'{value:g}'}"


def _cross(px: float, py: float, kind: int, tip: str) -> str:
    area = f'<rect x="{px - 5:.1f}" y="{py - 4:.1f}" width="10" height="8" fill="transparent"{tipped(tip)}/>'
    return f'<path class="x k{kind % 8}" d="M{px - 2.6:.1f} {py - 2.6:.1f}l5.2 5.2m0 -5.2l-5.2 5.2"/>' + area


def _rate(group: Group) -> Metric:
    has_tokens = any(cell.tokens_per_s is not None for cell in group.cells)
    return METRICS["tokens" if has_tokens else "samples"]


def _capacity(cells: Sequence[Cell]) -> float | None:
    sizes = {cell.device_bytes for cell in cells if cell.device_bytes}
    return float(sizes.pop()) if len(sizes) == 1 else None


def _by_trainer(group: Group, cells: Sequence[Cell], layout: Layout, value: int) -> dict[str, list[Cell]]:
    own: dict[str, list[Cell]] = {trainer: [] for trainer in group.trainers}
    for cell in sorted(cells, key=layout.x_of):
        if layout.panel_of(cell) == value:
            own[cell.trainer].append(cell)
    return own


def _seq_len(cell: Cell) -> int:
    return cell.seq_len


def _batch_size(cell: Cell) -> int:
    return cell.batch_size
