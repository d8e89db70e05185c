"""Write the report of a run as one HTML page, which loads no other files. All text from the run is escaped."""

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from pathlib import Path

from flopwatch.number_format import UNKNOWN, byte_size, count, duration, number, percent, plural, step_time
from flopwatch.records.metrics import find_metric
from flopwatch.records.reading import one_line
from flopwatch.report.html_page.frame import whole_page
from flopwatch.report.html_page.svg import esc
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
from flopwatch.report.run_page.contents import RunReport
from flopwatch.report.run_page.curves import Curve, in_groups
from flopwatch.runs.waterfall import Waterfall

TABLE_ROWS = 100
MOST_SESSIONS = 50
MOST_PROVENANCES = 10
MOST_WARNINGS = 8


def run_page(report: RunReport) -> str:
    """The page of a run.

    Example:
        >>> from pathlib import Path
        >>> from flopwatch.report.run_page.contents import read_report
        >>> Path("run.html").write_text(run_page(read_report("outputs")), encoding="utf-8")  # doctest: +SKIP
    """
    style = (Path(__file__).parent / "run.css").read_text(encoding="utf-8")
    title = f"Run {words.title_of(report)}"
    return whole_page(title, _header(report), _sections(report), report.log, style=style)


def _header(report: RunReport) -> Iterator[str]:
    begun = f", {words.utc(report.starts[0].unix_time)} UTC" if report.starts else ""
    yield f"<header><h1><small>flopwatch run{esc(begun)}</small>{esc(words.title_of(report))}</h1>"
    yield f'<p class="soft">{esc(words.state_sentence(report))}</p></header>'
    links = ["curves:Over time", "waterfall:Waterfall", "time:Wall time", "events:Events"]
    links += ["ranks:Ranks"] if _has_ranks(report) else []
    links += ["memory:Memory", "where:What ran where", "provenance:Provenance"]
    yield "<nav>" + "".join('<a href="#{}">{}</a>'.format(*link.split(":")) for link in links) + "</nav>"


def _sections(report: RunReport) -> Iterator[str]:
    tiles = "".join(
        f'<div class="tile"><b>{esc(value)}</b><span>{esc(text)}</span></div>' for value, text in words.tiles(report)
    )
    yield f'<div class="tiles">{tiles}</div>'
    yield from _warnings(report)
    yield from _curve_section(report)
    yield from waterfall_section(report.waterfall)
    yield from _time_section(report)
    yield from _event_section(report)
    yield from _rank_section(report)
    yield from _memory_section(report)
    yield from _place_section(report)
    yield from _provenance_section(report)


def _warnings(report: RunReport) -> Iterator[str]:
    found = []
    if report.torn_lines:
        found.append(f"{plural(report.torn_lines, 'line')} of the log could not be read; the report does without them.")
    for curve in report.curves.values():
        if curve.broken_windows:
            where = (
                f"{plural(curve.broken_windows, 'logging window')}, first in the one from step {curve.broken_at_step:,}"
            )
            found.append(f"{words.metric_name(curve.key)} was nan or infinite in {where}.")
    if report.exactness.inexact_windows:
        found.append(words.exact_sentence(report) + " The reasons are under Provenance.")
    yield from (f'<div class="warn">{esc(text)}</div>' for text in found[:MOST_WARNINGS])


def _curve_section(report: RunReport) -> Iterator[str]:
    yield '<section id="curves"><h2>Over time</h2>'
    if not report.curves:
        yield "<p>The log has no logging window yet.</p></section>"
        return
    yield '<p class="soft">By step; point at a chart to see the time of day. The pale area reaches from the least to the largest value.</p>'
    yield _mark_legend(report)
    yield '<div class="charts">'
    yield from _main_charts(report)
    for key in report.curves:
        if key not in words.NAMES or key in ("training/lr", "training/grad_norm"):
            yield _chart(report, words.metric_name(key), (key,), _plain_style(key))
    yield "</div>"
    if report.left_out:
        yield f'<p class="soft small">{esc(plural(len(report.left_out), "more metric"))} of the user without a chart: {esc(one_line(", ".join(report.left_out), 600))}.</p>'
    yield "</section>"


def _main_charts(report: RunReport) -> Iterator[str]:
    share = ChartStyle(lambda value: percent(value / 100))
    yield _chart(report, "MFU and HFU", ("perf/mfu_percent", "perf/hfu_percent"), share)
    yield _chart(report, "Loss", ("training/loss",), ChartStyle(lambda value: number(value, 3), from_zero=False))
    rate = "perf/tokens_per_second" if "perf/tokens_per_second" in report.curves else "perf/samples_per_second"
    yield _chart(report, words.NAMES[rate].capitalize(), (rate,), ChartStyle(count))
    yield _chart(report, "Step time", ("perf/step_time",), ChartStyle(step_time, cuts_spikes=True))
    yield _chart(report, "Input wait, share of the step time", ("perf/input_wait_percent",), share)


def _plain_style(key: str) -> ChartStyle:
    return ChartStyle(lambda value: number(value, 3), from_zero=False)


