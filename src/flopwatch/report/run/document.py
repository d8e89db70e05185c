"""The report of a run as a document: its page, its Markdown, and its short form for a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flopwatch.language import ENGLISH, Said, counted, language, semicolons, sentences
from flopwatch.numbers import duration, percent
from flopwatch.present import document as doc
from flopwatch.present.json_form import record_fields, to_json
from flopwatch.records.metrics import find_metric
from flopwatch.report.run import words
from flopwatch.report.run.charts import charts_of
from flopwatch.report.run.contents import RunReport
from flopwatch.runs.advice import uses_table, waterfall_bars
from flopwatch.runs.counters import counter_sentences
from flopwatch.runs.reading import earlier_run_note
from flopwatch.runs.waterfall import Loss, Waterfall
from flopwatch.text import one_line

_MOST_WARNINGS = 8
_LONGEST = 600
_ALL_ROWS = doc.Most(24, 60, 10_000)


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
    verdict += [doc.Text(Said("Next: {step}", step=said.next_step))] if said.next_step else []
    losses = doc.Items([_loss(loss, said.next_step) for loss in said.losses], is_numbered=True)
    yield doc.Section("", [*verdict, *([doc.Only(("html",), [losses])] if said.losses else [])], tone="verdict")
    caveat = [doc.Text(report.goodput.caveat, "note")] if report.goodput and report.goodput.caveat else []
    yield doc.Section("", [doc.Tiles(list(words.tiles(report))), *caveat])
    yield doc.Only(("html",), [doc.Text(text, "warn") for text in words.warnings(report)[:_MOST_WARNINGS]])


def _loss(loss: Loss, said: str) -> doc.Cell:
    points = Said("{points} points", points=percent(loss.points / 100).removesuffix(" %"))
    more = Said("{evidence}\nNext: {advice}", evidence=loss.evidence, advice=loss.advice)
    has_more = loss.advice and loss.advice not in said
    name = Said("{what}: {facts}", what=loss.name, facts=points)
    return doc.Cell(Said("{sentence}.", sentence=name), detail=more if has_more else loss.evidence)


def _sections(report: RunReport) -> Iterator[doc.Part]:
    yield _loss_section(report)
    where = doc.Section(Said("What ran where"), [doc.Facts(words.places(report))], "where")
    said = [*_curves(report), *_notices(report), where, _provenance_section(report), *_metrics(report)]
    yield doc.Only(("markdown", "html"), said)


def _end(report: RunReport) -> Iterator[doc.Part]:
    """What a terminal says instead of the sections that it leaves out."""
    peak = Said("Peak: {peak}.", peak=words.peak_text(report.provenance))
    sure = sentences([words.exact_sentence(report), peak])
    notices = [
        Said("{code}: {notice}", code=notice.code, notice=notice.message)
        for notice in report.notices
        if notice.level != "info"
    ]
    said = [doc.Text(words.shortened(notice, 300), "warn") for notice in notices[-3:]]
    hint = doc.Text(Said("The whole report: {command}", command="flopwatch report RUN_DIR --html page.html"), "soft")
    yield doc.Only(("terminal",), [doc.Section("", [doc.Text(sure), *said, hint])])


def _loss_section(report: RunReport) -> doc.Section:
    if report.waterfall is not None:
        return _peak_section(report.waterfall, report.conclusion.notes)
    title, link, times = Said("Where the wall time went"), Said("Wall time"), report.times
    if times is None:
        return doc.Section(title, [doc.Text(Said("The log does not have the wall time of the run."))], "time", link)
    return doc.Section(title, [uses_table(times)], "time", link)


def _peak_section(waterfall: Waterfall, notes: Sequence[str]) -> doc.Section:
    traced = [
        Said(
            "{file}: {steps} of rank {rank}",
            file=split.file,
            steps=counted(split.steps, "{n} step", "{n} steps"),
            rank=split.rank,
        )
        for split in waterfall.traced
    ]
    said = [*notes, *([Said("Traces used: {traces}.", traces=semicolons(traced))] if traced else [])]
    remark = Said("in points, of {time} wall time", time=duration(waterfall.wall_seconds))
    bars = replace(waterfall_bars(waterfall), title=Said("From 100 % of the peak down to the MFU"), remark=remark)
    below = doc.Only(("markdown", "html"), [doc.Text(note, "note") for note in said])
    return doc.Section(Said("Where the rest of the peak went"), [bars, below], "waterfall", Said("Waterfall"))


def _curves(report: RunReport) -> Iterator[doc.Part]:
    if not report.curves:
        yield doc.Section(Said("Over time"), [doc.Text(Said("The log has no logging window yet."))], "curves")
        return
    said = [doc.Text(sentence) for sentence in (counter_sentences(report.counters) if report.counters else ())]
    charts = doc.Only(("html",), [doc.Panels(list(charts_of(report)))])
    yield doc.Section(Said("Over time"), [charts, *said], "curves")


def _notices(report: RunReport) -> Iterator[doc.Part]:
    if said := dict.fromkeys(words.shortened(text, _LONGEST) for text in words.happened(report)):
        newest_first = doc.Items(list(said), most=doc.Most(0, 40, 40), more=Said("older ones"))
        yield doc.Section(Said("Restarts and notices"), [newest_first], "events", Said("Notices"))


def _metrics(report: RunReport) -> Iterator[doc.Part]:
    """Every metric: the range of those with a curve, and the newest value."""
    columns: list[doc.Head | str] = [Said("metric"), *doc.numbers("least", "mean", "most", "newest", "at step")]
    columns += ["what it is"] if language() == ENGLISH else []  # the definitions are those of the docs
    rows = []
    for key in [*report.curves, *sorted(set(report.values) - set(report.curves))]:
        curve, (newest, step) = report.curves.get(key), report.values.get(key, (None, None))
        points = curve.points if curve else ()
        least, most = min((one.low for one in points), default=None), max((one.high for one in points), default=None)
        values = (least, curve.mean if curve else None, most, newest)
        texts = ("" if value is None else words.metric_text(key, value) for value in values)
        row = (one_line(key, 120), *texts, "" if step is None else f"{step:,}", find_metric(key).description)
        rows.append(row[: len(columns)])
    if rows:
        table = doc.Grid(columns, rows, most=_ALL_ROWS)
        yield doc.Section(Said("Every metric"), [table], "metrics", Said("Metrics"), is_open=False)


def _provenance_section(report: RunReport) -> doc.Section:
    parts: list[doc.Part] = [
        doc.Text(
            sentences(
                [
                    Said(
                        "MFU is the number of model FLOPs of the timed steps, divided by their seconds, by the peak "
                        "of a device and by the number of devices. HFU also counts recomputation and padding. Warm-up "
                        "steps are left out."
                    ),
                    words.exact_sentence(report),
                    Said("`flopwatch explain` shows the division for any step."),
                ]
            )
        )
    ]
    if report.provenance is None:
        parts.append(doc.Text(Said("The log does not say how FLOPs and peak were found.")))
    else:
        parts.append(doc.Facts(words.provenance_facts(report.provenance)))
    return doc.Section(Said("Provenance of the numbers"), parts, "provenance", Said("Provenance"))
