"""The parts of the screen of `flopwatch watch` that show numbers: cards, curves, divided bars."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import NamedTuple

from rich.text import Text

from flopwatch.cli.plots import divide_bar, draw_curve, large, shown_range
from flopwatch.cli.quantities import duration, flop_rate, percent, scaled_number, short_number, step_seconds
from flopwatch.cli.screen_lines import beside, flow, line, spread
from flopwatch.cli.watch_state import WatchedRun
from flopwatch.goodput import goodput_of

_TIME_PARTS = {
    "compute": ("green", "█"),
    "input wait": ("red", "▒"),
    "warm-up": ("yellow", "▚"),
    "eval": ("blue", "▓"),
    "checkpoint": ("cyan", "░"),
    "pause": ("bright_black", "·"),
    "counting": ("magenta", "×"),
    "start-up": ("bright_blue", "○"),
    "restart": ("bright_red", "+"),
    "rerun": ("bright_yellow", "="),
    "other": ("bright_black", "-"),
}
_LOSSES = {"count": "counting", "input_wait": "input wait"}
_FLOPS_PARTS = {
    "useful": ("green", "█"),
    "recompute": ("yellow", "▒"),
    "padding": ("bright_black", "░"),
    "pairs across documents": ("bright_black", "░"),
    "recompute or padding": ("yellow", "▒"),
}
_CURVES: Mapping[str, tuple[str, str, Callable[[float], str], float]] = {
    "training/loss": ("loss", "cyan", short_number, 0.0),
    "perf/mfu_percent": ("MFU", "green", percent, 0.2),
    "perf/step_time": ("step time", "magenta", step_seconds, 0.2),
}
"""Name, colour, how its values are written, and the least range of its axis as a share of the values."""
_CARD_WIDTHS = (20, 20, 20, 21)
"""Of a screen of 120; the last card has the rest."""
_LABEL_WIDTH = 7
_AXIS_WIDTH = 8
_REMARK_WIDTH = 15


class Card(NamedTuple):
    """One number that is to be seen from across the room."""

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
    if card.value is None:
        unknown = line(("unknown", "dim italic"))
        return [name, line(), unknown, line(), remark] if in_large_digits else [name, unknown, remark]
    style = f"bold {card.style}"
    digits = large(card.value) if in_large_digits else None
    if digits is None or len(f"{digits[0]} {card.unit}".rstrip()) > width:
        value = line((card.value, style), (f" {card.unit}" if card.unit else "", card.style))
        return [name, line(), value, line(), remark] if in_large_digits else [name, value, remark]
    *upper, lowest = digits
    return [
        name,
        *(line((row, card.style)) for row in upper),
        line((f"{lowest} {card.unit}".rstrip(), card.style)),
        remark,
    ]


def _utilisation(run: WatchedRun, name: str) -> Card:
    value = run.value(f"perf/{name.lower()}_percent")
    kind = "model" if name == "MFU" else "hardware"
    rate = run.value(f"perf/{kind}_flops_per_second_per_device")
    if value is None:
        why = "FLOPs unknown" if rate is None else flop_rate(rate)
        return Card(name, None, "", why, "")
    style = "red" if value > 105 else "green"
    number = f"{value:.1f}" if value >= 0.05 or value == 0 else f"{value:.2g}"  # a little is not nothing
    return Card(name, number, "%", "" if rate is None else flop_rate(rate), style)


def _loss(run: WatchedRun) -> Card:
    rate = run.value("training/lr")
    remark = "" if rate is None else f"lr {rate:.3g}"
    if run.loss is None:
        return Card("loss", None, "", remark, "")
    step, value = run.loss
    if run.row is not None and step < run.row.step:
        remark = f"at step {step:,}"
    return Card("loss", short_number(value), "", remark, "cyan" if isfinite(value) else "red")


def _tokens(run: WatchedRun) -> Card:
    value, padding = run.value("perf/tokens_per_second"), run.value("perf/padding_percent")
    if value is None:
        samples = run.value("perf/samples_per_second")
        return Card("tokens/s", None, "", "" if samples is None else f"{short_number(samples)} samples/s", "")
    number, unit = scaled_number(value)
    remark = "" if padding is None else f"{100 - padding:.0f} % real"
    return Card("tokens/s", number, unit, remark, "")


def _step_time(run: WatchedRun) -> Card:
    value = run.value("perf/step_time")
    if value is None:
        return Card("step time", None, "", "", "")
    number, unit = step_seconds(value).split(" ")
    factor = 1e3 if unit == "ms" else 1.0
    known = run.step_time_percentiles()
    remark = " ".join(f"{name} {_two_digits(factor * seconds)}" for name, seconds in known.items())
    return Card("step time", number, unit, remark, "magenta")


def _two_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def curves(run: WatchedRun, width: int, height: int) -> list[Text]:
    """Two curves over the run: the loss, and MFU or, where nobody knows it, the step time."""
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
    """Where the time since the first start went: all of it, where the log tells the wall time."""
    spent = run.seconds_spent()
    parts = {
        "compute": max(spent["train"] - spent["input_wait"] - spent["warm_up"], 0.0),
        "input wait": spent["input_wait"],
        "warm-up": spent["warm_up"],
        "eval": spent["eval"],
        "checkpoint": spent["checkpoint"],
        "pause": spent["pause"],
        "counting": spent["count"],
        "start-up": spent["start_up"],
        "restart": spent["restart"],
        "rerun": spent["rerun"],
    }
    parts["other"] = max(spent["wall"] - sum(parts.values()), 0.0)
    whole = sum(parts.values())
    if whole <= 0:
        return [line((f"{'time':<{_LABEL_WIDTH}}", "dim"), ("not logged yet", "dim italic"))]
    return [*_bar("time", parts, _TIME_PARTS, duration(whole), width, in_colour), *_goodput(run, width)]


def _goodput(run: WatchedRun, width: int) -> list[Text]:
    """With what cost most, in the words of the bar; nothing for a log that does not tell."""
    goodput = goodput_of(run.row.ledger.get("seconds", {})) if run.row is not None else None
    if goodput is None:
        return []
    text = line((" " * _LABEL_WIDTH, ""), "goodput ", (percent(100 * goodput.share), "bold"))
    for index, (name, seconds) in enumerate(goodput.largest_losses()):
        share = percent(100 * seconds / goodput.wall_seconds)
        loss = f"{', lost to' if index == 0 else ','} {_LOSSES.get(name) or name.replace('_', '-')} {share}"
        if text.cell_len + len(loss) <= width:
            text.append(loss, "dim")
    return [text]


def flops_bar(run: WatchedRun, width: int, *, in_colour: bool) -> list[Text]:
    """What the FLOPs of the newest window were for."""
    shares = run.flops_shares()
    if not shares:
        return [line((f"{'FLOPs':<{_LABEL_WIDTH}}", "dim"), ("not known", "dim italic"))]
    rate = run.value("perf/hardware_flops_per_second_per_device")
    bar = _bar("FLOPs", shares, _FLOPS_PARTS, "" if rate is None else flop_rate(rate), width, in_colour)
    notes = run.row.notes if run.row is not None else ()
    room = width - _LABEL_WIDTH
    return bar + [line(" " * _LABEL_WIDTH, (_cut(f"not exact: {note}", room), "yellow")) for note in notes[:1]]


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _bar(
    label: str,
    parts: Mapping[str, float],
    looks: Mapping[str, tuple[str, str]],
    remark: str,
    width: int,
    in_colour: bool,
) -> list[Text]:
    end = f"{remark:>{_REMARK_WIDTH}}"
    cells = divide_bar(parts, width - _LABEL_WIDTH - len(end))
    whole = sum(parts.values())
    bar, legend = line((f"{label:<{_LABEL_WIDTH}}", "dim")), []
    for name, (style, pattern) in looks.items():
        if not parts.get(name):
            continue
        bar.append(("█" if in_colour else pattern) * cells[name], style)
        key = "■" if in_colour else pattern
        legend.append(line((f"{key} ", style), f"{name} ", (percent(100 * parts[name] / whole), "bold")))
    bar.append(end, "dim")
    return [bar, *(line(" " * _LABEL_WIDTH) + row for row in flow(legend, width - _LABEL_WIDTH))]
