"""Draw the charts of a run as SVG: curves over the steps, bars, the waterfall, and what happened when."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from flopwatch.numbers import count, duration, percent
from flopwatch.present import svg
from flopwatch.report.run_page.contents import Kind, Moment
from flopwatch.report.run_page.curves import Curve, Point, in_groups
from flopwatch.report.run_page.words import WHOLE_MFU, metric_name, utc
from flopwatch.runs.waterfall.losses import Waterfall
from flopwatch.text import one_line, plural

WIDTH = 460.0
_HEIGHT = 206.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 450.0, 10.0, 168.0
MOST_TIPS = 150
_SPIKE_FACTOR = 3.0
"""The axis of the step time ends at this many times the ordinary values, so that one stall does not flatten them."""
_LONGEST_NAME = 50
KINDS: tuple[Kind, ...] = ("evaluation", "checkpoint", "restart", "notice")


@dataclass(frozen=True, slots=True)
class ChartStyle:
    """How a chart is drawn.

    Attributes:
        write: Formats a value.
        from_zero: Whether the axis begins at 0.
        cuts_spikes: Whether the axis ends far below the largest values, if these are rare.
    """

    write: Callable[[float], str]
    from_zero: bool = True
    cuts_spikes: bool = False


def line_chart(
    title: str, curves: Sequence[Curve], steps: tuple[int, int], moments: Sequence[Moment], style: ChartStyle
) -> str:
    """Draw curves over the steps of the run: a line for the mean, and a pale area from the least to the largest."""
    x = svg.LinearScale(steps[0], steps[1], _LEFT, _RIGHT)
    points = [point for curve in curves for point in curve.points]
    y, over = _value_scale(points, style)
    ticks = svg.linear_ticks(y.low, y.high)
    parts = [
        svg.axes(_LEFT, _RIGHT, y, ticks, lambda tick: style.write(tick) if tick else "0"),
        _step_axis(x),
        *_marks(moments, x),
    ]
    for kind, curve in enumerate(curves, start=1):
        parts += [_area(curve.points, x, y, kind), _line(curve.points, x, y, kind)]
    parts += _tips(curves, x, style)
    remark = f"{plural(over, 'spike')} above the axis, up to {style.write(max(p.high for p in points))}" if over else ""
    legend = _legend(curves) if len(curves) > 1 else ""
    return svg.figure(title, remark, "".join(parts), WIDTH, _HEIGHT, legend)


def _value_scale(points: Sequence[Point], style: ChartStyle) -> tuple[svg.LinearScale, int]:
    """The scale of the values, and how many points are above it."""
    low = min(point.low for point in points)
    high = max(point.high for point in points)
    ordinary = sorted(point.high for point in points)[int(0.95 * (len(points) - 1))]
    if style.cuts_spikes and high > _SPIKE_FACTOR * ordinary > 0:
        high = _SPIKE_FACTOR * ordinary / 2
    low = min(low, 0.0) if style.from_zero else low
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    scale = svg.LinearScale(low if style.from_zero else low - room, high + room, _BOTTOM, _TOP)
    return scale, sum(point.high > scale.high for point in points)


def _step_axis(x: svg.LinearScale) -> str:
    ticks = [tick for tick in svg.linear_ticks(x.low, x.high) if tick == round(tick)]
    parts = [svg.line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "axis")]
    parts += [svg.text(x(tick), _BOTTOM + 24, count(tick), anchor=_anchor(x(tick))) for tick in ticks]
    parts.append(svg.text(_LEFT - 14, _BOTTOM + 24, "step", anchor="end", style="title"))
    return "".join(parts)


def _anchor(x: float) -> str:
    return "end" if x > _RIGHT - 12 else "middle"


def _middle(point: Point) -> float:
    return (point.first_step + point.last_step) / 2


def _area(points: Sequence[Point], x: svg.LinearScale, y: svg.LinearScale, kind: int) -> str:
    if all(point.low == point.high for point in points):
        return ""
    above = [f"{x(_middle(point)):.1f} {y(point.high):.1f}" for point in points]
    below = [f"{x(_middle(point)):.1f} {y(point.low):.1f}" for point in reversed(points)]
    return f'<path class="area k{kind}" d="M{"L".join(above + below)}z"/>'


def _line(points: Sequence[Point], x: svg.LinearScale, y: svg.LinearScale, kind: int) -> str:
    if len(points) == 1:
        return svg.marker(kind, x(_middle(points[0])), y(points[0].mean), "")
    places = [f"{x(_middle(point)):.1f} {y(point.mean):.1f}" for point in points]
    dash = " dash" if kind > 1 else ""
    return f'<path class="l k{kind}{dash}" d="M{"L".join(places)}"/>' if places else ""


def _marks(moments: Sequence[Moment], x: svg.LinearScale) -> Iterator[str]:
    """Evaluations and checkpoints as ticks below the axis, restarts as lines, notices as triangles at the top."""
    for kind, rise in (("checkpoint", 4), ("evaluation", 4)):
        placed = [x(moment.step) for moment in moments if moment.kind == kind and moment.step is not None]
        if placed:
            top = _BOTTOM + (2 if kind == "checkpoint" else 7)
            yield f'<path class="tick {kind}" d="{"".join(f"M{place:.1f} {top:.1f}v{rise}" for place in placed)}"/>'
    for moment in moments:
        if moment.step is None or moment.kind not in ("restart", "notice"):
            continue
        place = x(moment.step)
        if moment.kind == "restart":
            yield f'<path class="restart" d="M{place:.1f} {_TOP}V{_BOTTOM}"{svg.tipped(moment_words(moment))}/>'
        else:
            yield _triangle(place, _TOP, moment)


def _triangle(x: float, y: float, moment: Moment) -> str:
    level = moment.level if moment.level in ("info", "warning", "error") else "info"
    shape = f"M{x:.1f} {y + 5:.1f}l-4 -7h8z"
    return f'<path class="notice {level}" d="{shape}"{svg.tipped(moment_words(moment))}/>'


def _tips(curves: Sequence[Curve], x: svg.LinearScale, style: ChartStyle) -> Iterator[str]:
    """Strips without colour that show the values of the steps below the pointer."""
    most = max((len(curve.points) for curve in curves), default=0)
    size = ceil(most / MOST_TIPS)
    columns = [in_groups(list(curve.points), size) for curve in curves if curve.points]
    longest = max(columns, key=len, default=[])
    for place, point in enumerate(longest):
        left = x(point.first_step) if place else _LEFT
        right = x(longest[place + 1].first_step) if place + 1 < len(longest) else _RIGHT
        lines = [steps_text(point), f"{utc(point.unix_time)} UTC"]
        for curve, column in zip(curves, columns, strict=False):
            if place < len(column):
                lines.append(f"{metric_name(curve.key)} {range_text(column[place], style.write)}")
        size_words = f'x="{left:.1f}" y="{_TOP + 8:.0f}" width="{max(right - left, 0.5):.1f}"'
        height = f'height="{_BOTTOM - _TOP - 8:.0f}"'
        yield f'<rect class="tip" {size_words} {height}{svg.tipped(chr(10).join(lines))}/>'


def steps_text(point: Point) -> str:
    """The steps that a point stands for."""
    if point.first_step == point.last_step:
        return f"step {point.last_step:,}"
    return f"steps {point.first_step:,} to {point.last_step:,}"


def range_text(point: Point, write: Callable[[float], str]) -> str:
    """The mean of a point, and the range of its values if they differ."""
    low, mean, high = write(point.low), write(point.mean), write(point.high)
    return mean if low == high else f"{mean} ({low} to {high})"


def moment_words(moment: Moment) -> str:
    """What happened, where, and how long it took."""
    where = "" if moment.last_step is None else f" at step {moment.last_step:,}"
    if moment.first_step is None:
        where = where.replace("at", "before")
    elif moment.last_step is not None and moment.first_step < moment.last_step:
        where = f" between steps {moment.first_step:,} and {moment.last_step:,}"
    took = f", {duration(moment.seconds)}" if moment.seconds is not None else ""
    words = f": {moment.words}" if moment.words else ""
    return f"{moment.kind}{where}{took}{words}"


def _legend(curves: Sequence[Curve]) -> str:
    items = (
        f'<span class="key k{kind}{" dashed" if kind > 1 else ""}">{svg.esc(metric_name(curve.key))}</span>'
        for kind, curve in enumerate(curves, start=1)
    )
    return f'<span class="keys">{"".join(items)}</span>'


def moment_chart(moments: Sequence[Moment], steps: tuple[int, int]) -> str:
    """Draw one lane for each kind of moment, over the steps of the run."""
    x = svg.LinearScale(steps[0], steps[1], 84.0, _RIGHT)
    kinds = [kind for kind in KINDS if any(moment.kind == kind and moment.step is not None for moment in moments)]
    parts = []
    for place, kind in enumerate(kinds):
        middle = 18.0 + 28 * place
        parts.append(svg.line(84, middle, _RIGHT, middle, "axis"))
        parts.append(svg.text(76, middle + 3.5, f"{kind}s", anchor="end"))
        parts += [
            _lane_mark(moment, x(moment.step), middle)
            for moment in moments
            if moment.kind == kind and moment.step is not None
        ]
    bottom = 28.0 * len(kinds) + 16
    ticks = [tick for tick in svg.linear_ticks(x.low, x.high) if tick == round(tick)]
    parts += [svg.text(x(tick), bottom, count(tick), anchor=_anchor(x(tick))) for tick in ticks]
    parts.append(svg.text(76, bottom, "step", anchor="end", style="title"))
    return svg.figure("What happened when", "", "".join(parts), WIDTH, bottom + 10)


def _lane_mark(moment: Moment, x: float, middle: float) -> str:
    if moment.kind == "notice":
        return _triangle(x, middle - 1, moment)
    shape = f"M{x:.1f} {middle - 7:.1f}v14"
    return f'<path class="tick lane {moment.kind}" d="{shape}"{svg.tipped(moment_words(moment))}/>'


class Bar(NamedTuple):
    """A row of a bar chart: from `start` to `end` percent of the width, with words above it at both ends."""

    name: str
    start: float
    end: float
    words: str
    style: str
    tip: str = ""


def waterfall_svg(waterfall: Waterfall) -> str:
    """Draw the way from 100 % of the peak down to the MFU: one bar for each loss, at its place."""
    bars = [Bar("peak of the devices", 0.0, 100.0, "100 %", "whole")]
    left = 100.0
    for loss in waterfall.losses:
        tip = "\n".join(text for text in (loss.evidence, loss.advice) if text)
        words = lost_text(loss.points)
        bars.append(Bar(loss.name, left - loss.points, left, words, "loss", tip))
        left -= loss.points
    bars.append(Bar(WHOLE_MFU, 0.0, waterfall.mfu_percent, percent(waterfall.mfu_percent / 100), "rest"))
    remark = f"of {duration(waterfall.wall_seconds)} wall time"
    return bar_chart("From 100 % of the peak down to the MFU", remark, bars)


def points_text(points: float) -> str:
    """A loss in points of MFU.

    >>> points_text(12.34), points_text(0.034)
    ('12.3 points', '0.034 points')
    """
    return percent(points / 100).replace("%", "points")


def lost_text(points: float) -> str:
    """What a loss takes away; a loss below 0, which a peak that is too low causes, adds something.

    >>> lost_text(12.34), lost_text(-3.2)
    ('−12.3 points', '+3.2 points')
    """
    return f"{'−' if points >= 0 else '+'}{points_text(abs(points))}"


def bar_chart(title: str, remark: str, bars: Sequence[Bar]) -> str:
    parts = []
    row = 33.0
    for place, bar in enumerate(bars):
        top = 2 + row * place
        left = 4 + 4.52 * min(max(bar.start, 0.0), 100.0)
        width = max(4.52 * (min(bar.end, 100.0) - max(bar.start, 0.0)), 1.5)
        box = f'y="{top + 17:.1f}" height="10"'
        parts.append(f'<rect class="track" x="4" width="452" {box} rx="2"/>')
        parts.append(f'<rect class="fill {bar.style}" x="{left:.1f}" width="{width:.1f}" {box} rx="2"/>')
        parts.append(svg.text(4, top + 11, one_line(bar.name, _LONGEST_NAME), style="val"))
        parts.append(svg.text(456, top + 11, bar.words, anchor="end", style="val"))
        parts.append(f'<rect class="tip" x="0" y="{top:.1f}" width="460" height="{row - 2:.0f}"{svg.tipped(bar.tip)}/>')
    return svg.figure(title, remark, "".join(parts), WIDTH, 4 + row * len(bars))