def _chart(report: RunReport, title: str, keys: Sequence[str], style: ChartStyle) -> str:
    """A chart with the table behind it; empty if none of the metrics was logged."""
    curves = [report.curves[key] for key in keys if key in report.curves and report.curves[key].points]
    if not curves or report.first_step is None or report.last_step is None:
        return ""
    drawn = line_chart(title, curves, (report.first_step, report.last_step), report.moments, style)
    return f'<div class="chart">{drawn}{_behind("".join(_curve_table(curve, style) for curve in curves))}</div>'


def _behind(tables: str) -> str:
    return f'<details class="behind"><summary>The numbers as a table</summary>{tables}</details>'


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
    return table(("steps", "end (UTC)", "least", "mean", "most"), rows, words.metric_name(curve.key), texts=0)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", *, texts: int = 1) -> str:
    """A table that scrolls by itself on a narrow screen; the first `texts` columns are aligned left."""
    sides = ["" if place < texts else ' class="n"' for place in range(len(heads))]
    head = "".join(f'<th scope="col"{side}>{esc(name)}</th>' for name, side in zip(heads, sides, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{side or ' class=text'}>{esc(cell)}</td>" for cell, side in zip(row, sides, strict=True))
        + "</tr>"
        for row in rows
    )
    title = f"<caption>{esc(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _mark_legend(report: RunReport) -> str:
    shown = [kind for kind in KINDS if report.moment_counts.get(kind)]
    items = "".join(f'<span><i class="{kind}"></i>{plural(report.moment_counts[kind], kind)}</span>' for kind in shown)
    return f'<div class="marks">{items}</div>' if items else ""


def waterfall_section(waterfall: Waterfall | None) -> Iterator[str]:
    yield '<section id="waterfall"><h2>Where the rest of the peak went</h2>'
    if waterfall is None:
        yield f"<p>{words.NO_WATERFALL}</p></section>"
        return
    rows = [
        (loss.name, points_text(loss.points), duration(loss.seconds), loss.evidence, loss.advice)
        for loss in waterfall.losses
    ]
    rows.append(("MFU of the whole run", percent(waterfall.mfu_percent / 100), "", "", ""))
    heads = ("loss", "points of MFU", "time", "evidence", "what to try")
    yield f'<div class="chart one">{waterfall_svg(waterfall)}{_behind(_loss_table(heads, rows))}</div>'
    traced = [f"{split.file}: {plural(split.steps, 'step')} of rank {split.rank}" for split in waterfall.traced]
    notes = [*waterfall.notes, *([f"Traces used: {'; '.join(traced)}."] if traced else [])]
    yield from (f'<p class="soft small">{esc(note)}</p>' for note in notes)
    yield "</section>"


def _loss_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{esc(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><td class="text">{esc(row[0])}</td><td class="n">{esc(row[1])}</td><td class="n">{esc(row[2])}</td>'
        f'<td class="text">{esc(row[3])}</td><td class="text">{esc(row[4])}</td></tr>'
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _time_section(report: RunReport) -> Iterator[str]:
    yield '<section id="time"><h2>Where the wall time went</h2>'
    uses = words.time_uses(report)
    if report.goodput is None:
        yield "<p>The log does not have the wall time of the run.</p></section>"
        return
    wall = report.goodput.wall_seconds
    bars = [
        Bar(
            name,
            0.0,
            100 * seconds / wall,
            f"{duration(seconds)} · {percent(seconds / wall)}",
            "k3" if place == 0 else "k2",
        )
        for place, (name, seconds) in enumerate(uses)
    ]
    title = f"Goodput {percent(report.goodput.share)}"
    rows = [(name, duration(seconds), percent(seconds / wall)) for name, seconds in uses]
    behind = _behind(table(("use", "time", "share of the wall time"), [*rows, ("wall time", duration(wall), "100 %")]))
    yield f'<div class="chart one">{bar_chart(title, f"of {duration(wall)} wall time", bars)}{behind}</div></section>'


def _event_section(report: RunReport) -> Iterator[str]:
    yield '<section id="events"><h2>Evaluations, checkpoints, restarts and notices</h2>'
    if not report.moments or report.first_step is None or report.last_step is None:
        yield "<p>The log has none.</p></section>"
        return
    rows = [
        (moment.kind, _where(moment.first_step, moment.last_step), words.utc(moment.unix_time), duration(moment.seconds),
         one_line(moment.words, 600))
        for moment in report.moments
    ]  # fmt: skip
    heads = ("what", "step", "logged at (UTC)", "time", "words")
    behind = _behind(_event_table(heads, rows))
    yield f'<div class="chart one">{moment_chart(report.moments, (report.first_step, report.last_step))}{behind}</div>'
    left_out = sum(report.moment_counts.values()) - len(report.moments)
    if left_out:
        yield f'<p class="soft small">{left_out:,} more are not shown, evenly spaced among the others.</p>'
    yield from _notices(report)
    yield "</section>"


def _notices(report: RunReport) -> Iterator[str]:
    notices = [moment for moment in report.moments if moment.kind == "notice"]
    if notices:
        latest = dict.fromkeys(one_line(moment.words, 600) for moment in reversed(notices))
        yield "<h3>Newest notices</h3><ul>" + "".join(f"<li>{esc(text)}</li>" for text in list(latest)[:10]) + "</ul>"


def _event_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return table(heads, rows, texts=len(heads))


def _where(first: int | None, last: int | None) -> str:
    if last is None:
        return UNKNOWN
    return f"{last:,}" if first is None or first == last else f"{first:,}–{last:,}"


def _has_ranks(report: RunReport) -> bool:
    return any(start.world_size != 1 for start in report.starts) or any(
        key.startswith("ranks/") for key in report.values
    )


def _rank_section(report: RunReport) -> Iterator[str]:
    if not _has_ranks(report):
        return
    world_size = report.start.world_size if report.start else 1
    reporting = report.last("ranks/reporting")
    reported = f"; {reporting:,.0f} reported in the newest window" if reporting is not None else ""
    yield f'<section id="ranks"><h2>Ranks</h2><p>{plural(world_size, "rank")}{reported}.</p>'
    if report.stragglers:
        rows = [
            (str(rank), f"{windows:,}", percent(windows / report.windows))
            for rank, windows in report.stragglers.items()
        ]
        yield table(("straggler: rank", "logging windows", "share"), rows)
    else:
        yield "<p>No rank was found to be a straggler.</p>"
    share = ChartStyle(lambda value: percent(value / 100))
    yield f'<div class="charts">{_chart(report, "Waiting for other ranks, share of the step time, mean over ranks", ("ranks/waiting_percent",), share)}</div>'
    yield _value_table(report, "ranks/")
    yield "</section>"


def _memory_section(report: RunReport) -> Iterator[str]:
    yield '<section id="memory"><h2>Memory of the device</h2>'
    keys = ("perf/memory_allocated_gib", "perf/memory_reserved_gib")
    chart = _chart(report, "Most memory so far", keys, ChartStyle(lambda value: byte_size(value * 2**30)))
    yield (
        f'<div class="charts">{chart}</div>'
        if chart
        else "<p>The log has no memory of a device; on a CPU it is not measured.</p>"
    )
    yield "</section>"


def _value_table(report: RunReport, prefix: str = "") -> str:
    rows = [
        (key, words.metric_text(key, value), f"{step:,}", find_metric(key).description)
        for key, (value, step) in sorted(report.values.items())
        if key.startswith(prefix)
    ]
    head = "".join(f'<th scope="col">{name}</th>' for name in ("metric", "newest value", "at step", "what it is"))
    body = "".join(
        f'<tr><td class="text">{esc(one_line(key, 120))}</td><td class="n">{esc(value)}</td><td class="n">{step}</td>'
        f'<td class="text">{esc(text)}</td></tr>'
        for key, value, step, text in rows
    )
    if not rows:
        return ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _place_section(report: RunReport) -> Iterator[str]:
    yield '<section id="where"><h2>What ran where</h2>'
    yield _facts(words.places(report))
    settings = words.settings(report.start)
    if settings:
        rows = [(name, text) for name, text in settings]
        yield f"<details><summary>Configuration of the monitor</summary>{table(('setting', 'value'), rows, texts=2)}</details>"
    if len(report.starts) > 1:
        yield f"<h3>{len(report.starts):,} sessions</h3>"
        yield table(
            ("session", "start (UTC)", "resumed after step", "host", "device", "torch", "world size"),
            _sessions(report),
            texts=7,
        )
    yield "</section>"


def _sessions(report: RunReport) -> Iterator[tuple[str, ...]]:
    numbered = list(enumerate(report.starts, start=1))
    for place, start in numbered[-MOST_SESSIONS:]:
        named = (words.setting_text(start.environment.get(name)) for name in ("host", "device", "torch"))
        resumed = UNKNOWN if start.resumed_after_step is None else f"{start.resumed_after_step:,}"
        yield (str(place), words.utc(start.unix_time), resumed, *named, f"{start.world_size:,}")


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    return '<dl class="facts">' + "".join(f"<dt>{esc(name)}</dt><dd>{esc(text)}</dd>" for name, text in pairs) + "</dl>"


def _provenance_section(report: RunReport) -> Iterator[str]:
    yield '<section id="provenance"><h2>Provenance of the numbers</h2>'
    yield (
        "<p>MFU is the model FLOPs of the timed steps, divided by their seconds, the peak of a device and the number of "
        "devices. HFU also counts recomputation and padding. Warm-up steps are left out. "
        f"{esc(words.exact_sentence(report))} <code>flopwatch explain</code> shows the division for any step.</p>"
    )
    if report.exactness.notes:
        rows = [(note, f"{windows:,}") for note, windows in report.exactness.notes.items()]
        yield "<h3>Why FLOPs are not exact</h3>" + table(("reason", "logging windows"), rows)
    for record in report.provenances[-MOST_PROVENANCES:]:
        yield _facts(words.provenance_facts(record))
    if not report.provenances:
        yield "<p>The log does not say how FLOPs and peak were found.</p>"
    values = _value_table(report)
    if values:
        yield f"<details><summary>Every metric with its newest value and its definition</summary>{values}</details>"
    yield "</section>"
