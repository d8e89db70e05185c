"""Write the report of a run as one HTML page, which loads no other files. All text from the run is escaped."""

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path

from flopwatch.numbers import UNKNOWN, byte_size, count, duration, number, percent, step_time
from flopwatch.present.svg import esc
from flopwatch.records.metrics import find_metric
from flopwatch.report.html_page.frame import whole_page
from flopwatch.report.run_page import words
from flopwatch.report.run_page.charts import (
    KINDS,
    Bar,
    ChartStyle,
    bar_chart,
    line_chart,
    moment_chart,
    points_text,
    waterfall_svg,
)
from flopwatch.report.run_page.contents import Moment, RunReport
from flopwatch.report.run_page.curves import Curve, in_groups
from flopwatch.report.run_page.tables import behind, facts, in_words, paragraph, table
from flopwatch.runs.waterfall.losses import Loss, Waterfall
from flopwatch.text import one_line, plural

TABLE_ROWS = 100
MOST_SESSIONS = 50
MOST_PROVENANCES = 10
MOST_WARNINGS = 8
MOST_NOTICES = 10
_LONGEST = 600
_SHARE = ChartStyle(lambda value: percent(value / 100))
_DATA_RANGE = ChartStyle(number, from_zero=False)


def run_page(report: RunReport) -> str:
    """The page of a run.

    Example:
        >>> from pathlib import Path
        >>> from flopwatch.report.run_page.collecting import read_report
        >>> Path("run.html").write_text(run_page(read_report("outputs")), encoding="utf-8")  # doctest: +SKIP
    """
    style = (Path(__file__).parent / "run.css").read_text(encoding="utf-8")
    title = f"Run {words.title_of(report)}"
    return whole_page(title, _header(report), _sections(report), report.log, style=style)


def _header(report: RunReport) -> Iterator[str]:
    begun = f", {words.utc(report.starts[0].unix_time)} UTC" if report.starts else ""
    yield f"<header><h1><small>flopwatch run{esc(begun)}</small>{esc(words.title_of(report))}</h1>"
    yield f'<p class="soft">{esc(words.state_sentence(report))}</p></header>'
    links = ["waterfall:Waterfall"] if report.waterfall is not None else []
    links += ["time:Wall time", "curves:Over time", "events:Events"]
    links += ["ranks:Ranks"] if _has_ranks(report) else []
    links += ["memory:Memory", "where:What ran where", "provenance:Provenance"]
    yield "<nav>" + "".join('<a href="#{}">{}</a>'.format(*link.split(":")) for link in links) + "</nav>"


def _sections(report: RunReport) -> Iterator[str]:
    yield from _verdict(report)
    tiles = words.tiles(report)
    drawn = "".join(f'<div class="tile"><b>{esc(value)}</b><span>{esc(text)}</span></div>' for value, text in tiles)
    yield f'<div class="tiles">{drawn}</div>'
    yield from (f'<div class="warn">{esc(text)}</div>' for text in words.warnings(report)[:MOST_WARNINGS])
    yield '<div class="pair">'
    if report.waterfall is not None:
        yield from waterfall_section(report.waterfall, report.conclusion.notes)
    yield from _time_section(report)
    yield "</div>"
    yield from _curve_section(report)
    yield from _event_section(report)
    if _has_ranks(report):
        yield from _rank_section(report)
    yield from _memory_section(report)
    yield from _place_section(report)
    yield from _provenance_section(report)


def _verdict(report: RunReport) -> Iterator[str]:
    """The verdict and what to try next; below them the largest losses, each with what the verdict has not said yet."""
    sentence, *others = words.verdict_lines(report)
    yield f'<section class="verdict"><p><b>{in_words(sentence)}</b></p>' + "".join(
        f"<p>{in_words(text)}</p>" for text in others
    )
    losses = report.conclusion.losses
    if losses:
        yield "<ol>" + "".join(_loss(loss, report.conclusion.next_step) for loss in losses) + "</ol>"
    yield "</section>"


def _loss(loss: Loss, said: str) -> str:
    advice = f" Next: {loss.advice}" if loss.advice and loss.advice != said else ""
    return f"<li><b>{esc(loss.name)}: {points_text(loss.points)}.</b> {in_words(loss.evidence + advice)}</li>"


def _curve_section(report: RunReport) -> Iterator[str]:
    yield '<section id="curves"><h2>Over time</h2>'
    if not report.curves:
        yield "<p>The log has no logging window yet.</p></section>"
        return
    yield '<p class="soft">By step; point at a chart to see the time of day.</p>'
    yield _mark_legend(report)
    yield '<div class="charts">'
    yield from _main_charts(report)
    yield from (_chart(report, words.metric_name(key), (key,), _DATA_RANGE) for key in words.user_keys(report))
    yield "</div>"
    if report.left_out:
        names = one_line(", ".join(report.left_out), _LONGEST)
        yield paragraph(f"{plural(len(report.left_out), 'more metric')} of the user without a chart: {names}.")
    yield "</section>"


