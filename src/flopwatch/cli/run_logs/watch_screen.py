"""Draws the screen of `flopwatch watch` for a terminal of a given size: cards with one number each, curves and bars."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import floor, isfinite
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from flopwatch.language import _
from flopwatch.numbers import count, duration, flop_rate, number, percent, step_time
from flopwatch.records.metrics import advice, goodput_of
from flopwatch.records.run import Notice
from flopwatch.records.time_uses import USES
from flopwatch.runs.advice import waterfall_bars
from flopwatch.runs.reading import RunLog, earlier_run_note
from flopwatch.runs.state import State, WatchedRun
from flopwatch.runs.waterfall import waterfall_of
from flopwatch.text import cells, one_line, padded, plain, wrapped

_STATES: Mapping[State, tuple[str, str]] = {
    "no log": ("○", "yellow"),
    "starting": ("○", "cyan"),
    "running": ("●", "green"),
    "silent": ("●", "yellow"),
    "running or killed": ("●", "yellow"),
    "killed": ("x", "red"),
    "ended": ("■", "blue"),
    "stopped": ("■", "yellow"),
    "failed": ("x", "red"),
}
_LEVELS = {"info": ("i", "cyan"), "warning": ("!", "yellow"), "error": ("x", "red")}
_TIME_LOOKS = (
    *(("yellow", "▚"), ("bright_blue", "○"), ("bright_red", "+"), ("bright_yellow", "="), ("blue", "▓")),
    *(("cyan", "░"), ("bright_black", "·"), ("bright_cyan", "~"), ("magenta", "×"), ("bright_black", "-")),
    *(("yellow", "▚"), ("bright_magenta", "!"), ("green", "█"), ("red", "▒")),
)
"""Of the parts of the time, in the order of `USES`, up to input wait; what comes later looks alike."""
_LATER_LOOK = ("bright_green", ":")
_PEAK_LOOKS = (("green", "█"), ("red", "▒"), ("yellow", "▚"), ("blue", "▓"))
"""Of the MFU, and of the largest losses."""
_REST_LOOK = ("bright_black", "-")
_FLOPS_LOOKS = {
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
"""For each metric: its name, its colour, how to format a value, and the argument `least_share` of `_shown_range`."""
_CARD_WIDTHS = (20, 20, 20, 21)
"""Widths of the first four cards on a screen of 120 columns; the last card gets the remaining columns."""
_LABEL_WIDTH = 7
_AXIS_WIDTH = 8
_REMARK_WIDTH = 15
_TALL, _WIDE = 30, 110
_WIDEST = 160
_HIGHEST_CURVE = 20
_LOWEST_CURVE = 3
_LOWEST_CURVE_ABOVE_PEAK = 5
"""On a screen so small that the bar of the peak would make the curves lower than this, it is only a line."""


def draw_frame(
    run: WatchedRun, place: str, unix_time: float, *, width: int, height: int, in_colour: bool = True
) -> list[Text]:
    """The lines of the screen: at most `height` of them in a terminal of 80 x 24 or more.

    Without colour, the parts of a bar are drawn with different characters. `place` is the path shown in the title.
    """
    width = min(width, _WIDEST)
    state = run.state(unix_time)
    title = _title(run, place, state, unix_time, width)
    if state == "no log":
        where = f"Waiting for the first record of a run in {Path(place).expanduser().absolute()}; "
        where += "Ctrl-C ends the waiting."
        return [title, _line(), *_paragraph(where, width, "dim")]
    is_large = height >= _TALL and width >= _WIDE
    top = [title, _facts(run, width), _line(), _progress(run, state, width), _line(), *_cards(run, width), _line()]
    bars = [*_time_bar(run, width, in_colour), *([_line()] if is_large else [])]
    bars += [*_flops_bar(run, width, in_colour), *_ranks(run, width)]
    notices = _notices(run, width)
    for_notices = 1 + min(len(notices), 5 if is_large else 1) if notices else 0
    room = height - len(top) - len(bars) - 3
    shown, said = _peak_bar(run, width, in_colour)
    shown += [_line()] if shown and is_large else []
    if len(shown) > room - for_notices - _LOWEST_CURVE_ABOVE_PEAK:
        shown = said if room - for_notices > _LOWEST_CURVE else []
    room -= len(shown)
    right = "perf/mfu_percent" if run.curves["perf/mfu_percent"].points() else "perf/step_time"
    column, rows = (width - 2) // 2, max(_LOWEST_CURVE, min(room - for_notices, _HIGHEST_CURVE))
    curves = _beside([(column, _curve(run, key, column, rows)) for key in ("training/loss", right)], gap=2)
    frame = [*top, *curves, _line(), *shown, *bars]
    if notices and len(frame) + 2 > height:  # what ended the run is worth more than curves
        frame = [*top, *shown, *bars]
    room = height - len(frame) - 1
    if notices and room >= 1:
        if len(notices) > room:
            notices[room - 1].truncate(width - 2, overflow="crop")
            notices[room - 1].append(" …")
        frame += [_line(), *notices[:room]]
    return frame


# Lines of text


def _line(*parts: str | tuple[str, str]) -> Text:
    """Join texts, plain or with a style. The result never wraps, because each line gets one row of the screen."""
    styled = ((part, "") if isinstance(part, str) else part for part in parts)
    own = ((_in_its_place(text), style) for text, style in styled)
    return Text.assemble(*own, no_wrap=True, overflow="ellipsis")


def _in_its_place(text: str) -> str:
    """The text in the reader's language, with as many spaces behind it as keep what follows in its column."""
    said = _(text)
    return padded(said.rstrip(), cells(text)) if said != text and text.endswith("  ") else said


