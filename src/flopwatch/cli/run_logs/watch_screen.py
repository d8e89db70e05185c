"""Draws the screen of `flopwatch watch`: progress, tiles, a sparkline for loss and MFU, one bar of time, notices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import floor
from pathlib import Path

from rich.text import Text

from flopwatch.language import _
from flopwatch.numbers import UNKNOWN, count, duration, flop_rate, number, percent, step_time
from flopwatch.records.metrics import Goodput, goodput_of
from flopwatch.records.run import Notice
from flopwatch.records.time_uses import USES
from flopwatch.runs.reading import earlier_run_note
from flopwatch.runs.state import State, WatchedRun
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
_LOOKS = (("green", "█"), ("yellow", "▒"), ("red", "▓"), ("blue", "░"), ("bright_black", "·"))
"""Of the parts of the time: training steps, the three largest losses, and all others."""
_CURVES: Mapping[str, tuple[str, str, Callable[[float], str]]] = {
    "training/loss": ("loss", "cyan", lambda value: number(value, digits=4)),
    "perf/mfu_percent": ("MFU", "green", lambda value: percent(value / 100)),
    "perf/step_time": ("step", "magenta", lambda value: step_time(value, digits=4)),
}
"""For each metric: its name, its colour, and how to write a value."""
_SPARKS = "▁▂▃▄▅▆▇█"
_WIDEST = 120
_LABEL = 7


def draw_frame(run: WatchedRun, place: str, unix_time: float, *, width: int, height: int) -> list[Text]:
    """The lines of the screen, at most `height` in a terminal of 80 x 24 or more. `place` is shown in the title."""
    width, state = min(width, _WIDEST), run.state(unix_time)
    title = _title(run, place, state, unix_time, width)
    if state == "no log":
        where = f"Waiting for the first record of a run in {Path(place).expanduser().absolute()}; "
        return [title, Text(), *_paragraph(f"{where}Ctrl-C ends the waiting.", width, "dim")]
    frame = [title, _facts(run, width), Text(), _progress(run, state, width), Text(), *_tiles(run, width), Text()]
    frame += [*_curves(run, width), Text(), *_time(run, width), *_ranks(run, width)]
    room = max(height - len(frame) - 2, 0)  # the last line of a terminal stays free
    notices = list(_notices(run, width))
    if len(notices) > room:
        notices[room - 1 :] = [_line(("  …", "dim"))] if room else []
    return [*frame, Text(), *notices] if notices else frame


def _line(*parts: str | tuple[str, str]) -> Text:
    """Join texts, plain or with a style. The result never wraps, because each line gets one row of the screen."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _paragraph(text: str, width: int, style: str = "") -> list[Text]:
    return [_line((line, style)) for line in wrapped(plain(_(text)), max(width, 10)) or [""]]


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
    title = _line(("flopwatch ", "dim"), (shown, "bold"))
    title.truncate(width - end.cell_len - 1, overflow="ellipsis", pad=True)
    return title + Text(" ") + end


def _facts(run: WatchedRun, width: int) -> Text:
    environment, provenance = {} if run.start is None else run.start.environment, run.provenance
    facts = [str(environment.get("device") or ""), "peak unknown"]
    if provenance is not None and provenance.peak is not None:
        times = f"{provenance.device_count} x " if provenance.device_count > 1 else ""
        name, dtype, kind = (provenance.peak.get(name, "unknown") for name in ("device", "dtype", "kind"))
        facts = [f"{times}{name}", f"{dtype} {flop_rate(provenance.peak['flops_per_s'])} {kind}"]
    if provenance is not None:
        exact = provenance.exact if run.row is None or run.row.exact is None else run.row.exact
        facts.append("FLOPs unknown" if provenance.method is None else "exact" if exact else "not exact")
    facts += [f"{run.sessions} sessions" if run.sessions > 1 else "", str(environment.get("host") or "")]
    line = _line((" · ".join(one_line(fact) for fact in facts if fact), "dim"))
    line.truncate(width, overflow="ellipsis")
    return line


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
    rest = f"  {duration(left, rough=True)} left" if left else ""
    end = _line((f"  {percent(share)}", "bold"), (rest, "dim"))
    room = max(width - start.cell_len - end.cell_len, 4)
    done = round(share * room)
    return start + _line(("━" * done, "green"), ("─" * (room - done), "bright_black")) + end