def _main_charts(report: RunReport) -> Iterator[str]:
    yield _chart(report, "MFU and HFU", ("perf/mfu_percent", "perf/hfu_percent"), _SHARE)
    yield _chart(report, "Loss", ("training/loss",), _DATA_RANGE)
    rate = "perf/tokens_per_second" if "perf/tokens_per_second" in report.curves else "perf/samples_per_second"
    yield _chart(report, words.NAMES[rate].capitalize(), (rate,), ChartStyle(count))
    yield _chart(report, "Step time", ("perf/step_time",), ChartStyle(step_time, cuts_spikes=True))
    yield _chart(report, "Input wait, share of the step time", ("perf/input_wait_percent",), _SHARE)


def _chart(report: RunReport, title: str, keys: Sequence[str], style: ChartStyle) -> str:
    """A chart with the table behind it; empty if none of the metrics was logged."""
    curves = [report.curves[key] for key in keys if key in report.curves and report.curves[key].points]
    if not curves or report.first_step is None or report.last_step is None:
        return ""
    drawn = line_chart(title, curves, (report.first_step, report.last_step), report.moments, style)
    return f'<div class="chart">{drawn}{behind("".join(_curve_table(curve, style) for curve in curves))}</div>'


def _curve_table(curve: Curve, style: ChartStyle) -> str:
    points = in_groups(list(curve.points), ceil(len(curve.points) / TABLE_ROWS))
    rows = (
        (
            f"{point.first_step:,}–{point.last_step:,}",
            words.utc(point.unix_time),
            *(style.write(value) for value in (point.low, point.mean, point.high)),
        )
        for point in points
    )
    return table(("steps", "end (UTC)", "least", "mean", "most"), rows, "nnnnn", words.metric_name(curve.key))


def _mark_legend(report: RunReport) -> str:
    shown = [kind for kind in KINDS if report.moment_counts.get(kind)]
    levels = {moment.level for moment in report.moments}
    worst = next((level for level in ("error", "warning") if level in levels), "")
    items = "".join(
        f'<span><i class="{kind} {worst}"></i>{plural(report.moment_counts[kind], kind)}</span>' for kind in shown
    )
    return f'<div class="marks">{items}</div>' if items else ""


def waterfall_section(waterfall: Waterfall, notes: Sequence[str]) -> Iterator[str]:
    yield '<section id="waterfall"><h2>Where the rest of the peak went</h2>'
    rows = [
        (loss.name, points_text(loss.points), duration(loss.seconds), loss.evidence, loss.advice)
        for loss in waterfall.losses
    ]
    rows.append((words.WHOLE_MFU, percent(waterfall.mfu_percent / 100), "", "", ""))
    losses = table(("loss", "points of MFU", "time", "evidence", "what to try"), rows, "tnntt")
    yield f'<div class="chart one">{waterfall_svg(waterfall)}{behind(losses)}</div>'
    traced = [f"{split.file}: {plural(split.steps, 'step')} of rank {split.rank}" for split in waterfall.traced]
    yield from map(paragraph, [*notes, *([f"Traces used: {'; '.join(traced)}."] if traced else [])])
    yield "</section>"


def _time_section(report: RunReport) -> Iterator[str]:
    yield '<section id="time"><h2>Where the wall time went</h2>'
    if report.goodput is None:
        yield "<p>The log does not have the wall time of the run.</p></section>"
        return
    wall = report.goodput.wall_seconds
    rows = [(name, duration(seconds), percent(seconds / wall)) for name, seconds in words.time_uses(report)]
    bars = [
        Bar(name, 0.0, 100 * seconds / wall, f"{time} · {share}", "rest" if place == 0 else "loss")
        for place, ((name, seconds), (_, time, share)) in enumerate(zip(words.time_uses(report), rows, strict=True))
    ]
    drawn = bar_chart(f"Goodput {percent(report.goodput.share)}", f"of {duration(report.goodput.known_seconds)}", bars)
    uses = table(("use", "time", "share of the wall time"), [*rows, ("wall time", duration(wall), "100 %")], "tnn")
    yield f'<div class="chart one">{drawn}{behind(uses)}</div>'
    yield from map(paragraph, words.goodput_notes(report))
    yield "</section>"


def _event_section(report: RunReport) -> Iterator[str]:
    yield '<section id="events"><h2>Evaluations, checkpoints, restarts and notices</h2>'
    if not report.moments:
        yield "<p>The log has none.</p></section>"
        return
    drawn = moment_chart(report.moments, (report.first_step or 0, report.last_step or 0))
    heads = ("what", "step", "logged at (UTC)", "time", "words")
    yield f'<div class="chart one">{drawn}{behind(table(heads, map(_event_cells, report.moments), "tnnnt"))}</div>'
    left_out = sum(report.moment_counts.values()) - len(report.moments)
    if left_out:
        yield paragraph(f"{left_out:,} more are not shown: the evaluations and checkpoints between these, old notices.")
    notices = [one_line(moment.words, _LONGEST) for moment in reversed(report.moments) if moment.kind == "notice"]
    if notices:
        newest = list(dict.fromkeys(notices))[:MOST_NOTICES]
        yield "<h3>Newest notices</h3><ul>" + "".join(f"<li>{esc(text)}</li>" for text in newest) + "</ul>"
    yield "</section>"