def _spread(left: Text, right: Text, width: int) -> Text:
    """Join a text at the left edge and one at the right edge. The left one is cut if there is no room."""
    left.truncate(max(width - right.cell_len - 1, 0), overflow="ellipsis", pad=True)
    return left + Text(" ") + right


def _beside(columns: Sequence[tuple[int, Sequence[Text]]], gap: int) -> list[Text]:
    """Put blocks of lines next to each other; each line is cut or filled to the width of its block."""
    rows = []
    for index in range(max(len(block) for _width, block in columns)):
        cells = [block[index] if index < len(block) else Text() for _, block in columns]
        for (width, _block), cell in zip(columns, cells, strict=True):
            cell.truncate(width, overflow="ellipsis", pad=True)
        rows.append(_line() + Text(" " * gap).join(cells))
        rows[-1].rstrip()
    return rows


def _paragraph(text: str, width: int, style: str = "") -> list[Text]:
    lines = wrapped(plain(_(text)), max(width, 10)) or [""]
    return [Text(line, style, no_wrap=True, overflow="ellipsis") for line in lines]


# What runs, and how far it is


def _title(run: WatchedRun, place: str, state: State, unix_time: float, width: int) -> Text:
    mark, style = _STATES[state]
    ends = {"killed": "died: killed or crashed, or its log is cut", "stopped": "stopped by Ctrl-C"}
    words = ends.get(state, state)
    if state == "silent":
        words = f"silent for {duration(run.silent_seconds(unix_time), rough=True)}"
    if state == "failed" and run.summary is not None and run.summary.ended_by:
        words = f"failed: {one_line(run.summary.ended_by.partition(':')[0])}"
    end = _line((f"{mark} {words}", f"bold {style}"))
    room = max(width - end.cell_len - len("flopwatch  "), 2)
    place = one_line(place)
    shown = place if len(place) <= room else f"…{place[1 - room :]}"
    return _spread(_line(("flopwatch ", "dim"), (shown, "bold")), end, width)


