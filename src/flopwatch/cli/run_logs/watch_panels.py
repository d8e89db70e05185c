"""The parts of the screen of `flopwatch watch`: cards with one number each, curves and bars."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import floor, isfinite
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from flopwatch.numbers import count, duration, flop_rate, number, percent, step_time
from flopwatch.records.metrics import goodput_of
from flopwatch.records.time_uses import USES
from flopwatch.runs.reading import RunLog
from flopwatch.runs.state import WatchedRun
from flopwatch.runs.waterfall import waterfall_of
from flopwatch.text import one_line, plain

_TIME_LOOKS = (
    *(("green", "█"), ("yellow", "▚"), ("bright_blue", "○"), ("bright_red", "+"), ("bright_yellow", "=")),
    *(("blue", "▓"), ("cyan", "░"), ("bright_black", "·"), ("bright_cyan", "~"), ("magenta", "×"), ("red", "▒")),
    ("bright_black", "-"),
)
"""Of the parts of the time, in their order: training steps, warm-up, the uses that are lost, and other time."""
_FLOPS_PARTS = {
    "useful": ("green", "█"),
    "recompute": ("yellow", "▒"),
    "padding": ("bright_black", "░"),
    "pairs across documents": ("bright_black", "░"),
    "recompute or padding": ("yellow", "▒"),
}
_CURVES: Mapping[str, tuple[str, str, Callable[[float], str], float]] = {
    "training/loss": ("loss", "cyan", lambda value: number(value, digits=4), 0.0),
    "perf/mfu_percent": ("MFU", "green", lambda value: percent(value / 100), 1.0),
    "perf/step_time": ("step time", "magenta", lambda value: step_time(value, digits=4), 1.0),
}
"""For each metric: its name, its colour, how to format a value, and the argument `least_share` of `shown_range`."""
_CARD_WIDTHS = (20, 20, 20, 21)
"""Widths of the first four cards on a screen of 120 columns; the last card gets the remaining columns."""
_LABEL_WIDTH = 7
_AXIS_WIDTH = 8
_REMARK_WIDTH = 15


class Card(NamedTuple):
    """One number with its name, its unit and a remark."""

    name: str
    value: str | None
    unit: str
    remark: str
    style: str


def cards(run: WatchedRun, width: int, *, in_large_digits: bool) -> list[Text]:
    shown = [_utilisation(run, "MFU"), _utilisation(run, "HFU"), _loss(run), _tokens(run), _step_time(run)]
    widths = [width * part // 120 for part in _CARD_WIDTHS]
    gap = 3 if in_large_digits else 1
    widths.append(width - sum(widths) - gap * len(widths))
    blocks = [_card_lines(card, column, in_large_digits) for card, column in zip(shown, widths, strict=True)]
    return beside(list(zip(widths, blocks, strict=True)), gap=gap)


def _card_lines(card: Card, width: int, in_large_digits: bool) -> list[Text]:
    name, remark = line((card.name, "dim")), line((card.remark, "dim"))
    digits = large(card.value) if in_large_digits and card.value is not None else None
    if digits is not None and len(f"{digits[-1]} {card.unit}".rstrip()) <= width:
        digits[-1] = f"{digits[-1]} {card.unit}".rstrip()
        return [name, *(line((row, card.style)) for row in digits), remark]
    value = line(("unknown", "dim italic"))
    if card.value is not None:
        value = line((card.value, f"bold {card.style}"), (f" {card.unit}" if card.unit else "", card.style))
    return [name, line(), value, line(), remark] if in_large_digits else [name, value, remark]


def _utilisation(run: WatchedRun, name: str) -> Card:
    value = run.value(f"perf/{name.lower()}_percent")
    rate = run.value(f"perf/{'model' if name == 'MFU' else 'hardware'}_flops_per_second_per_device")
    if value is None:
        return Card(name, None, "", "FLOPs unknown" if rate is None else flop_rate(rate), "")
    style = "red" if value > 105 else "green"
    return Card(name, percent(value / 100).removesuffix(" %"), "%", "" if rate is None else flop_rate(rate), style)


def _loss(run: WatchedRun) -> Card:
    rate = run.value("training/lr")
    remark = "" if rate is None else f"lr {rate:.3g}"
    if run.loss is None:
        return Card("loss", None, "", remark, "")
    step, value = run.loss
    if run.row is not None and step < run.row.step:
        remark = f"at step {step:,}"
    return Card("loss", number(value, digits=4), "", remark, "cyan" if isfinite(value) else "red")


def _tokens(run: WatchedRun) -> Card:
    value, padding = run.value("perf/tokens_per_second"), run.value("perf/padding_percent")
    if value is None:
        samples = run.value("perf/samples_per_second")
        return Card("tokens/s", None, "", "" if samples is None else f"{number(samples, digits=4)} samples/s", "")
    # Numbers from a million on are abbreviated, because seven large digits do not fit on a card.
    shown = number(value, digits=4) if value < 1e6 else count(value, digits=4)
    digits = shown.rstrip("kMBT")
    remark = "" if padding is None else f"{100 - padding:.0f} % real"
    return Card("tokens/s", digits, shown.removeprefix(digits), remark, "")


def _step_time(run: WatchedRun) -> Card:
    value = run.value("perf/step_time")
    if value is None:
        return Card("step time", None, "", "", "")
    digits, unit = step_time(value, digits=4).split(" ")
    factor = 1e3 if unit == "ms" else 1.0
    known = run.step_time_percentiles()
    remark = " ".join(f"{name} {number(factor * seconds, digits=2)}" for name, seconds in known.items())
    return Card("step time", digits, unit, remark, "magenta")


def curves(run: WatchedRun, width: int, height: int) -> list[Text]:
    """Two curves over the run: the loss, and MFU or, if that is unknown, the step time."""
    right = "perf/mfu_percent" if run.curves["perf/mfu_percent"].points() else "perf/step_time"
    column = (width - 2) // 2
    return beside([(column, _curve(run, key, column, height)) for key in ("training/loss", right)], gap=2)


def _curve(run: WatchedRun, key: str, width: int, height: int) -> list[Text]:
    name, style, as_text, least_share = _CURVES[key]
    points = run.curves[key].points()
    if not points:
        return [line((name, "dim")), line(("  nothing logged yet", "dim italic"))]
    low, high = shown_range([value for _, value in points], least_share)
    drawn = draw_curve(points, width - _AXIS_WIDTH - 1, height, low, high)
    scale = {0: as_text(high), height - 1: as_text(low)} if high > low else {(height - 1) // 2: as_text(low)}
    rows = [
        line((f"{scale.get(index, ''):>{_AXIS_WIDTH}}", "dim"), ("┤" if index in scale else "│", "dim"), (dots, style))
        for index, dots in enumerate(drawn)
    ]
    first, last = (f"{step:,}" for step in run.curves[key].ends)
    steps = spread(line((f"{'':{_AXIS_WIDTH}}└{first}", "dim")), line((last, "dim")), width)
    return [line((f"{'':{_AXIS_WIDTH + 1}}{name} by step", "dim")), *rows, steps]


def time_bar(run: WatchedRun, width: int, *, in_colour: bool) -> list[Text]:
    """A bar of how the time since the first start of the run was spent."""
    spent = run.seconds_spent()
    parts = {
        "productive": max(spent["train"] - spent["input_wait"] - spent["warm_up"], 0.0),
        **{key: seconds for key, seconds in spent.items() if key not in ("train", "wall")},
    }
    parts["other"] = max(spent["wall"] - sum(parts.values()), 0.0)
    whole = sum(parts.values())
    if whole <= 0:
        return [line((f"{'time':<{_LABEL_WIDTH}}", "dim"), ("not logged yet", "dim italic"))]
    named = {USES[key].name: seconds for key, seconds in parts.items()}
    looks = dict(zip(named, _TIME_LOOKS, strict=True))
    return [*bar("time", named, looks, duration(whole), width, in_colour), *_goodput(run, width)]


def _goodput(run: WatchedRun, width: int) -> list[Text]:
    """A line with the goodput and the largest causes of lost time; empty if the log has no goodput."""
    goodput = goodput_of(run.row.ledger.get("seconds", {})) if run.row is not None else None
    if goodput is None:
        return []
    text = line((" " * _LABEL_WIDTH, ""), "goodput ", (percent(goodput.share), "bold"))
    if goodput.caveat is not None:
        is_left_out = "between" in goodput.lost_seconds
        text.append(" without the time between passes" if is_left_out else " with input wait, which is unknown", "dim")
    losses = [(USES[name].name, seconds / goodput.wall_seconds) for name, seconds in goodput.largest_losses()]
    return [_with_losses(text, losses, width)]


def _with_losses(text: Text, losses: Sequence[tuple[str, float]], width: int) -> Text:
    """The text with as many losses as fit, the largest first: a smaller one after a gap would look like the next."""
    for index, (name, share) in enumerate(losses):
        said = f"{', lost to' if index == 0 else ','} {name} {percent(share)}"
        if text.cell_len + len(said) > width:
            break
        text.append(said, "dim")
    return text


_LOSS_LOOKS = (("red", "▒"), ("yellow", "▚"), ("blue", "▓"))


def peak_bars(run: WatchedRun, width: int, *, in_colour: bool) -> tuple[list[Text], list[Text]]:
    """What became of the peak since the run's first start, as a bar and as one line; both are empty if unknown.

    They show MFU and the largest losses. A peak that is too low has no parts of a whole.
    """
    if run.row is None:
        return [], []
    starts = () if run.start is None else (run.start,)
    provenances = () if run.provenance is None else (run.provenance,)
    waterfall = waterfall_of(RunLog(Path(), starts, provenances, (run.row,), summary=run.summary))
    if waterfall is None or waterfall.points("below_peak") < 0:
        return [], []
    losses = {loss.name: loss.points for loss in waterfall.largest(len(_LOSS_LOOKS))}
    parts = {"MFU": waterfall.mfu_percent, **losses}
    parts["other losses"] = max(100 - sum(parts.values()), 0.0)
    looks = dict(zip(parts, (("green", "█"), *_LOSS_LOOKS[: len(losses)], ("bright_black", "-")), strict=True))
    text = line(("peak   ", "dim"), (percent(waterfall.mfu_percent / 100), "bold"), " MFU of the whole run")
    said = _with_losses(text, [(name, points / 100) for name, points in losses.items()], width)
    return bar("peak", parts, looks, "whole run", width, in_colour), [said]


def flops_bar(run: WatchedRun, width: int, *, in_colour: bool) -> list[Text]:
    """A bar of what the FLOPs of the newest logging window were used for."""
    shares = run.flops_shares()
    if not shares:
        return [line((f"{'FLOPs':<{_LABEL_WIDTH}}", "dim"), ("not known", "dim italic"))]
    rate = run.value("perf/hardware_flops_per_second_per_device")
    drawn = bar("FLOPs", shares, _FLOPS_PARTS, "" if rate is None else flop_rate(rate), width, in_colour)
    for note in run.row.notes[:1] if run.row is not None else ():
        drawn.append(line(" " * _LABEL_WIDTH, (f"not exact: {one_line(note)}", "yellow")))
        drawn[-1].truncate(width, overflow="ellipsis")
    return drawn


def bar(
    label: str,
    parts: Mapping[str, float],
    looks: Mapping[str, tuple[str, str]],
    remark: str,
    width: int,
    in_colour: bool,
) -> list[Text]:
    """A bar with a label and a remark, divided among its parts, and below it the legend in percent of the whole."""
    end = f"{remark:>{_REMARK_WIDTH}}"
    cells = divide_bar(parts, width - _LABEL_WIDTH - len(end))
    whole = sum(parts.values())
    drawn, legend = line((f"{label:<{_LABEL_WIDTH}}", "dim")), []
    for name, (style, pattern) in looks.items():
        if not parts.get(name):
            continue
        drawn.append(("█" if in_colour else pattern) * cells[name], style)
        key = "■" if in_colour else pattern
        legend.append(line((f"{key} ", style), f"{name} ", (percent(parts[name] / whole), "bold")))
    drawn.append(end, "dim")
    return [drawn, *(line(" " * _LABEL_WIDTH) + row for row in flow(legend, width - _LABEL_WIDTH))]


Points = Sequence[tuple[float, float]]

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of the dots of a braille character: two columns of four dots, from top to bottom."""
_BRAILLE = 0x2800

