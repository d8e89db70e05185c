"""Write a report as JSON, CSV, Parquet or Markdown, or as runs of a tracking service such as MLflow.

Numbers are rounded only in Markdown, which is for people.
"""

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from flopwatch.numbers import UNKNOWN, byte_size, count, duration
from flopwatch.optional import require_package
from flopwatch.records.trial import FAILED, TrialResult
from flopwatch.report import contents
from flopwatch.report.capture import Capture
from flopwatch.report.cells import MOST_FINITE
from flopwatch.report.records import Cell, Choice, Failure, Group, SweepSummary
from flopwatch.report.table import COLUMNS, Kind, Table, result_row, whole_text
from flopwatch.sinks.protocol import TrialRun
from flopwatch.text import one_line, plain

FORMAT = 1


def report_json(summary: SweepSummary) -> str:
    """Write the whole summary as JSON, one trial or group per line."""
    content = record_fields(summary)
    content["trials"] = content.pop("rows")
    return json_document(content)


def json_document(content: Mapping[str, Any]) -> str:
    """Write JSON with each item of a tuple on its own line. NaN and infinity become null, as JSON requires."""
    lines = (f" {json.dumps(name)}: {_written(value)}" for name, value in {"format": FORMAT, **content}.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def record_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a dict. Dataclasses inside it are not converted."""
    if not is_dataclass(record):
        raise TypeError(f"an object of type {type(record).__name__} cannot be written as JSON")
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _written(value: Any) -> str:
    # Do not use `indent`: it disables the C encoder of json, and 10,000 trials would take three times as long.
    if isinstance(value, tuple) and value:
        return "[\n  " + ",\n  ".join(map(_strict, value)) + "\n ]"
    return _strict(value)


def _strict(value: Any) -> str:
    try:
        return json.dumps(value, default=record_fields, allow_nan=False)
    except ValueError:  # Some number is NaN or infinite. This is rare, so numbers are not checked beforehand.
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_dataclass(value):
        return _finite(record_fields(value))
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


# A formula may also start after a semicolon, tab or newline, because some spreadsheets begin a new cell there.
_BEGINS_A_FORMULA = re.compile(r"(?:^|(?<=[;\t\n]))(?=\s*[=+\-@＝＋－＠])")


def table_csv(table: Table) -> str:
    """Write the table as CSV with a header. Flags are `true` or `false`, and unknown values are empty.

    Text that a spreadsheet would run as a formula gets an apostrophe in front, because text such as an
    exception's message may come from anywhere (CSV injection, see OWASP). Control characters are removed.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([_harmless(name) for name in table.columns])
    writer.writerows([_cell(value) for value in row.values()] for row in table.rows)
    return stream.getvalue()


def table_parquet(table: Table) -> bytes:
    """Write the table as Parquet with typed columns. Unlike in CSV, text is not changed.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    pyarrow = require_package("pyarrow", "Parquet", "; CSV needs nothing")
    parquet = require_package("pyarrow.parquet", "Parquet", "; CSV needs nothing")
    types: Mapping[Kind, Any] = {
        "text": pyarrow.string(),
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "flag": pyarrow.bool_(),
    }
    columns = {
        name: pyarrow.array([_typed(row[name], kind) for row in table.rows], types[kind])
        for name, kind in table.kinds.items()
    }
    written = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), written)
    return written.getvalue()


def _typed(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    if kind == "number":
        return float(value)
    return _cell_text(value) if kind == "text" else value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return _harmless(value) if isinstance(value, str) else _cell_text(value)


def _cell_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


def _harmless(text: str) -> str:
    return _BEGINS_A_FORMULA.sub("'", plain(text))


_FIRST_RESULT = [column.name for column in COLUMNS].index("outcome")
_FACTS = {column.name for column in COLUMNS[_FIRST_RESULT:] if column.kind == "text"}
_FIGURES = {column.name for column in COLUMNS[_FIRST_RESULT:] if column.kind != "text"}


def trial_runs(capture: Capture) -> Iterator[TrialRun]:
    """Yield a run of a tracking service for each trial that has a result."""
    for result in capture.results.values():
        yield trial_run(result, capture.folder.resolve().name, capture.created)


def trial_run(result: TrialResult, sweep: str, created: float | None) -> TrialRun:
    """Convert the result of a trial to a run of a tracking service.

    Args:
        result: The result.
        sweep: Name of the sweep.
        created: Unix time at which the sweep was planned. The ID of the run depends on this time, which
            differs between sweeps with the same trials and stays the same if a sweep is resumed or its folder moved.
    """
    row = result_row(result)
    sweep_id = _hashed(sweep if created is None else repr(created))
    end = None if row["start_unix_seconds"] is None else row["start_unix_seconds"] + (row["total_seconds"] or 0)
    return TrialRun(
        id=_hashed(sweep_id, result.key or result.name),
        name=one_line(result.name),
        sweep=one_line(sweep),
        sweep_id=sweep_id,
        config=_clean(result.spec.to_json()),
        figures={name: value for name, value in row.items() if name in _FIGURES or name.startswith("extra.")},
        facts={name: value for name, value in row.items() if name in _FACTS and value is not None},
        state="killed" if result.outcome == "cancelled" else "failed" if result.outcome in FAILED else "finished",
        start_unix_seconds=row["start_unix_seconds"],
        end_unix_seconds=end,
    )


def _hashed(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "backslashreplace")).hexdigest()[:20]


def _clean(value: Any) -> Any:
    """Make a value acceptable to every service: escape lone surrogates, and replace NaN and infinity by None."""
    if isinstance(value, Mapping):
        return {whole_text(str(name)): _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, str):
        return whole_text(value)
    is_number = isinstance(value, int | float)
    return None if is_number and not abs(value) <= MOST_FINITE else value


MOST_ROWS = 60
MOST_GROUPS = 6
MOST_FAILURES = 20
_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#|~$])")


def report_markdown(summary: SweepSummary) -> str:
    """Write the report as Markdown. Text that comes from trials is escaped, so that it cannot become markup."""
    return "\n".join(_lines(summary)).rstrip() + "\n"


def escaped(text: str) -> str:
    r"""Escape text so that it is one line and Markdown shows it unchanged.

    >>> escaped("a|b <script> @user #12")
    'a\\|b \\<script\\> @\u200buser \\#12'
    """
    # Put a zero-width space after @, because GitHub would otherwise notify the user with that name.
    return _SPECIAL.sub(r"\\\1", one_line(text)).replace("@", "@\u200b")


def fenced(text: str) -> str:
    """Write text as a Markdown code block, with a fence that is longer than any run of backticks in the text."""
    text = plain(text)  # Remove control characters first, because this can make separate backticks adjacent.
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _lines(summary: SweepSummary) -> Iterator[str]:
    yield f"## Sweep {escaped(summary.name)}"
    yield f"\n{contents.totals_sentence(summary)}; {duration(summary.totals.trial_seconds)} of trials.\n"
    yield from (f"> **Note:** {escaped(warning)}\n" for warning in contents.shown_warnings(summary))
    groups = summary.groups[:MOST_GROUPS]
    yield "### What to run\n"
    yield from _what_to_run(groups)
    yield "### Trainers\n"
    yield from _trainers(summary)
    for group in groups:
        yield from _group(contents.narrowed(group))
    if len(summary.groups) > MOST_GROUPS:
        yield f"\n{len(summary.groups) - MOST_GROUPS} more groups are in the HTML and JSON reports.\n"
    if summary.failures:
        yield "### What did not run, and why\n"
        for failure in summary.failures[:MOST_FAILURES]:
            yield from _failure(failure)
    if summary.environments:
        yield "### Environment\n"
        for environment in summary.environments[:MOST_ROWS]:
            settings = ", ".join(f"{name} {value}" for name, value in environment.settings.items())
            yield f"- {environment.trials:,} trials: {escaped(settings)}"


def _what_to_run(groups: Sequence[Group]) -> Iterator[str]:
    head = ("", "seq", "class", "fastest that ran", "throughput", "peak", "least memory within 10 %", "peak", "")
    rows = [
        (group, choice) for group in groups for choice in contents.some_choices(group.choices, MOST_ROWS // len(groups))
    ]
    if not rows:
        yield f"{contents.NOTHING_TO_CHOOSE}\n"
        return
    yield from markdown_table(head, (_choice_cells(group, choice) for group, choice in rows), "l1l")
    yield f"{contents.CLASSES_APART}\n"


def _choice_cells(group: Group, choice: Choice) -> tuple[str, ...]:
    fastest, lightest = choice.fastest, choice.lightest
    remarks = [*([choice.verdict] if choice.tied else []), *choice.caveats]
    name = escaped(contents.configuration(fastest))
    return (
        escaped(group.title),
        str(choice.seq_len),
        choice.privacy,
        f"≈ {name}" if choice.tied else f"**{name}**",
        contents.throughput(fastest),
        byte_size(fastest.peak_bytes),
        escaped(contents.configuration(lightest)) if lightest else UNKNOWN,
        byte_size(lightest.peak_bytes if lightest else None),
        escaped("; ".join(remarks)),
    )


def _trainers(summary: SweepSummary) -> Iterator[str]:
    rows = ((escaped(one.trainer), one.privacy, *contents.trainer_cells(one)) for one in summary.trainers[:MOST_ROWS])
    yield from markdown_table(("trainer", "class", *contents.TRAINER_HEADINGS, "shared¹"), rows, "ll")
    yield "¹ Mean peak over the configurations that every trainer ran.\n"


def _group(group: Group) -> Iterator[str]:
    parameters = f", {count(group.parameters)} parameters" if group.parameters else ""
    yield f"### {escaped(group.title)}{parameters}\n"
    metrics = contents.known_metrics(group)
    for metric in metrics:
        yield from _matrix(group, metric)
    if metrics:
        yield "\n".join(f"<sub>{note.replace('>', '&gt;')}</sub>  " for note in contents.MATRIX_NOTES) + "\n"
    if sentence := contents.denominator_sentence(group):
        yield f"{escaped(sentence)}\n"
    yield from _factors(group)
    yield from _frontier(group)
    yield from _privacy(group)
    yield from (f"- {escaped(sentence)}" for sentence in contents.crossover_digest(group.crossovers)[:MOST_ROWS])
    if uncertain := contents.uncertain_crossovers(group.crossovers):
        yield f"- {uncertain}"
    yield ""


def _matrix(group: Group, metric: contents.Metric) -> Iterator[str]:
    rows = contents.matrix_rows(group)
    shown = contents.evenly(rows, MOST_ROWS)
    of_all = f" ({len(shown)} of {len(rows):,} rows)" if len(shown) < len(rows) else ""
    yield f"**{metric.title}**{of_all}\n"
    head = ("seq", "batch", *(escaped(name) for name in group.trainers))
    cells = ((str(row.seq_len), str(row.batch_size), *_matrix_cells(row.cells, metric)) for row in shown)
    yield from markdown_table(head, cells)


def _matrix_cells(cells: Sequence[Cell | None], metric: contents.Metric) -> Iterator[str]:
    best = contents.best_trials(cells, metric)
    for cell in cells:
        text = escaped(contents.cell_text(cell, metric))
        yield f"**{text}**" if cell is not None and cell.trial in best else text


def _factors(group: Group) -> Iterator[str]:
    if not group.cost_factors:
        return
    yield "**Cost relative to standard**\n"
    rows = (
        (str(one.seq_len), str(one.batch_size), escaped(one.trainer), *contents.factor_texts(one))
        for one in contents.evenly(group.cost_factors, MOST_ROWS)
    )
    yield from markdown_table(("seq", "batch", "trainer", "time", "memory", "FLOPs"), rows)


def _frontier(group: Group) -> Iterator[str]:
    yield "**Largest batch that ran (smallest out of memory)**\n"
    points = {(point.trainer, point.seq_len): point for point in group.frontier}
    rows = (
        (
            str(seq),
            *(contents.frontier_words(points[name, seq]) if (name, seq) in points else "" for name in group.trainers),
        )
        for seq in contents.evenly(group.seq_lens, MOST_ROWS)
    )
    yield from markdown_table(("seq", *(escaped(name) for name in group.trainers)), rows)
    if note := contents.limit_note(group):
        yield f"{note}\n"


def _privacy(group: Group) -> Iterator[str]:
    if group.privacy_spent:
        yield "**Privacy**\n"
        shown = contents.evenly(group.privacy_spent, MOST_ROWS)
        yield from markdown_table(
            contents.HEADINGS, (tuple(map(escaped, contents.privacy_cells(row))) for row in shown)
        )
    yield from (f"{escaped(note)}\n" for note in contents.privacy_notes(group))


def _failure(failure: Failure) -> Iterator[str]:
    yield f"#### {escaped(failure.outcome)}, {failure.count:,}×: {escaped(failure.cause)}\n"
    yield f"- example {escaped(failure.example)}: {escaped(failure.reason)}"
    yield from (f"- {escaped(advice)}" for advice in failure.advice)
    if failure.command:
        yield f"\n{fenced(one_line(failure.command))}"
    for title, block in (("last lines of the log", failure.log_tail), ("stack traces", failure.stacks)):
        if block:
            yield f"\n<details><summary>{title}</summary>\n\n{fenced(block)}\n\n</details>"
    yield ""


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], sides: str = "") -> Iterator[str]:
    """Yield the lines of a Markdown table. A column is aligned right unless its letter in `sides` is `l`."""
    yield f"| {' | '.join(head)} |"
    marks = [":--" if place < len(sides) and sides[place] == "l" else "--:" for place in range(len(head))]
    yield f"| {' | '.join(marks)} |"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""