# Tiles and curves


def _tiles(run: WatchedRun, width: int) -> list[Text]:
    """Name, value and remark of the newest window in columns."""
    rate, padding = run.value("training/lr"), run.value("perf/padding_percent")
    tokens, samples = run.value("perf/tokens_per_second"), run.value("perf/samples_per_second")
    loss_remark = "" if rate is None else f"lr {rate:.3g}"
    if run.loss is not None and run.row is not None and run.loss[0] < run.row.step:
        loss_remark = f"at step {run.loss[0]:,}"
    tiles = [
        _utilisation(run, "MFU", "model"),
        _utilisation(run, "HFU", "hardware"),
        ("loss", UNKNOWN if run.loss is None else number(run.loss[1], digits=4), loss_remark),
        ("tokens/s", _amount(tokens), "" if padding is None else f"{100 - padding:.0f} % real"),
        ("samples/s", _amount(samples), ""),
        ("step time", step_time(run.value("perf/step_time"), digits=4), ""),
    ]
    tiles = [tile for tile in tiles if tile[0] != ("samples/s" if tokens is not None else "tokens/s")]
    room = width // len(tiles)
    rows = [("", "dim"), ("", "bold"), ("", "dim")]
    for tile in tiles:
        # No number is cut: its first digits would look like a smaller number.
        said = [padded(text if cells(text) < room else "…", room) for text in tile]
        rows = [(row + text, style) for (row, style), text in zip(rows, said, strict=True)]
    return [_line((row.rstrip(), style)) for row, style in rows]


def _utilisation(run: WatchedRun, name: str, which: str) -> tuple[str, str, str]:
    value = run.value(f"perf/{name.lower()}_percent")
    rate = run.value(f"perf/{which}_flops_per_second_per_device")
    return name, "unknown" if value is None else percent(value / 100), "" if rate is None else flop_rate(rate)


def _amount(value: float | None) -> str:
    """A rate; from a million on it is abbreviated, because seven digits do not fit on a narrow tile."""
    return UNKNOWN if value is None else number(value, digits=4) if value < 1e6 else count(value, digits=4)