def _event_cells(moment: Moment) -> tuple[str, ...]:
    first, last = moment.first_step, moment.last_step
    span = f"{first:,}–" if first is not None and first != last else ""
    where = UNKNOWN if last is None else f"{span}{last:,}"
    times = (words.utc(moment.unix_time), duration(moment.seconds))
    return (moment.kind, where, *times, one_line(moment.words, _LONGEST))


def _has_ranks(report: RunReport) -> bool:
    return any(start.world_size != 1 for start in report.starts) or any(map(_is_of_ranks, report.values))


def _is_of_ranks(key: str) -> bool:
    return key.startswith("ranks/")


def _rank_section(report: RunReport) -> Iterator[str]:
    world_size = report.start.world_size if report.start else 1
    reporting = report.last("ranks/reporting")
    reported = f"; {reporting:,.0f} reported in the newest window" if reporting is not None else ""
    yield f'<section id="ranks"><h2>Ranks</h2><p>{plural(world_size, "rank")}{reported}.</p>'
    if report.stragglers:
        counts = report.stragglers.items()
        rows = [(f"{rank:,}", f"{windows:,}", percent(windows / report.windows)) for rank, windows in counts]
        yield table(("straggler: rank", "logging windows", "share"), rows, "nnn")
    else:
        yield "<p>No rank was found to be a straggler.</p>"
    waiting = "Waiting for other ranks, share of the step time, mean over ranks"
    yield f'<div class="charts">{_chart(report, waiting, ("ranks/waiting_percent",), _SHARE)}</div>'
    yield _value_table(report, [key for key in report.values if _is_of_ranks(key)])
    yield "</section>"


def _memory_section(report: RunReport) -> Iterator[str]:
    yield '<section id="memory"><h2>Memory of the device</h2>'
    keys = ("perf/memory_allocated_gib", "perf/memory_reserved_gib")
    chart = _chart(report, "Most memory so far", keys, ChartStyle(lambda gib: byte_size(gib * 2**30)))
    nothing = "<p>The log has no memory of a device; on a CPU it is not measured.</p>"
    yield f'<div class="charts">{chart}</div></section>' if chart else f"{nothing}</section>"


def _value_table(report: RunReport, keys: Sequence[str]) -> str:
    rows = [
        (one_line(key, 120), words.metric_text(key, value), f"{step:,}", find_metric(key).description)
        for key, (value, step) in sorted(report.values.items())
        if key in keys
    ]
    return table(("metric", "newest value", "at step", "what it is"), rows, "tnnt") if rows else ""


def _place_section(report: RunReport) -> Iterator[str]:
    yield '<section id="where"><h2>What ran where</h2>'
    yield facts(words.places(report))
    if settings := words.settings(report.start):
        listed = table(("setting", "value"), settings, "tt")
        yield f"<details><summary>Configuration of the monitor</summary>{listed}</details>"
    if len(report.starts) > 1:
        heads = ("session", "start (UTC)", "resumed after step", "host", "device", "torch", "world size")
        yield f"<h3>{len(report.starts):,} sessions</h3>" + table(heads, _sessions(report), "nnntttn")
    yield "</section>"


def _sessions(report: RunReport) -> Iterator[tuple[str, ...]]:
    numbered = list(enumerate(report.starts, start=1))
    for place, start in numbered[-MOST_SESSIONS:]:
        named = (words.setting_text(start.environment.get(name)) for name in ("host", "device", "torch"))
        resumed = UNKNOWN if start.resumed_after_step is None else f"{start.resumed_after_step:,}"
        yield (str(place), words.utc(start.unix_time), resumed, *named, f"{start.world_size:,}")


def _provenance_section(report: RunReport) -> Iterator[str]:
    yield '<section id="provenance"><h2>Provenance of the numbers</h2>'
    yield (
        "<p>MFU is the number of model FLOPs of the timed steps, divided by their seconds, by the peak of a device and "
        "by the number of devices. HFU also counts recomputation and padding. Warm-up steps are left out. "
        f"{esc(words.exact_sentence(report))} <code>flopwatch explain</code> shows the division for any step.</p>"
    )
    if report.exactness.notes:
        rows = [(note, f"{windows:,}") for note, windows in report.exactness.notes.items()]
        yield "<h3>Why FLOPs are not exact</h3>" + table(("reason", "logging windows"), rows, "tn")
    yield from (facts(words.provenance_facts(record)) for record in report.provenances[-MOST_PROVENANCES:])
    if not report.provenances:
        yield "<p>The log does not say how FLOPs and peak were found.</p>"
    if values := _value_table(report, list(report.values)):
        yield f"<details><summary>Every metric with its newest value and its definition</summary>{values}</details>"
    yield "</section>"
