"""Draws the screen of `flopwatch watch` for a terminal of a given size."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from flopwatch.cli.run_logs.watch_panels import (
    cards,
    curves,
    flops_bar,
    line,
    paragraph,
    peak_bars,
    spread,
    time_bar,
)
from flopwatch.numbers import duration, flop_rate, percent
from flopwatch.records.metrics import advice
from flopwatch.records.run import Notice
from flopwatch.runs.state import State, WatchedRun
from flopwatch.text import one_line

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
        return [title, line(), *paragraph("Waiting for the first record of a run.", width, "dim")]
    is_large = height >= _TALL and width >= _WIDE
    top = [title, _facts(run, width), line(), _progress(run, state, width), line()]
    top += [*cards(run, width, in_large_digits=is_large), line()]
    bars = [*time_bar(run, width, in_colour=in_colour), *([line()] if is_large else [])]
    bars += [*flops_bar(run, width, in_colour=in_colour), *_ranks(run, width)]
    notices = _notices(run, width)
    for_notices = 1 + min(len(notices), 5 if is_large else 1) if notices else 0
    room = height - len(top) - len(bars) - 3
    shown, said = peak_bars(run, width, in_colour=in_colour)
    shown += [line()] if shown and is_large else []
    if len(shown) > room - for_notices - _LOWEST_CURVE_ABOVE_PEAK:
        shown = said if room - for_notices > _LOWEST_CURVE else []
    bars, room = [*shown, *bars], room - len(shown)
    curve_height = max(_LOWEST_CURVE, min(room - for_notices, _HIGHEST_CURVE))
    frame = [*top, *curves(run, width, curve_height), line(), *bars]
    if notices and height - len(frame) >= 2:
        frame += [line(), *_fitted(notices, width, height - len(frame) - 1)]
    return frame


def _title(run: WatchedRun, place: str, state: State, unix_time: float, width: int) -> Text:
    mark, style = _STATES[state]
    words: str = {"killed": "died: the process was killed or crashed", "stopped": "stopped by Ctrl-C"}.get(state, state)
    if state == "silent":
        words = f"silent for {duration(run.silent_seconds(unix_time), rough=True)}"
    if state == "failed" and run.summary is not None and run.summary.ended_by:
        words = f"failed: {one_line(run.summary.ended_by.partition(':')[0])}"
    end = line((f"{mark} {words}", f"bold {style}"))
    room = max(width - end.cell_len - len("flopwatch  "), 2)
    place = one_line(place)
    shown = place if len(place) <= room else f"…{place[1 - room :]}"
    return spread(line(("flopwatch ", "dim"), (shown, "bold")), end, width)


def _facts(run: WatchedRun, width: int) -> Text:
    """One line with how FLOPs are counted, device and peak, the most important first, as far as they fit."""
    environment = {} if run.start is None else run.start.environment
    how_counted = _counting(run)
    facts = [
        *how_counted[:1],
        *_device(run, environment),
        *how_counted[1:],
        f"{run.sessions} sessions" if run.sessions > 1 else "",
        environment.get("host"),
    ]
    text = ""
    for fact in filter(None, facts):
        shown = one_line(str(fact))
        longer = f"{text} · {shown}" if text else shown
        text = longer if len(longer) <= width else text
    return line((text, "dim"))


def _device(run: WatchedRun, environment: Mapping[str, Any]) -> list[Any]:
    provenance = run.provenance
    if provenance is None or provenance.peak is None:
        return [environment.get("device"), "peak unknown"]
    peak = provenance.peak
    times = f"{provenance.device_count} x " if provenance.device_count > 1 else ""
    device, dtype, kind = (peak.get(name, "unknown") for name in ("device", "dtype", "kind"))
    return [f"{times}{device}", f"{dtype} {flop_rate(peak['flops_per_s'])} {kind}"]


def _counting(run: WatchedRun) -> list[str]:
    provenance = run.provenance
    if provenance is None:
        return []
    if provenance.method is None:
        return [f"{provenance.mode}, FLOPs unknown"]
    is_lower_bound = provenance.coverage is not None and provenance.coverage < 1
    exact = provenance.exact if run.row is None or run.row.exact is None else run.row.exact
    how_sure = "a lower bound" if is_lower_bound else "exact" if exact else "not exact"
    return [f"{provenance.mode}, {how_sure}", f"attention {provenance.attention}"]


def _progress(run: WatchedRun, state: State, width: int) -> Text:
    step = run.row.step if run.row is not None else (run.start.resumed_after_step if run.start else None)
    if step is None:
        return line(("no step logged yet", "dim italic"))
    total = run.start.total_steps if run.start is not None else None
    elapsed = run.row.unix_time - run.start.unix_time if run.row is not None and run.start is not None else None
    if not total:
        so_far = f"  {duration(elapsed, rough=True)} in this session" if elapsed else ""
        return line("step ", (f"{step:,}", "bold"), (so_far, "dim"))
    left = run.seconds_left if state in ("starting", "running") else None
    steps_done = run.row.steps_done if run.row is not None else step
    share = min(steps_done / total, 1.0)
    start = line((f"{steps_done:,}", "bold"), (f" of {total:,} steps  ", "dim"))
    end = line((f"  {percent(share)}", "bold"), (f"  {duration(left, rough=True)} left" if left else "", "dim"))
    room = max(width - start.cell_len - end.cell_len, 4)
    done = round(share * room)
    return line() + start + line(("━" * done, "green"), ("─" * (room - done), "bright_black")) + end


def _notices(run: WatchedRun, width: int) -> list[Text]:
    """The exception that ended the run, if there is one, below it the notices, newest first, and advice."""
    ended_by = run.summary.ended_by if run.summary is not None else None
    first = [Notice(None, "error", "ended", ended_by)] if ended_by is not None and ":" in ended_by else []
    advised = None if run.row is None else advice(run.row.values)
    last = [] if advised is None else [Notice(None, "info", "advice", advised)]
    rows: list[Text] = []
    for notice in [*first, *reversed(run.notices), *last]:
        mark, style = _LEVELS.get(notice.level, ("!", "yellow"))
        when = "" if notice.step is None else f"step {notice.step:,}: "
        top, *others = paragraph(f"{when}{notice.message}", width - 2)
        rows += [line((f"{mark} ", f"bold {style}")) + top, *(line("  ") + row for row in others)]
    return rows


def _fitted(lines: list[Text], width: int, height: int) -> list[Text]:
    if len(lines) <= height:
        return lines
    last = lines[height - 1].copy()
    last.truncate(width - 2, overflow="crop")
    last.append(" …")
    return [*lines[: height - 1], last]


_LABEL_WIDTH = 7
_CAUSES = {"input": "waiting for input", "compute": "computing", "host": "stalled"}


def _ranks(run: WatchedRun, width: int) -> list[Text]:
    """A line about ranks that report late or delay the others; empty for a run with one rank."""
    world_size = 1 if run.start is None else run.start.world_size
    if world_size == 1 or run.row is None:
        return []
    text = line((f"{'ranks':<{_LABEL_WIDTH}}", "dim"))
    for part, style in _parts(run.row.values, world_size):
        if text.cell_len + len(part) <= width:
            text.append(part, style)
    return [text]


def _parts(values: Mapping[str, float], world_size: int) -> Iterator[tuple[str, str]]:
    reporting, waiting = values.get("ranks/reporting"), values.get("ranks/waiting_percent")
    if reporting is not None and reporting < world_size:
        yield f"{reporting} of {world_size} report: the numbers are those of the rank that writes the log", "yellow"
        return
    yield f"{world_size}", "bold"
    rank, excess = values.get("ranks/straggler"), values.get("ranks/straggler_excess_percent")
    if rank is not None and excess is not None:
        cause = max(_CAUSES, key=lambda name: values.get(f"ranks/straggler_{name}_percent", 0.0))
        yield f", rank {rank} delays the others by {percent(excess / 100)} of the step: {_CAUSES[cause]}", "red"
    if waiting is not None:
        yield f", {percent(waiting / 100)} of the time is spent waiting for each other", "dim"
