"""The short form of a run's report, for a terminal."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flopwatch.numbers import duration, percent
from flopwatch.report.run_page import words
from flopwatch.report.run_page.charts import lost_text
from flopwatch.report.run_page.contents import RunReport
from flopwatch.runs.waterfall.losses import Waterfall
from flopwatch.text import one_line, plural

_BAR_COLUMNS = 30
_MOST_NOTICES = 3


def draw_run(report: RunReport) -> RenderableType:
    """Return the short form for a rich console. `flopwatch why` says more about the waterfall."""
    return Group(*_parts(report))


def _parts(report: RunReport) -> Iterator[RenderableType]:
    yield Text(f"\nRun {words.title_of(report)}", style="bold")
    yield Text(words.state_sentence(report))
    places = [(name, text) for name, text in words.places(report) if name in ("host", "device", "torch")]
    where = [f"torch {text}" if name == "torch" else text for name, text in places]
    yield Text(", ".join(where), style="dim")
    yield Text()
    yield from (Text(f"{text}\n") for text in words.verdict_lines(report))
    yield _pairs((text, value) for value, text in words.tiles(report))
    if report.waterfall is not None:
        yield Text("\nWhere the rest of the peak went", style="bold")
        yield _waterfall(report.waterfall)
    uses = words.time_uses(report)
    if report.goodput is not None:
        wall = report.goodput.wall_seconds
        yield Text(f"\nWhere {duration(wall)} of wall time went", style="bold")
        yield _pairs((name, f"{duration(seconds)}  {percent(seconds / wall)}") for name, seconds in uses)
        yield from (Padding(Text(note), (0, 2)) for note in words.goodput_notes(report))
    yield Text()
    if report.moment_counts:
        yield Text(", ".join(plural(number, kind) for kind, number in report.moment_counts.items()))
    yield Text(f"{words.exact_sentence(report)} Peak: {words.peak_text(report.provenance)}.")
    notices = [moment for moment in report.moments if moment.kind == "notice" and moment.level != "info"]
    yield from (Text(f"! {one_line(moment.words, 300)}", style="yellow") for moment in notices[-_MOST_NOTICES:])
    yield Text("The whole report: flopwatch report RUN_DIR --html page.html", style="dim")


def _pairs(lines: Iterator[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for name, value in lines:
        table.add_row(Text(value, style="bold"), Text(name))
    return Padding(table, (0, 2))


def _waterfall(waterfall: Waterfall) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, show_header=False, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    left = 100.0
    table.add_row("100 %", Text("█" * _BAR_COLUMNS, style="bright_black"), "peak of the devices")
    for loss in waterfall.losses:
        start, end = (round(_BAR_COLUMNS * share / 100) for share in (left - loss.points, left))
        start = min(start, _BAR_COLUMNS - 1)
        bar = " " * start + ("▒" * (end - start) if end > start else "▏")
        table.add_row(lost_text(loss.points), Text(bar, style="yellow"), Text(one_line(loss.name)))
        left -= loss.points
    mfu = waterfall.mfu_percent
    full = "█" * round(_BAR_COLUMNS * min(mfu, 100.0) / 100)
    table.add_row(percent(mfu / 100), Text(full, style="green"), words.WHOLE_MFU)
    return Padding(table, (0, 2))
