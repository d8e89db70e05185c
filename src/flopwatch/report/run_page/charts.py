"""Draw the charts of a run: curves over the steps, and what happened when."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from flopwatch.numbers import count
from flopwatch.present import svg
from flopwatch.present.document import Drawing, Table
from flopwatch.report.run_page.contents import Kind, Moment
from flopwatch.report.run_page.curves import Curve, Point, merged
from flopwatch.report.run_page.words import metric_name, moment_words, utc
from flopwatch.stats import in_groups
from flopwatch.text import plural

WIDTH = 460.0
_HEIGHT = 206.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 450.0, 10.0, 168.0
MOST_TIPS = 150
_SPIKE_FACTOR = 3.0
"""The axis of the step time ends at this many times the ordinary values, so that one stall does not flatten them."""
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
    title: str,
    curves: Sequence[Curve],
    steps: tuple[int, int],
    moments: Sequence[Moment],
    style: ChartStyle,
    behind: Sequence[Table],
) -> Drawing:
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
    legend = [(metric_name(curve.key), kind) for kind, curve in enumerate(curves, start=1)] if len(curves) > 1 else []
    return Drawing(title, remark, "".join(parts), WIDTH, _HEIGHT, legend, behind)


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
    columns = [in_groups(curve.points, size, merged) for curve in curves if curve.points]
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


def moment_chart(moments: Sequence[Moment], steps: tuple[int, int], behind: Table) -> Drawing:
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
    return Drawing("What happened when", "", "".join(parts), WIDTH, bottom + 10, behind=(behind,))


def _lane_mark(moment: Moment, x: float, middle: float) -> str:
    if moment.kind == "notice":
        return _triangle(x, middle - 1, moment)
    shape = f"M{x:.1f} {middle - 7:.1f}v14"
    return f'<path class="tick lane {moment.kind}" d="{shape}"{svg.tipped(moment_words(moment))}/>'
