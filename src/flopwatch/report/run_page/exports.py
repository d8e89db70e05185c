"""Write the report of a run as JSON or Markdown. Numbers are rounded only in Markdown, which is for people."""

from collections.abc import Iterator
from dataclasses import asdict

from flopwatch.numbers import duration, percent
from flopwatch.present.markdown import escaped
from flopwatch.report.exports import json_document, markdown_table, record_fields
from flopwatch.report.run_page import words
from flopwatch.report.run_page.charts import lost_text, moment_words
from flopwatch.report.run_page.contents import RunReport
from flopwatch.runs.waterfall.losses import Waterfall
from flopwatch.text import one_line, plural

MOST_MOMENTS = 40
MOST_PROVENANCES = 5


def run_json(report: RunReport) -> str:
    """Write everything that the page shows as JSON."""
    content = record_fields(report)
    content["waterfall"] = asdict(report.waterfall) if report.waterfall is not None else None
    content["times"] = None if report.times is None else report.times.to_json()
    content["conclusion"] = asdict(report.conclusion)
    content["curves"] = tuple(report.curves.values())
    content["values"] = {key: {"value": value, "step": step} for key, (value, step) in report.values.items()}
    content["starts"] = tuple(start.to_json() for start in report.starts)
    content["provenances"] = tuple(record.to_json() for record in report.provenances)
    content["means"] = {key: curve.mean for key, curve in report.curves.items()}
    return json_document(content)


def run_markdown(report: RunReport) -> str:
    """Write the report as Markdown. Text that comes from the run is escaped, so that it cannot become markup."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: RunReport) -> Iterator[str]:
    yield f"## Run {escaped(words.title_of(report))}"
    yield f"\n{escaped(words.state_sentence(report))}\n"
    yield from (f"{escaped(text)}\n" for text in words.verdict_lines(report))
    yield from markdown_table(("", ""), ((text, f"**{escaped(value)}**") for value, text in words.tiles(report)), "l")
    if report.waterfall is not None:
        yield "### Where the rest of the peak went\n"
        yield from _waterfall(report.waterfall)
    yield "### Where the wall time went\n"
    yield from _times(report)
    yield from _curves(report)
    yield from _moments(report)
    yield "### What ran where\n"
    yield from markdown_table(("", ""), ((escaped(name), escaped(text)) for name, text in words.places(report)), "ll")
    yield "### Provenance of the numbers\n"
    yield f"{escaped(words.exact_sentence(report))}\n"
    yield from (f"- {plural(windows, 'window')}: {escaped(note)}" for note, windows in report.exactness.notes.items())
    for record in report.provenances[-MOST_PROVENANCES:]:
        yield ""
        facts = words.provenance_facts(record)
        yield from markdown_table(("", ""), ((name, escaped(text)) for name, text in facts), "ll")


def _waterfall(waterfall: Waterfall) -> Iterator[str]:
    rows = [("peak of the devices", "100 %", "", "", "")]
    rows += [
        (
            escaped(loss.name),
            lost_text(loss.points),
            duration(loss.seconds),
            escaped(loss.evidence),
            escaped(loss.advice),
        )
        for loss in waterfall.losses
    ]
    rows.append((f"**{words.WHOLE_MFU}**", f"**{percent(waterfall.mfu_percent / 100)}**", "", "", ""))
    yield from markdown_table(("loss", "points of MFU", "time", "evidence", "what to try"), rows, "l11ll")
    yield from (f"{escaped(note)}\n" for note in waterfall.notes)


def _times(report: RunReport) -> Iterator[str]:
    if report.goodput is None:
        yield "The log does not have the wall time of the run.\n"
        return
    wall = report.goodput.wall_seconds
    rows = ((escaped(name), duration(seconds), percent(seconds / wall)) for name, seconds in words.time_uses(report))
    yield from markdown_table(("use", "time", "share"), rows, "l")
    yield from (f"{note}\n" for note in words.goodput_notes(report))


def _curves(report: RunReport) -> Iterator[str]:
    if not report.curves:
        return
    yield "### Over the run\n"
    rows = (
        (
            escaped(words.metric_name(key)),
            *(
                words.metric_text(key, value)
                for value in (
                    min((point.low for point in curve.points), default=None),
                    curve.mean,
                    max((point.high for point in curve.points), default=None),
                    curve.last,
                )
            ),
        )
        for key, curve in report.curves.items()
    )
    yield from markdown_table(("metric", "least", "mean", "most", "newest"), rows, "l")


def _moments(report: RunReport) -> Iterator[str]:
    if not report.moments:
        return
    yield "### Evaluations, checkpoints, restarts and notices\n"
    counts = (plural(number, kind) for kind, number in report.moment_counts.items())
    yield f"{', '.join(counts)}.\n"
    notable = [moment for moment in report.moments if moment.kind in ("restart", "notice")]
    yield from (f"- {escaped(one_line(moment_words(moment), 600))}" for moment in notable[-MOST_MOMENTS:])
    yield ""
