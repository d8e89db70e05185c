"""The report of a run as a document: its page, its Markdown, and its short form for a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from flopwatch.language import Said
from flopwatch.numbers import UNKNOWN, byte_size, count, duration, energy, flop_prefix, number, percent, step_time
from flopwatch.present import document as doc
from flopwatch.present.json_form import record_fields, to_json
from flopwatch.records.metrics import find_metric
from flopwatch.records.time_uses import USES
from flopwatch.report.run import words
from flopwatch.report.run.charts import KINDS, ChartStyle, line_chart, moment_chart
from flopwatch.report.run.contents import COUNTER_KEYS, MAIN_KEYS, Curve, RunReport, merged
from flopwatch.runs.advice import waterfall_bars
from flopwatch.runs.counters import Counters, counter_sentences
from flopwatch.runs.reading import earlier_run_note
from flopwatch.runs.waterfall import Loss, Waterfall
from flopwatch.stats import in_groups
from flopwatch.text import one_line, plural

_TABLE_ROWS = 100
_MOST_SESSIONS = 50
_MOST_PROVENANCES = 10
_MOST_WARNINGS = 8
_MOST_SETTINGS = 80
_LONGEST = 600
_ALL_ROWS = doc.Most(24, 60, 10_000)
_SHARE = ChartStyle(lambda value: percent(value / 100))
_DATA_RANGE = ChartStyle(number, from_zero=False)


def run_document(report: RunReport) -> doc.Document:
    """The page of a run, its Markdown, and its short form for a terminal.

    Example:
        >>> from flopwatch.present.page import to_page
        >>> from flopwatch.report.run.contents import read_report
        >>> Path("run.html").write_text(to_page(run_document(read_report("outputs"))))  # doctest: +SKIP
    """
    folder = str(report.start.output_dir) if report.start else str(Path(report.log).parent)
    return doc.Document(
        one_line(Path(folder).name or folder, 300),
        [*_first(report), *_sections(report), *_end(report)],
        kind=Said("Run"),
        about=Said("flopwatch run, {time} UTC", time=words.utc(report.starts[0].unix_time))
        if report.starts
        else "flopwatch run",
        lead=[words.state_sentence(report)],
        source=report.log,
        style=(Path(__file__).parent / "run.css").read_text(encoding="utf-8"),
    )


def run_json(report: RunReport) -> str:
    content = record_fields(report)
    content["curves"] = tuple(report.curves.values())
    content["values"] = {key: {"value": value, "step": step} for key, (value, step) in report.values.items()}
    content["starts"] = tuple(start.to_json() for start in report.starts)
    content["provenances"] = tuple(record.to_json() for record in report.provenances)
    content["means"] = {key: curve.mean for key, curve in report.curves.items()}
    return to_json(content)


def _first(report: RunReport) -> Iterator[doc.Part]:
    places = [(name, text) for name, text in words.places(report) if name in ("host", "device", "torch")]
    where = [f"torch {text}" if name == "torch" else text for name, text in places]
    yield doc.Only(("terminal",), [doc.Text(", ".join(where), "soft")])
    if note := earlier_run_note(report.earlier_step):
        yield doc.Text(note, "warn")
    said = report.conclusion
    verdict: list[doc.Part] = [doc.Text(said.sentence, "strong")]
    verdict += [doc.Text(said.reservation)] if said.reservation else []
    verdict += [doc.Text(f"Next: {said.next_step}")] if said.next_step else []
    losses = doc.Items([_loss(loss, said.next_step) for loss in said.losses], is_numbered=True)
    yield doc.Section("", [*verdict, *([doc.Only(("html",), [losses])] if said.losses else [])], tone="verdict")
    yield doc.Section("", [doc.Tiles(list(words.tiles(report)))])
    yield doc.Only(("html",), [doc.Text(text, "warn") for text in words.warnings(report)[:_MOST_WARNINGS]])


def _loss(loss: Loss, said: str) -> doc.Cell:
    advice = f"\nNext: {loss.advice}" if loss.advice and loss.advice not in said else ""
    points = percent(loss.points / 100).replace("%", "points")
    return doc.Cell(f"{loss.name}: {points}.", detail=f"{loss.evidence}{advice}")


def _sections(report: RunReport) -> Iterator[doc.Part]:
    sections = [_time_section(report)]
    if report.waterfall is not None:
        sections.insert(0, _peak_section(report.waterfall, report.conclusion.notes))
    yield doc.Beside(sections)
    more: list[doc.Part] = [_curve_section(report), _event_section(report)]
    if any(start.world_size != 1 for start in report.starts) or any(key.startswith("ranks/") for key in report.values):
        more.append(_rank_section(report))
    if report.counters is not None:
        more.append(_counter_section(report, report.counters))
    more += [doc.Only(("html",), [_memory_section(report)]), _place_section(report), _provenance_section(report)]
    yield doc.Only(("markdown", "html"), more)


def _end(report: RunReport) -> Iterator[doc.Part]:
    """What a terminal says instead of the sections that it leaves out."""
    counts = ", ".join(plural(number, kind) for kind, number in report.moment_counts.items())
    sure = f"{words.exact_sentence(report)} Peak: {words.peak_text(report.provenance)}."
    notices = [moment for moment in report.moments if moment.kind == "notice" and moment.level != "info"]
    said = [doc.Text(one_line(moment.words, 300), "warn") for moment in notices[-3:]]
    hint = doc.Text("The whole report: flopwatch report RUN_DIR --html page.html", "soft")
    yield doc.Only(("terminal",), [doc.Section("", [doc.Text(counts), doc.Text(sure), *said, hint])])


def _peak_section(waterfall: Waterfall, notes: Sequence[str]) -> doc.Section:
    traced = [f"{split.file}: {plural(split.steps, 'step')} of rank {split.rank}" for split in waterfall.traced]
    said = [*notes, *([f"Traces used: {'; '.join(traced)}."] if traced else [])]
    remark = f"in points, of {duration(waterfall.wall_seconds)} wall time"
    bars = replace(waterfall_bars(waterfall), title="From 100 % of the peak down to the MFU", remark=remark)
    below = doc.Only(("markdown", "html"), [doc.Text(note, "note") for note in said])
    return doc.Section("Where the rest of the peak went", [bars, below], "waterfall", "Waterfall")


def _time_section(report: RunReport) -> doc.Section:
    title, link, goodput = "Where the wall time went", "Wall time", report.goodput
    if goodput is None:
        return doc.Section(title, [doc.Text("The log does not have the wall time of the run.")], "time", link)
    wall = goodput.wall_seconds
    if report.times is None:
        lost = [(USES[name].name, seconds) for name, seconds in goodput.largest_losses(99)]
        uses = [(USES["productive"].name, goodput.productive_seconds), *lost]
    else:
        ordered = sorted(report.times.uses, key=lambda use: not USES[use.key].in_steps)
        each = {use.key: f", {step_time(use.seconds_per_step)} per step" for use in ordered if use.seconds_per_step}
        uses = [(f"{use.name}{each.get(use.key, '')}", use.seconds) for use in ordered]
    rows = [(name, duration(seconds), percent(seconds / wall)) for name, seconds in uses]
    bars = [
        doc.Bar(name, 0.0, seconds / wall, f"{time} · {share}", "loss" if place else "rest")
        for place, ((name, seconds), (_, time, share)) in enumerate(zip(uses, rows, strict=True))
    ]
    rows.append(("wall time", duration(wall), "100 %"))
    behind = doc.Grid(("use", *doc.numbers("time", "share of the wall time")), rows, most=_ALL_ROWS)
    drawn = doc.Bars(bars, f"Goodput {percent(goodput.share)}", f"of {duration(goodput.known_seconds)}", behind)
    notes = [doc.Text(note, "note") for note in ([goodput.caveat] if goodput.caveat else [])]
    return doc.Section(title, [drawn, *notes], "time", link)


def _curve_section(report: RunReport) -> doc.Section:
    if not report.curves:
        return doc.Section("Over time", [doc.Text("The log has no logging window yet.")], "curves")
    rate = "perf/tokens_per_second" if "perf/tokens_per_second" in report.curves else "perf/samples_per_second"
    drawings = [
        *_chart(report, "MFU and HFU", ("perf/mfu_percent", "perf/hfu_percent"), _SHARE),
        *_chart(report, "Loss", ("training/loss",), _DATA_RANGE),
        *_chart(report, words.NAMES[rate].capitalize(), (rate,), ChartStyle(count)),
        *_chart(report, "Step time", ("perf/step_time",), ChartStyle(step_time, cuts_spikes=True)),
        *_chart(report, "Input wait, share of the step time", ("perf/input_wait_percent",), _SHARE),
    ]
    for key in report.curves:
        if key not in (*MAIN_KEYS, *COUNTER_KEYS):
            drawings += _chart(report, words.metric_name(key), (key,), _DATA_RANGE)
    levels = {moment.level for moment in report.moments}
    worst = next((level for level in ("error", "warning") if level in levels), "")
    kinds = [kind for kind in KINDS if report.moment_counts.get(kind)]
    marks = doc.Legend([(plural(report.moment_counts[kind], kind), f"{kind} {worst}".strip()) for kind in kinds])
    parts: list[doc.Part] = [
        doc.Text("By step; point at a chart to see the time of day.", "soft"),
        marks,
        doc.Panels(drawings),
    ]
    if report.left_out:
        names = one_line(", ".join(report.left_out), _LONGEST)
        more = plural(len(report.left_out), "more metric")
        parts.append(doc.Text(f"{more} of the user without a chart: {names}.", "note"))
    return doc.Section("Over time", [doc.Only(("html",), parts), doc.Only(("markdown",), [_ranges(report)])], "curves")


def _ranges(report: RunReport) -> doc.Grid:
    rows = []
    for key, curve in report.curves.items():
        low = min((point.low for point in curve.points), default=None)
        high = max((point.high for point in curve.points), default=None)
        values = (low, curve.mean, high, curve.last)
        rows.append((words.metric_name(key), *(words.metric_text(key, value) for value in values)))
    return doc.Grid(("metric", *doc.numbers("least", "mean", "most", "newest")), rows, most=_ALL_ROWS)


def _chart(report: RunReport, title: str, keys: Sequence[str], style: ChartStyle) -> list[doc.Drawing]:
    """A chart with the table behind it; nothing if none of the metrics was logged."""
    curves = [report.curves[key] for key in keys if key in report.curves and report.curves[key].points]
    if not curves or report.first_step is None or report.last_step is None:
        return []
    tables = [_curve_table(curve, style) for curve in curves]
    return [line_chart(title, curves, (report.first_step, report.last_step), report.moments, style, tables)]


def _curve_table(curve: Curve, style: ChartStyle) -> doc.Grid:
    rows = [
        (
            f"{point.first_step:,}–{point.last_step:,}",
            words.utc(point.unix_time),
            *(style.write(value) for value in (point.low, point.mean, point.high)),
        )
        for point in in_groups(curve.points, ceil(len(curve.points) / _TABLE_ROWS), merged)
    ]
    return doc.Grid(doc.numbers("steps", "end (UTC)", "least", "mean", "most"), rows, words.metric_name(curve.key))


def _event_section(report: RunReport) -> doc.Section:
    title = "Evaluations, checkpoints, restarts and notices"
    if not report.moments:
        return doc.Section(title, [doc.Text("The log has none.")], "events", "Events")
    columns = (doc.Head("what"), *doc.numbers("step", "logged at (UTC)", "time"), doc.Head("words"))
    rows = []
    for moment in report.moments:
        first, last = moment.first_step, moment.last_step
        span = f"{first:,}–" if first is not None and first != last else ""
        times = (words.utc(moment.unix_time), duration(moment.seconds))
        where = UNKNOWN if last is None else f"{span}{last:,}"
        rows.append((moment.kind, where, *times, one_line(moment.words, _LONGEST)))
    behind = doc.Grid(columns, rows, most=_ALL_ROWS)
    drawn = moment_chart(report.moments, (report.first_step or 0, report.last_step or 0), behind)
    counts = ", ".join(plural(number, kind) for kind, number in report.moment_counts.items())
    notable = [moment for moment in report.moments if moment.kind in ("restart", "notice")]
    said = [one_line(words.moment_words(moment), _LONGEST) for moment in notable[-40:]]
    parts: list[doc.Part] = [drawn, doc.Only(("markdown",), [doc.Text(f"{counts}."), doc.Items(said)])]
    left_out = sum(report.moment_counts.values()) - len(report.moments)
    if left_out:
        more = f"{left_out:,} more are not shown: the evaluations and checkpoints between these, old notices."
        parts.append(doc.Text(more, "note"))
    notices = [one_line(moment.words, _LONGEST) for moment in reversed(report.moments) if moment.kind == "notice"]
    if notices:
        newest = doc.Section("Newest notices", [doc.Items(list(dict.fromkeys(notices))[:10])])
        parts.append(doc.Only(("html",), [newest]))
    return doc.Section(title, parts, "events", "Events")


def _rank_section(report: RunReport) -> doc.Section:
    world_size = report.start.world_size if report.start else 1
    reporting = report.last("ranks/reporting")
    reported = f"; {reporting:,.0f} reported in the newest window" if reporting is not None else ""
    said = doc.Text(f"{plural(world_size, 'rank')}{reported}.")
    return doc.Section("Ranks", [said, *_value_table(report, "ranks/")], "ranks")


def _memory_section(report: RunReport) -> doc.Section:
    keys = ("perf/memory_allocated_gib", "perf/memory_reserved_gib")
    charts = _chart(report, "Most memory so far", keys, ChartStyle(lambda gib: byte_size(gib * 2**30)))
    nothing = doc.Text("The log has no memory of a device; on a CPU it is not measured.")
    return doc.Section("Memory of the device", [doc.Panels(charts) if charts else nothing], "memory", "Memory")


def _short_flops(flops_per_s: float) -> str:
    """A rate for an axis, whose labels have no room for the unit.

    >>> _short_flops(420e12), _short_flops(0.0)
    ('420 T', '0.00')
    """
    unit, prefix = flop_prefix(flops_per_s)
    return f"{number(flops_per_s / unit)} {prefix}".rstrip()


def _counter_section(report: RunReport, found: Counters) -> doc.Section:
    parts: list[doc.Part] = [doc.Text(sentence) for sentence in counter_sentences(found)]
    both = ("perf/hardware_flops_per_second_per_device", "counters/flops_per_second_per_device")
    drawings = [
        *_chart(report, "FLOP/s of a device, counted and by hardware counters", both, ChartStyle(_short_flops)),
        *_chart(report, "Tensor cores busy, share of the cycles", ("counters/tensor_active",), ChartStyle(percent)),
        *_chart(report, "Energy per token", ("perf/joules_per_token",), ChartStyle(energy)),
    ]
    if drawings:
        about = (
            "Counted FLOP/s are those of the steps. Counters see all that the device does, and the padding of tiles."
        )
        parts += [doc.Panels(drawings), doc.Text(about, "note")]
    title = "Hardware counters and energy"
    return doc.Section(title, [*parts, *_value_table(report, "counters/")], "counters", "Counters")


def _value_table(report: RunReport, group: str = "") -> list[doc.Part]:
    rows = [
        (one_line(key, 120), words.metric_text(key, value), f"{step:,}", find_metric(key).description)
        for key, (value, step) in sorted(report.values.items())
        if key.startswith(group)
    ]
    columns = (doc.Head("metric"), *doc.numbers("newest value", "at step"), doc.Head("what it is"))
    return [doc.Grid(columns, rows, most=_ALL_ROWS)] if rows else []


def _place_section(report: RunReport) -> doc.Section:
    parts: list[doc.Part] = [doc.Facts(words.places(report))]
    if report.start is not None and report.start.config:
        settings = words.setting_texts(dict(list(report.start.config.items())[:_MOST_SETTINGS]))
        rows_of_names = [tuple(doc.Cell(text) for text in pair) for pair in settings]
        grid = doc.Grid(("setting", "value"), rows_of_names)
        listed = doc.Section("Configuration of the monitor", [grid], is_open=False)
        parts.append(doc.Only(("html",), [listed]))
    if len(report.starts) > 1:
        columns: list[doc.Head | str] = [*doc.numbers("session", "start (UTC)", "resumed after step")]
        columns += ["host", "device", "torch", *doc.numbers("world size")]
        rows = []
        for place, start in enumerate(report.starts, start=1):
            named = (words.setting_text(start.environment.get(name)) for name in ("host", "device", "torch"))
            resumed = UNKNOWN if start.resumed_after_step is None else f"{start.resumed_after_step:,}"
            rows.append((f"{place}", words.utc(start.unix_time), resumed, *named, f"{start.world_size:,}"))
        parts.append(doc.Section(f"{len(report.starts):,} sessions", [doc.Grid(columns, rows[-_MOST_SESSIONS:])]))
    return doc.Section("What ran where", parts, "where")


def _provenance_section(report: RunReport) -> doc.Section:
    parts: list[doc.Part] = [
        doc.Text(
            "MFU is the number of model FLOPs of the timed steps, divided by their seconds, by the peak of a device "
            "and by the number of devices. HFU also counts recomputation and padding. Warm-up steps are left out. "
            f"{words.exact_sentence(report)} `flopwatch explain` shows the division for any step."
        )
    ]
    if report.exactness.notes:
        rows = [(note, f"{windows:,}") for note, windows in report.exactness.notes.items()]
        parts.append(
            doc.Section("Why FLOPs are not exact", [doc.Grid(("reason", *doc.numbers("logging windows")), rows)])
        )
    parts += [doc.Facts(words.provenance_facts(record)) for record in report.provenances[-_MOST_PROVENANCES:]]
    if not report.provenances:
        parts.append(doc.Text("The log does not say how FLOPs and peak were found."))
    if values := _value_table(report):
        listed = doc.Section("Every metric with its newest value and its definition", values, is_open=False)
        parts.append(doc.Only(("html",), [listed]))
    return doc.Section("Provenance of the numbers", parts, "provenance", "Provenance")
