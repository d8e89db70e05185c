"""Draws a waterfall with characters: one bar per line for `flopwatch why`, all in one bar for `flopwatch watch`."""

from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from flopwatch.cli.run_logs.watch_panels import bar, line
from flopwatch.numbers import percent
from flopwatch.runs.reading import RunLog
from flopwatch.runs.state import WatchedRun
from flopwatch.runs.waterfall.conclusion import LEAST_DRAWN_POINTS
from flopwatch.runs.waterfall.losses import Waterfall, waterfall_of

_POINTS_WIDTH = 8
_WIDEST_BAR = 90
_LOSS, _LARGE_LOSS, _MFU, _PEAK = "yellow", "red", "green", "bright_black"
_LARGEST = 3


class Bar(NamedTuple):
    """One bar of the waterfall, from `low` to `high` percent of the peak."""

    name: str
    low: float
    high: float
    text: str
    style: str


def floating_bars(waterfall: Waterfall, width: int, *, ascii_only: bool = False) -> list[Text]:
    """A line for the peak, one for each loss at its place, and one for the MFU that is left."""
    bars = bars_of(waterfall)
    names = max(len(each.name) for each in bars)
    room = max(min(width - names - 2 - _POINTS_WIDTH, _WIDEST_BAR), 10)
    whole = max(100.0, *(each.high for each in bars))
    rows = []
    for each in bars:
        drawn = _cells(each.low / whole, each.high / whole, room, ascii_only=ascii_only)
        weight = "" if each.style == _LOSS else "bold"
        name, points = f"{each.name:<{names}}  ", f"{each.text:>{_POINTS_WIDTH}}"
        rows.append(line((name, weight), (f"{drawn:<{room}}", each.style), (points, weight)))
    return rows


def bars_of(waterfall: Waterfall) -> list[Bar]:
    """The bars from the peak down to MFU. Small losses share one bar, above that of MFU."""
    large = {loss.key for loss in waterfall.largest(_LARGEST)}
    small = [loss for loss in waterfall.losses if abs(loss.points) < LEAST_DRAWN_POINTS]
    shown = [(loss.name, loss.points, loss.key in large) for loss in waterfall.losses if loss not in small]
    if small:
        name = f"{len(small)} smaller loss{'es' if len(small) > 1 else ''}"
        shown.append((name, sum(loss.points for loss in small), False))
    bars = [Bar("peak", 0.0, 100.0, "100 %", _PEAK)]
    level = 100.0
    for name, points, is_large in shown:
        above, level = level, level - points
        style = _LARGE_LOSS if is_large else _LOSS
        bars.append(Bar(name, min(above, level), max(above, level), _signed(-points), style))
    return [*bars, Bar("MFU of the run", 0.0, waterfall.mfu_percent, percent(waterfall.mfu_percent / 100), _MFU)]


def _signed(points: float) -> str:
    return f"{points:+.1f}" if abs(points) >= LEAST_DRAWN_POINTS else f"{points:+.2g}" if points else "0"


def _cells(low: float, high: float, width: int, *, ascii_only: bool) -> str:
    """A bar between two shares of the width, in half characters; a shorter one is a thin mark.

    Its length is rounded, not its two ends, so that equal losses have equal bars.

    >>> _cells(0.5, 1.0, 8, ascii_only=False), _cells(0.5, 0.69, 8, ascii_only=False)
    ('    ████', '    █▌')
    >>> _cells(0.5, 1.0, 8, ascii_only=True), _cells(0.49, 0.5, 8, ascii_only=True)
    ('    ####', '   |')
    """
    parts = 1 if ascii_only else 2
    length, end = round((high - low) * parts * width), round(high * parts * width)
    if length == 0:
        return " " * (max(end - 1, 0) // parts) + ("|" if ascii_only else "▕")
    start = max(end - length, 0)
    if ascii_only:
        return " " * start + "#" * length
    halves = " " * start + "█" * length + " " * (length + start & 1)
    looks = {"██": "█", "█ ": "▌", " █": "▐", "  ": " "}
    return "".join(looks[halves[at : at + 2]] for at in range(0, len(halves), 2)).rstrip()


_LOOKS = (("red", "▒"), ("yellow", "▚"), ("blue", "▓"))
_IN_ONE_BAR = 3


def peak_bar(run: WatchedRun, width: int, *, in_colour: bool) -> list[Text]:
    """A bar of what became of the peak since the run's first start: MFU and the largest losses; empty if unknown."""
    waterfall = _waterfall(run)
    if waterfall is None:
        return []
    largest = waterfall.largest(_IN_ONE_BAR)
    parts = {"MFU": waterfall.mfu_percent} | {loss.name: loss.points for loss in largest}
    parts["other losses"] = max(100 - sum(parts.values()), 0.0)
    looks = {"MFU": ("green", "█"), **dict(zip((loss.name for loss in largest), _LOOKS, strict=False))}
    return bar("peak", parts, {**looks, "other losses": ("bright_black", "-")}, "whole run", width, in_colour)


def peak_line(run: WatchedRun, width: int) -> list[Text]:
    """The same in one line without a bar, with as many losses as fit."""
    waterfall = _waterfall(run)
    if waterfall is None:
        return []
    text = line(("peak   ", "dim"), (percent(waterfall.mfu_percent / 100), "bold"), " MFU of the whole run")
    for index, loss in enumerate(waterfall.largest(_IN_ONE_BAR)):
        said = f"{', lost to' if index == 0 else ','} {loss.name} {percent(loss.points / 100)}"
        if text.cell_len + len(said) > width:  # a smaller loss after a gap would look like the next one
            break
        text.append(said, "dim")
    return [text]


def _waterfall(run: WatchedRun) -> Waterfall | None:
    """The waterfall so far; None if it is unknown, or if the peak is too low to draw it as parts of a whole."""
    waterfall = None if run.row is None else waterfall_of(_end_of(run))
    return None if waterfall is None or waterfall.points("below_peak") < 0 else waterfall


def _end_of(run: WatchedRun) -> RunLog:
    """The part of the log from which a waterfall is computed."""
    return RunLog(
        Path(),
        () if run.start is None else (run.start,),
        () if run.provenance is None else (run.provenance,),
        () if run.row is None else (run.row,),
        summary=run.summary,
    )