def _facts(run: WatchedRun, width: int) -> Text:
    environment = {} if run.start is None else run.start.environment
    provenance = run.provenance
    counting: list[str] = []
    if provenance is not None:
        is_lower_bound = provenance.coverage is not None and provenance.coverage < 1
        exact = provenance.exact if run.row is None or run.row.exact is None else run.row.exact
        how_sure = "a lower bound" if is_lower_bound else "exact" if exact else "not exact"
        counting = [f"{provenance.mode}, {how_sure}", f"attention {provenance.attention}"]
        counting = counting if provenance.method is not None else [f"{provenance.mode}, FLOPs unknown"]
    device = [environment.get("device"), "peak unknown"]
    if provenance is not None and provenance.peak is not None:
        times = f"{provenance.device_count} x " if provenance.device_count > 1 else ""
        name, dtype, kind = (provenance.peak.get(name, "unknown") for name in ("device", "dtype", "kind"))
        device = [f"{times}{name}", f"{dtype} {flop_rate(provenance.peak['flops_per_s'])} {kind}"]
    sessions = f"{run.sessions} sessions" if run.sessions > 1 else ""
    text = ""
    for fact in filter(None, (*counting[:1], *device, *counting[1:], sessions, environment.get("host"))):
        longer = " · ".join(filter(None, (text, _(one_line(str(fact))))))
        text = longer if cells(longer) <= width else text
    return _line((text, "dim"))


def _progress(run: WatchedRun, state: State, width: int) -> Text:
    step = run.row.step if run.row is not None else (run.start.resumed_after_step if run.start else None)
    if step is None:
        return _line(("no step logged yet", "dim italic"))
    total = run.start.total_steps if run.start is not None else None
    if not total:
        elapsed = run.row.unix_time - run.start.unix_time if run.row is not None and run.start is not None else None
        so_far = f"  {duration(elapsed, rough=True)} in this session" if elapsed else ""
        return _line("step ", (f"{step:,}", "bold"), (so_far, "dim"))
    left = run.seconds_left if state in ("starting", "running") else None
    steps_done = run.row.steps_done if run.row is not None else step
    share = min(steps_done / total, 1.0)
    start = _line((f"{steps_done:,}", "bold"), (f" of {total:,} steps  ", "dim"))
    end = _line((f"  {percent(share)}", "bold"), (f"  {duration(left, rough=True)} left" if left else "", "dim"))
    room = max(width - start.cell_len - end.cell_len, 4)
    done = round(share * room)
    return start + _line(("━" * done, "green"), ("─" * (room - done), "bright_black")) + end


# The cards


class _Card(NamedTuple):
    name: str
    value: str | None = None
    unit: str = ""
    remark: str = ""
    style: str = ""