def _curves(run: WatchedRun, width: int) -> Iterator[Text]:
    """The loss, and MFU or, if that is unknown, the step time."""
    for key in ("training/loss", "perf/mfu_percent" if run.curves["perf/mfu_percent"].items() else "perf/step_time"):
        name, style, as_text = _CURVES[key]
        values = [value for _step, value in run.curves[key].items()]
        if not values:
            yield _line((padded(name, _LABEL), "dim"), ("nothing logged yet", "dim italic"))
            continue
        ends = f"  {as_text(min(values))} to {as_text(max(values))}"
        drawn = sparkline(values, width - _LABEL - cells(ends))
        yield _line((padded(name, _LABEL), "dim"), (drawn, style), (ends, "dim"))


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line; with more values than columns, a column has the mean of several.

    >>> sparkline([1.0, 2.0, 3.0, 8.0], 4), sparkline([5.0, 5.0], 4), sparkline([0.0, 2.0, 7.0, 7.0], 2)
    ('▁▂▃█', '▁▁', '▁█')
    """
    columns = min(len(values), max(width, 1))
    edges = [len(values) * column // columns for column in range(columns + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    whole = high - low or 1.0
    return "".join(_SPARKS[min(floor((mean - low) / whole * len(_SPARKS)), len(_SPARKS) - 1)] for mean in means)


# Where the time went


def _time(run: WatchedRun, width: int) -> list[Text]:
    goodput = goodput_of(run.row.ledger.get("seconds", {})) if run.row is not None else None
    label = (padded("time", _LABEL), "dim")
    if goodput is None:
        return [_line(label, ("not logged yet", "dim italic"))]
    parts, whole = _parts_of(goodput), f" {duration(goodput.wall_seconds)}"
    room = width - _LABEL - cells(whole)
    line, legend, end, drawn = _line(label), [_line(" " * _LABEL)], 0.0, 0
    for (name, seconds), (style, pattern) in zip(parts.items(), _LOOKS, strict=False):
        end += seconds / goodput.wall_seconds
        line.append(pattern * (min(round(end * room), room) - drawn), style)
        drawn = max(drawn, min(round(end * room), room))
        share = percent(seconds / goodput.wall_seconds)
        entry = _line((f"{pattern} ", style), f"{_(name)} ", (share, "bold"), "  ")
        if legend[-1].cell_len + entry.cell_len > width:
            legend.append(_line(" " * _LABEL))
        legend[-1] = legend[-1] + entry
    line.append(whole, "dim")
    caveat = ""
    if goodput.caveat is not None:
        is_left_out = "between" in goodput.lost_seconds
        caveat = " without the time between passes" if is_left_out else " with input wait, which is unknown"
    said = _line(" " * _LABEL, f"{'goodput'} ", (percent(goodput.share), "bold"), (_(caveat), "dim"))
    return [line, *legend, said]


def _parts_of(goodput: Goodput) -> dict[str, float]:
    """Training steps, the three largest losses, and the others together. One may be negative in a damaged log."""
    large = goodput.largest_losses()
    productive = max(goodput.productive_seconds, 0.0)
    rest = max(goodput.wall_seconds - productive - sum(seconds for _key, seconds in large), 0.0)
    parts = {USES["productive"].name: productive, **{USES[key].name: seconds for key, seconds in large}}
    return {**parts, "everything else": rest} if rest >= 5e-4 * goodput.wall_seconds else parts


# Notices and ranks


def _notices(run: WatchedRun, width: int) -> Iterator[Text]:
    ended_by = run.summary.ended_by if run.summary is not None else None
    first = [Notice(None, "error", "ended", ended_by)] if ended_by is not None and ":" in ended_by else []
    last = []
    if note := earlier_run_note(run.earlier_step):
        first.append(Notice(None, "info", "earlier_run", note))
    if run.row is not None and run.row.notes:
        last.append(Notice(None, "warning", "not_exact", f"not exact: {one_line(run.row.notes[0])}"))
    for notice in [*first, *reversed(run.notices), *last]:
        mark, style = _LEVELS.get(notice.level, ("!", "yellow"))
        when = "" if notice.step is None else f"step {notice.step:,}: "
        for place, row in enumerate(_paragraph(f"{when}{notice.message}", width - 2)):
            yield _line((f"{mark} ", f"bold {style}") if place == 0 else "  ") + row


def _ranks(run: WatchedRun, width: int) -> list[Text]:
    world_size = 1 if run.start is None else run.start.world_size
    if world_size == 1 or run.row is None:
        return []
    values, said, style = run.row.values, f"{world_size}", "bold"
    reporting, rank = values.get("ranks/reporting"), values.get("ranks/longest_input_wait_rank")
    if reporting is not None and reporting < world_size:
        said = f"{reporting} of {world_size} report: the numbers are those of the rank that writes the log"
        style = "yellow"
    elif rank is not None:
        share = percent(values.get("ranks/longest_input_wait_percent", 0.0) / 100)
        said = f"{world_size}, rank {rank} waits longest for its input: {share} of the step"
    line = _line((padded("ranks", _LABEL), "dim"), (said, style))
    line.truncate(width, overflow="ellipsis")
    return [line]
