"""Draw curves over the steps of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flopwatch.language import Said, counted
from flopwatch.numbers import count, number, percent, step_time
from flopwatch.present import svg
from flopwatch.present.document import Drawing
from flopwatch.report.run.contents import Curve, Point, RunReport
from flopwatch.report.run.words import metric_name

_WIDTH, _HEIGHT = 460.0, 206.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 450.0, 10.0, 168.0
_SPIKE_FACTOR = 3.0
"""The axis of the step time ends at this many times the ordinary values, so that one stall does not flatten them."""


@dataclass(frozen=True, slots=True)
class ChartStyle:
    """How a chart writes its values, where its axis begins, and whether it ends far below the largest values if these
    are rare.
    """

    write: Callable[[float], str]
    from_zero: bool = True
    cuts_spikes: bool = False


_SHARE = ChartStyle(lambda value: percent(value / 100))
_DATA_RANGE = ChartStyle(number, from_zero=False)
_CHARTS: Mapping[str, tuple[Sequence[str], ChartStyle]] = {
    Said("MFU and HFU"): (("perf/mfu_percent", "perf/hfu_percent"), _SHARE),
    Said("Loss"): (("training/loss",), _DATA_RANGE),
    Said("Tokens/s"): (("perf/tokens_per_second",), ChartStyle(count)),
    Said("Samples/s"): (("perf/samples_per_second",), ChartStyle(count)),
    Said("Step time"): (("perf/step_time",), ChartStyle(step_time, cuts_spikes=True)),
}


def charts_of(report: RunReport) -> Iterator[Drawing]:
    """The charts of the metrics that were logged, and one for each metric of the user."""
    charts = dict(_CHARTS)
    if "perf/tokens_per_second" in report.curves:
        del charts["Samples/s"]
    drawn = {key for keys, _ in _CHARTS.values() for key in keys}
    charts |= {metric_name(key): ((key,), _DATA_RANGE) for key in report.curves if key not in drawn}
    if report.first_step is None or report.last_step is None:
        return
    for title, (keys, style) in charts.items():
        if curves := [report.curves[key] for key in keys if key in report.curves and report.curves[key].points]:
            yield _line_chart(title, curves, (report.first_step, report.last_step), style)


def _line_chart(
    title: str,
    curves: Sequence[Curve],
    steps: tuple[int, int],
    style: ChartStyle,
) -> Drawing:
    """Draw curves over the steps of the run: a line for the mean, and a pale area from the least to the largest."""
    x = svg.LinearScale(*steps, _LEFT, _RIGHT)
    points = [point for curve in curves for point in curve.points]
    y, over = _value_scale(points, style)
    ticks, write = svg.linear_ticks(y.low, y.high), style.write
    if not style.from_zero:  # an axis with a narrow range needs more digits, so that no two ticks look equal
        digits = next((n for n in range(3, 9) if len({number(tick, n) for tick in ticks}) == len(ticks)), 9)
        write = partial(number, digits=digits)
    parts = [
        svg.axes(_LEFT, _RIGHT, y, ticks, lambda tick: write(tick) if tick else "0"),
        svg.line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "axis"),
        *_step_labels(x),
    ]
    for kind, curve in enumerate(curves, start=1):
        parts += _drawn(curve.points, x, y, kind)
    remark: str = ""
    if over:
        most = style.write(max(point.high for point in points))
        remark = counted(
            over, "{n} spike above the axis, up to {most}", "{n} spikes above the axis, up to {most}", most=most
        )
    legend = [(metric_name(curve.key), kind) for kind, curve in enumerate(curves, start=1)] if len(curves) > 1 else []
    return Drawing(title, remark, "".join(parts), _WIDTH, _HEIGHT, legend)


def _value_scale(points: Sequence[Point], style: ChartStyle) -> tuple[svg.LinearScale, int]:
    low = min(point.low for point in points)
    high = max(point.high for point in points)
    ordinary = sorted(point.high for point in points)[int(0.95 * (len(points) - 1))]
    if style.cuts_spikes and high > _SPIKE_FACTOR * ordinary > 0:
        high = _SPIKE_FACTOR * ordinary / 2
    low = min(low, 0.0) if style.from_zero else low
    room = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
    scale = svg.LinearScale(low if style.from_zero else low - room, high + room, _BOTTOM, _TOP)
    return scale, sum(point.high > scale.high for point in points)


def _step_labels(x: svg.LinearScale) -> Iterator[str]:
    y = _BOTTOM + 24
    for tick in svg.linear_ticks(x.low, x.high):
        if tick == round(tick):
            yield svg.text(x(tick), y, count(tick), anchor="end" if x(tick) > _RIGHT - 12 else "middle")
    yield svg.text(_LEFT - 14, y, Said("step"), anchor="end", style="title")


def _drawn(points: Sequence[Point], x: svg.LinearScale, y: svg.LinearScale, kind: int) -> Iterator[str]:
    """The pale area, unless it is as thin as the line, and the line, which is a marker for a single point."""
    middles = [x((point.first_step + point.last_step) / 2) for point in points]
    lows, means, highs = (
        [f"{middle:.1f} {y(getattr(point, name)):.1f}" for middle, point in zip(middles, points, strict=True)]
        for name in ("low", "mean", "high")
    )
    if any(point.low != point.high for point in points):
        yield f'<path class="area k{kind}" d="M{"L".join(highs + lows[::-1])}z"/>'
    if len(points) == 1:
        yield f'<circle class="m k{kind}" cx="{middles[0]:.1f}" cy="{y(points[0].mean):.1f}" r="4"/>'
    else:
        yield f'<path class="l k{kind}{" dash" if kind > 1 else ""}" d="M{"L".join(means)}"/>'