def _cards(run: WatchedRun, width: int) -> list[Text]:
    shown = (_utilisation(run, "MFU", "model"), _utilisation(run, "HFU", "hardware"))
    widths = [width * part // 120 for part in _CARD_WIDTHS]
    widths.append(width - sum(widths) - len(widths))
    blocks = []
    for card, room in zip((*shown, _loss(run), _tokens(run), _step_time(run)), widths, strict=True):
        value = _line((card.value or "", f"bold {card.style}"), (f" {card.unit}" if card.unit else "", card.style))
        value = _line(("unknown", "dim italic")) if card.value is None else value
        kept, remark = card.remark[: max(room - 1, 0)], card.remark
        if len(remark) > room and kept and remark[len(kept)] in "0123456789.,":
            # No number is cut: its first digits would look like a smaller number.
            remark = f"{kept.rpartition(' ')[0]} …".strip()
        blocks.append([_line((card.name, "dim")), value, _line((remark, "dim"))])
    return _beside(list(zip(widths, blocks, strict=True)), gap=1)


def _utilisation(run: WatchedRun, name: str, which: str) -> _Card:
    value = run.value(f"perf/{name.lower()}_percent")
    rate = run.value(f"perf/{which}_flops_per_second_per_device")
    if value is None:
        return _Card(name, remark="FLOPs unknown" if rate is None else flop_rate(rate))
    style = "red" if value > 105 else "green"
    return _Card(name, percent(value / 100).removesuffix(" %"), "%", "" if rate is None else flop_rate(rate), style)


def _loss(run: WatchedRun) -> _Card:
    rate = run.value("training/lr")
    remark = "" if rate is None else f"lr {rate:.3g}"
    if run.loss is None:
        return _Card("loss", remark=remark)
    step, value = run.loss
    if run.row is not None and step < run.row.step:
        remark = f"at step {step:,}"
    return _Card("loss", number(value, digits=4), "", remark, "cyan" if isfinite(value) else "red")


def _tokens(run: WatchedRun) -> _Card:
    value, padding = run.value("perf/tokens_per_second"), run.value("perf/padding_percent")
    if value is None:
        samples = run.value("perf/samples_per_second")
        return _Card("tokens/s", remark="" if samples is None else f"{number(samples, digits=4)} samples/s")
    # Numbers from a million on are abbreviated, because seven digits do not fit on a narrow card.
    shown = number(value, digits=4) if value < 1e6 else count(value, digits=4)
    digits = shown.rstrip("kMBT")
    return _Card(
        "tokens/s", digits, shown.removeprefix(digits), "" if padding is None else f"{100 - padding:.0f} % real"
    )


def _step_time(run: WatchedRun) -> _Card:
    value = run.value("perf/step_time")
    if value is None:
        return _Card("step time")
    digits, unit = step_time(value, digits=4).split(" ")
    factor = 1e3 if unit == "ms" else 1.0
    known = run.step_time_percentiles()
    remark = " ".join(f"{name} {number(factor * seconds, digits=2)}" for name, seconds in known.items())
    return _Card("step time", digits, unit, remark, "magenta")


# The curves

Points = Sequence[tuple[float, float]]

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of the dots of a braille character: two columns of four dots, from top to bottom."""
_BRAILLE = 0x2800


def _curve(run: WatchedRun, key: str, width: int, height: int) -> list[Text]:
    name, style, as_text, least_share = _CURVES[key]
    points = run.curves[key].points()
    if not points:
        return [_line((name, "dim")), _line(("  nothing logged yet", "dim italic"))]
    low, high = _shown_range([value for _, value in points], least_share)
    drawn = draw_curve(points, width - _AXIS_WIDTH - 1, height, low, high)
    scale = {0: as_text(high), height - 1: as_text(low)} if high > low else {(height - 1) // 2: as_text(low)}
    rows = [
        _line((f"{scale.get(index, ''):>{_AXIS_WIDTH}}{'┤' if index in scale else '│'}", "dim"), (dots, style))
        for index, dots in enumerate(drawn)
    ]
    first, last = (f"{step:,}" for step in run.curves[key].ends)
    steps = _spread(_line((f"{'':{_AXIS_WIDTH}}└{first}", "dim")), _line((last, "dim")), width)
    return [_line((f"{'':{_AXIS_WIDTH + 1}}{name} by step", "dim")), *rows, steps]


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


def _shown_range(values: Sequence[float], least_share: float) -> tuple[float, float]:
    """The lowest and the highest value of an axis. A steep beginning is cut off, so that the rest can be seen.

    The axis spans at least `least_share` of the mean value, so that noise looks small.

    >>> _shown_range([10.0, 3.0] + [2.0] * 50 + [1.5] * 50, 0.0), _shown_range([9.75, 10.25], least_share=0.2)
    ((1.5, 2.0), (9.0, 11.0))
    """
    low, high = min(values), max(values)
    later = values[len(values) // 10 :]
    if high - low > 2 * (max(later) - min(later)) > 0:
        low, high = min(later), max(later)
    missing = max(least_share * abs(low + high) / 2 - (high - low), 0.0)
    return low - missing / 2, high + missing / 2


# The bars


def _bar(
    label: str, parts: Mapping[str, float], looks: Iterable[tuple[str, str]], remark: str, width: int, in_colour: bool
) -> list[Text]:
    """A bar with a label and a remark, divided among its parts, and below it the legend in percent of the whole.

    The characters are divided by the largest-remainder method. `looks` has the colour and the character of each part.
    """
    said = _(remark)
    end = " " * (_REMARK_WIDTH - cells(said)) + said
    room, whole = width - _LABEL_WIDTH - len(end), sum(parts.values())
    exact = {name: part / whole * room for name, part in parts.items()}
    sizes = {name: floor(size) for name, size in exact.items()}
    for name in sorted(exact, key=lambda name: sizes[name] - exact[name])[: room - sum(sizes.values())]:
        sizes[name] += 1
    drawn, legend = _line((f"{label:<{_LABEL_WIDTH}}", "dim")), [_line(" " * _LABEL_WIDTH)]
    for (name, part), (style, pattern) in zip(parts.items(), looks, strict=True):
        if not part:
            continue
        drawn.append(("█" if in_colour else pattern) * sizes[name], style)
        entry = _line((f"{'■' if in_colour else pattern} ", style), f"{name} ", (percent(part / whole), "bold"))
        if legend[-1].cell_len > _LABEL_WIDTH:
            fits = legend[-1].cell_len + 2 + entry.cell_len <= width
            legend[-1:] = [legend[-1] + Text("  ")] if fits else [legend[-1], _line(" " * _LABEL_WIDTH)]
        legend[-1] = legend[-1] + entry
    drawn.append(end, "dim")
    return [drawn, *legend]


def _without_bar(label: str, why: str) -> list[Text]:
    return [_line((f"{label:<{_LABEL_WIDTH}}", "dim"), (why, "dim italic"))]


def _time_bar(run: WatchedRun, width: int, in_colour: bool) -> list[Text]:
    goodput = goodput_of(run.row.ledger.get("seconds", {})) if run.row is not None else None
    if goodput is not None:
        parts = {"productive": goodput.productive_seconds, **goodput.lost_seconds}
    else:
        spent = run.seconds_spent()
        parts = {"productive": spent["train"] - spent["input_wait"] - spent["warm_up"]}
        parts |= {key: seconds for key, seconds in spent.items() if key not in ("train", "wall")}
    parts = {key: max(seconds, 0.0) for key, seconds in parts.items()}  # one may be negative in a damaged log
    whole = sum(parts.values())
    if whole <= 0:
        return _without_bar("time", "not logged yet")
    named = {USES[key].name: seconds for key, seconds in parts.items()}
    looks = dict(zip(USES, _TIME_LOOKS, strict=False))
    drawn = _bar("time", named, [looks.get(key, _LATER_LOOK) for key in parts], duration(whole), width, in_colour)
    if goodput is None:
        return drawn
    text = _line(" " * _LABEL_WIDTH, "goodput ", (percent(goodput.share), "bold"))
    if goodput.caveat is not None:
        is_left_out = "between" in goodput.lost_seconds
        caveat = " without the time between passes" if is_left_out else " with input wait, which is unknown"
        text.append(_(caveat), "dim")
    losses = [(USES[name].name, seconds / goodput.wall_seconds) for name, seconds in goodput.largest_losses()]
    return [*drawn, _with_losses(text, losses, width)]


def _with_losses(text: Text, losses: Sequence[tuple[str, float]], width: int) -> Text:
    """The text with as many losses as fit, the largest first: a smaller one after a gap would look like the next."""
    for index, (name, share) in enumerate(losses):
        said = f"{_(', lost to') if index == 0 else ','} {_(name)} {percent(share)}"
        if text.cell_len + cells(said) > width:
            break
        text.append(said, "dim")
    return text


def _peak_bar(run: WatchedRun, width: int, in_colour: bool) -> tuple[list[Text], list[Text]]:
    """What became of the peak since the run's first start, as a bar and as one line; both are empty if unknown.

    They show MFU and the largest losses. A peak that is too low has no parts of a whole.
    """
    if run.row is None:
        return [], []
    starts = () if run.start is None else (run.start,)
    provenances = () if run.provenance is None else (run.provenance,)
    known = waterfall_of(RunLog(Path(), starts, provenances, (run.row,), summary=run.summary))
    if known is None or known.points("below_peak") < 0:
        return [], []
    bars = [bar for bar in waterfall_bars(known).bars if bar.tone == "large loss"]
    losses = {bar.name: bar.high - bar.low for bar in sorted(bars, key=lambda bar: bar.low - bar.high)}
    mfu = known.mfu_percent / 100
    parts = {"MFU": mfu, **losses, "other losses": max(1 - mfu - sum(losses.values()), 0.0)}
    looks = (*_PEAK_LOOKS[: len(parts) - 1], _REST_LOOK)
    text = _line(("peak   ", "dim"), (percent(mfu), "bold"), " MFU of the whole run")
    said = _with_losses(text, list(losses.items()), width)
    return _bar("peak", parts, looks, "whole run", width, in_colour), [said]


def _flops_bar(run: WatchedRun, width: int, in_colour: bool) -> list[Text]:
    shares = run.flops_shares()
    if not shares:
        return _without_bar("FLOPs", "not known")
    rate = run.value("perf/hardware_flops_per_second_per_device")
    looks = [_FLOPS_LOOKS[name] for name in shares]
    drawn = _bar("FLOPs", shares, looks, "" if rate is None else flop_rate(rate), width, in_colour)
    for note in run.row.notes[:1] if run.row is not None else ():
        drawn.append(_line(" " * _LABEL_WIDTH, (f"not exact: {one_line(note)}", "yellow")))
        drawn[-1].truncate(width, overflow="ellipsis")
    return drawn


# Notices and ranks


def _notices(run: WatchedRun, width: int) -> list[Text]:
    ended_by = run.summary.ended_by if run.summary is not None else None
    first = [Notice(None, "error", "ended", ended_by)] if ended_by is not None and ":" in ended_by else []
    advised = None if run.row is None else advice(run.row.values)
    last = [] if advised is None else [Notice(None, "info", "advice", advised)]
    if note := earlier_run_note(run.earlier_step):
        first.append(Notice(None, "info", "earlier_run", note))
    rows: list[Text] = []
    for notice in [*first, *reversed(run.notices), *last]:
        mark, style = _LEVELS.get(notice.level, ("!", "yellow"))
        when = "" if notice.step is None else f"step {notice.step:,}: "
        top, *others = _paragraph(f"{when}{notice.message}", width - 2)
        rows += [_line((f"{mark} ", f"bold {style}")) + top, *(_line("  ") + row for row in others)]
    return rows


def _ranks(run: WatchedRun, width: int) -> list[Text]:
    world_size = 1 if run.start is None else run.start.world_size
    if world_size == 1 or run.row is None:
        return []
    values, parts = run.row.values, [(f"{world_size}", "bold")]
    reporting, rank = values.get("ranks/reporting"), values.get("ranks/longest_input_wait_rank")
    if reporting is not None and reporting < world_size:
        said = f"{reporting} of {world_size} report: the numbers are those of the rank that writes the log"
        parts, rank = [(said, "yellow")], None
    if rank is not None:
        share = percent(values.get("ranks/longest_input_wait_percent", 0.0) / 100)
        parts.append((f", rank {rank} waits longest for its input: {share} of the step", "dim"))
    text = _line((f"{'ranks':<{_LABEL_WIDTH}}", "dim"))
    for part, style in parts:
        said = _(part)
        if text.cell_len + cells(said) <= width:
            text.append(said, style)
    return [text]