_DIGITS = {
    "0": ("█▀█", "█ █", "▀▀▀"),
    "1": ("▀█ ", " █ ", "▀▀▀"),
    "2": ("▀▀█", "█▀▀", "▀▀▀"),
    "3": ("▀▀█", " ▀█", "▀▀▀"),
    "4": ("█ █", "▀▀█", "  ▀"),
    "5": ("█▀▀", "▀▀█", "▀▀▀"),
    "6": ("█▀▀", "█▀█", "▀▀▀"),
    "7": ("▀▀█", "  █", "  ▀"),
    "8": ("█▀█", "█▀█", "▀▀▀"),
    "9": ("█▀█", "▀▀█", "▀▀▀"),
    ".": (" ", " ", "▀"),
    ",": (" ", " ", "█"),
    "-": ("   ", "▀▀▀", "   "),
}


def draw_curve(points: Points, width: int, height: int, low: float, high: float) -> list[str]:
    """Draw a curve with braille characters of two by four dots. Returns the lines of text, from the top.

    Values below `low` or above `high` are drawn at the edge.

    >>> draw_curve([(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)], width=2, height=1, low=0.0, high=3.0)
    ['⡠⠊']
    """
    dots = 4 * height
    cells = [[0] * width for _ in range(height)]
    before: int | None = None
    for column, value in _columns(points, 2 * width):
        share = (value - low) / (high - low) if high > low else 0.5
        level = min(max(floor(share * dots), 0), dots - 1)
        # The dots reach up or down to the previous point, so that a steep curve has no gaps.
        reach = level if before is None else before + (1 if level > before else -1 if level < before else 0)
        for dot in range(min(level, reach), max(level, reach) + 1):
            from_top = dots - 1 - dot
            cells[from_top // 4][column // 2] |= _DOTS[column % 2][from_top % 4]
        before = level
    return ["".join(chr(_BRAILLE | cell) if cell else " " for cell in line) for line in cells]


def _columns(points: Points, columns: int) -> Iterator[tuple[int, float]]:
    """The value of each column from the first to the last point: a mean, or between two means on a straight line."""
    places = [x for x, _ in points]
    first, last = min(places), max(places)  # a damaged log may have rows in another order
    in_column: dict[int, list[float]] = {}
    for x, value in points:
        column = min(floor((x - first) / (last - first) * columns), columns - 1) if last > first else 0
        in_column.setdefault(column, []).append(value)
    means = {column: sum(values) / len(values) for column, values in sorted(in_column.items())}
    for left, right in pairwise(means):
        yield left, means[left]
        for column in range(left + 1, right):
            yield column, means[left] + (means[right] - means[left]) * (column - left) / (right - left)
    yield max(means), means[max(means)]


def shown_range(values: Sequence[float], least_share: float = 0.0) -> tuple[float, float]:
    """The lowest and the highest value of an axis. A steep beginning is cut off, so that the rest can be seen.

    Args:
        values: The values of the curve.
        least_share: The axis spans at least this fraction of the mean value, so that noise looks small.

    >>> shown_range([10.0, 3.0] + [2.0] * 50 + [1.5] * 50)
    (1.5, 2.0)
    >>> shown_range([9.75, 10.25], least_share=0.2)
    (9.0, 11.0)
    """
    low, high = min(values), max(values)
    later = values[len(values) // 10 :]
    if high - low > 2 * (max(later) - min(later)) > 0:
        low, high = min(later), max(later)
    missing = least_share * abs(low + high) / 2 - (high - low)
    return (low - missing / 2, high + missing / 2) if missing > 0 else (low, high)


def divide_bar(shares: Mapping[str, float], width: int) -> dict[str, int]:
    """Divide the `width` characters of a bar among the shares, by the largest-remainder method.

    >>> divide_bar({"a": 2.0, "b": 1.0}, width=10)
    {'a': 7, 'b': 3}
    """
    whole = sum(shares.values())
    if whole <= 0:
        return dict.fromkeys(shares, 0)
    exact = {name: share / whole * width for name, share in shares.items()}
    cells = {name: floor(size) for name, size in exact.items()}
    left = width - sum(cells.values())
    for name in sorted(exact, key=lambda name: cells[name] - exact[name])[:left]:
        cells[name] += 1
    return cells


def large(number: str) -> list[str] | None:
    r"""A number drawn in large digits, as three lines; None if it contains a letter.

    >>> print(*large("41.5"), sep="\n")
    █ █ ▀█    █▀▀
    ▀▀█  █    ▀▀█
      ▀ ▀▀▀ ▀ ▀▀▀
    """
    if not number or any(character not in _DIGITS for character in number):
        return None
    return [" ".join(_DIGITS[character][line] for character in number) for line in range(3)]


def line(*parts: str | tuple[str, str]) -> Text:
    """Join texts, plain or with a style. The result never wraps, because each line gets one row of the screen."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def spread(left: Text, right: Text, width: int) -> Text:
    """Join a text at the left edge and one at the right edge. The left one is cut if there is no room."""
    fitted = left.copy()
    fitted.truncate(max(width - right.cell_len - 1, 0), overflow="ellipsis", pad=True)
    return line() + fitted + Text(" ") + right


def beside(columns: Sequence[tuple[int, Sequence[Text]]], gap: int) -> list[Text]:
    """Put blocks of lines next to each other; each line is cut or filled to the width of its block."""
    rows = []
    for index in range(max(len(block) for _, block in columns)):
        cells = []
        for width, block in columns:
            cells.append(block[index].copy() if index < len(block) else Text())
            cells[-1].truncate(width, overflow="ellipsis", pad=True)
        rows.append(line() + Text(" " * gap).join(cells))
        rows[-1].rstrip()
    return rows


def flow(items: Iterable[Text], width: int, gap: int = 2) -> list[Text]:
    """Put items one after the other, in as many lines as needed."""
    lines: list[Text] = []
    for item in items:
        if lines and lines[-1].cell_len + gap + item.cell_len <= width:
            lines[-1] = lines[-1] + Text(" " * gap) + item
        else:
            lines.append(line() + item)
    return lines


def paragraph(text: str, width: int, style: str = "") -> list[Text]:
    return [line((piece, style)) for piece in textwrap.wrap(plain(text), max(width, 10)) or [""]]
