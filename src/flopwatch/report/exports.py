"""A report that leaves flopwatch: JSON, CSV, Parquet, runs of a tracking service, and Markdown for a GitHub issue.

Only Markdown is rounded.
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

from flopwatch.number_format import UNKNOWN, byte_size, count, duration, factor, percent
from flopwatch.optional import require_package
from flopwatch.records.reading import one_line, plain
from flopwatch.records.trial import FAILED, TrialResult
from flopwatch.report.capture import Capture
from flopwatch.report.cells import MOST_FINITE
from flopwatch.report.contents import (
    CLASSES_APART,
    HEADINGS,
    MATRIX_NOTES,
    NOTHING_TO_CHOOSE,
    Metric,
    best_trials,
    cell_text,
    choice_notes,
    choice_sentence,
    configuration,
    crossover_digest,
    denominator_sentence,
    evenly,
    frontier_words,
    known_metrics,
    matrix_rows,
    narrowed,
    privacy_cells,
    privacy_notes,
    some_choices,
    throughput,
    totals_sentence,
)
from flopwatch.report.records import Cell, Choice, Failure, Group, SweepSummary
from flopwatch.report.table import COLUMNS, Kind, Table, result_row, whole_text
from flopwatch.sinks.protocol import TrialRun

FORMAT = 1


def report_json(summary: SweepSummary) -> str:
    """The whole summary as strict JSON, one trial or group per line."""
    content = record_fields(summary)
    content["trials"] = content.pop("rows")
    return json_document(content)


def json_document(content: Mapping[str, Any]) -> str:
    """Strict JSON in which every item of a tuple has its own line; numbers that are not finite are null."""
    lines = (f" {json.dumps(name)}: {_written(value)}" for name, value in {"format": FORMAT, **content}.items())
    return "{\n" + ",\n".join(lines) + "\n}"


def record_fields(record: Any) -> dict[str, Any]:
    """The fields of a dataclass, not of the ones it holds."""
    if not is_dataclass(record):
        raise TypeError(f"{type(record).__name__} has no JSON form")
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _written(value: Any) -> str:
    # Without `indent`, which would bypass json's fast encoder: 10,000 trials would take three times as long.
    if isinstance(value, tuple) and value:
        return "[\n  " + ",\n  ".join(map(_strict, value)) + "\n ]"
    return _strict(value)


def _strict(value: Any) -> str:
    try:
        return json.dumps(value, default=record_fields, allow_nan=False)
    except ValueError:  # some number is not finite: rare, and checking all beforehand would take longer
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_dataclass(value):
        return _finite(record_fields(value))
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


# Also after a semicolon, tab or newline: spreadsheets that expect semicolons ignore our quotes and begin a cell there.
_BEGINS_A_FORMULA = re.compile(r"(?:^|(?<=[;\t\n]))(?=\s*[=+\-@＝＋－＠])")


def table_csv(table: Table) -> str:
    """The table as CSV in UTF-8, with a header. Flags are true and false, unknown values are empty.

    Text that a spreadsheet would run as a formula is preceded by an apostrophe, as OWASP advises for CSV injection: an
    exception's message reaches the reader's spreadsheet by this file. Escape sequences and control codes are removed.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([_harmless(name) for name in table.columns])
    writer.writerows([_cell(value) for value in row.values()] for row in table.rows)
    return stream.getvalue()


def table_parquet(table: Table) -> bytes:
    """The table as Parquet with typed columns; text is not changed.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    pyarrow = require_package("pyarrow", "Parquet", "; CSV needs nothing")
    parquet = require_package("pyarrow.parquet", "Parquet", "; CSV needs nothing")
    types = _arrow_types(pyarrow)
    columns = {
        name: pyarrow.array([_typed(row[name], kind) for row in table.rows], types[kind])
        for name, kind in table.kinds.items()
    }
    written = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), written)
    return written.getvalue()


def _arrow_types(pyarrow: Any) -> Mapping[Kind, Any]:
    return {
        "text": pyarrow.string(),
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "flag": pyarrow.bool_(),
    }


def _typed(value: Any, kind: Kind) -> Any:
    """A value of the column's type. Options of several types are in a column of text."""
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
    """A run for every trial that has a result."""
    for result in capture.results.values():
        yield trial_run(result, capture.folder.resolve().name, capture.created)


def trial_run(result: TrialResult, sweep: str, created: float | None) -> TrialRun:
    """A trial as a run of a tracking service.

    Args:
        result: The trial's result.
        sweep: Name of the sweep.
        created: Unix time of the plan. It distinguishes two sweeps with the same trials, and does not change when the
            folder is moved or the sweep resumed.
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
    """A value that every service accepts: no half characters, no numbers that are not finite."""
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
    """Headings, tables and folded logs. Text from trials is escaped, so that none of it becomes markup."""
    return "\n".join(_lines(summary)).rstrip() + "\n"


def escaped(text: str) -> str:
    r"""One line of text in which nothing is Markdown.

    >>> escaped("a|b <script> @user #12")
    'a\\|b \\<script\\> @\u200buser \\#12'
    """
    # A name after @ would notify that GitHub user, hence a zero-width space between them.
    return _SPECIAL.sub(r"\\\1", one_line(text)).replace("@", "@\u200b")


def fenced(text: str) -> str:
    """A block of code with a fence longer than any in the text."""
    text = plain(text)  # first, because removing control characters may join backticks
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _lines(summary: SweepSummary) -> Iterator[str]:
    yield f"## Sweep {escaped(summary.name)}"
    yield f"\n{totals_sentence(summary)}; {duration(summary.totals.trial_seconds)} of trials.\n"
    yield from (f"> **Note:** {escaped(warning)}\n" for warning in summary.warnings[:MOST_FAILURES])
    groups = summary.groups[:MOST_GROUPS]
    yield "### What to run\n"
    yield from _what_to_run(groups)
    yield "### Trainers\n"
    yield from _trainers(summary)
    for group in groups:
        yield from _group(narrowed(group))
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
    rows = [(group, choice) for group in groups for choice in some_choices(group.choices, MOST_ROWS // len(groups))]
    if not rows:
        yield f"{NOTHING_TO_CHOOSE}\n"
        return
    yield from _table(head, (_choice_cells(group, choice) for group, choice in rows), "l1l")
    yield f"\n{CLASSES_APART}\n"


def _choice_cells(group: Group, choice: Choice) -> tuple[str, ...]:
    fastest, lightest = choice.fastest, choice.lightest
    remarks = [choice_sentence(choice)] if choice.tied else []
    remarks += [note] if (note := choice_notes(choice)) else []
    name = escaped(configuration(fastest))
    return (
        escaped(group.title),
        str(choice.seq_len),
        choice.privacy,
        f"≈ {name}" if choice.tied else f"**{name}**",
        throughput(fastest),
        byte_size(fastest.peak_bytes),
        escaped(configuration(lightest)) if lightest else UNKNOWN,
        byte_size(lightest.peak_bytes if lightest else None),
        escaped("; ".join(remarks)),
    )


def _trainers(summary: SweepSummary) -> Iterator[str]:
    head = ("trainer", "class", "ok / run", "success", "out of memory", "failed", "not run", "mean peak", "shared¹")
    rows = (
        (
            escaped(one.trainer),
            one.privacy,
            f"{one.ok:,} / {one.tried:,}",
            percent(one.success_rate),
            f"{one.out_of_memory:,}",
            f"{one.failed:,}",
            f"{one.not_run:,}",
            byte_size(one.mean_peak_bytes),
            byte_size(one.shared_mean_peak_bytes),
        )
        for one in summary.trainers[:MOST_ROWS]
    )
    yield from _table(head, rows, "ll")
    yield "\n¹ Mean over the configurations that every trainer ran.\n"


def _group(group: Group) -> Iterator[str]:
    parameters = f", {count(group.parameters)} parameters" if group.parameters else ""
    yield f"### {escaped(group.title)}{parameters}\n"
    metrics = known_metrics(group)
    for metric in metrics:
        yield from _matrix(group, metric)
    if metrics:
        yield "\n".join(f"<sub>{note.replace('>', '&gt;')}</sub>  " for note in MATRIX_NOTES) + "\n"
    if sentence := denominator_sentence(group):
        yield f"{escaped(sentence)}\n"
    yield from _factors(group)
    yield from _frontier(group)
    yield from _privacy(group)
    yield from (f"- {escaped(sentence)}" for sentence in crossover_digest(group.crossovers)[:MOST_ROWS])
    yield ""


def _matrix(group: Group, metric: Metric) -> Iterator[str]:
    rows = matrix_rows(group)
    shown = evenly(rows, MOST_ROWS)
    of_all = f" ({len(shown)} of {len(rows):,} rows)" if len(shown) < len(rows) else ""
    yield f"**{metric.title}**{of_all}\n"
    head = ("seq", "batch", *(escaped(name) for name in group.trainers))
    cells = ((str(row.seq_len), str(row.batch_size), *_matrix_cells(row.cells, metric)) for row in shown)
    yield from _table(head, cells)
    yield ""


def _matrix_cells(cells: Sequence[Cell | None], metric: Metric) -> Iterator[str]:
    best = best_trials(cells, metric)
    for cell in cells:
        text = escaped(cell_text(cell, metric))
        yield f"**{text}**" if cell is not None and cell.trial in best else text


def _factors(group: Group) -> Iterator[str]:
    if not group.cost_factors:
        return
    yield "**Cost against standard**\n"
    rows = (
        (str(one.seq_len), str(one.batch_size), escaped(one.trainer), *map(factor, (one.time, one.memory, one.flops)))
        for one in evenly(group.cost_factors, MOST_ROWS)
    )
    yield from _table(("seq", "batch", "trainer", "time", "memory", "FLOPs"), rows)
    yield ""


def _frontier(group: Group) -> Iterator[str]:
    yield "**Largest batch that ran (smallest out of memory)**\n"
    points = {(point.trainer, point.seq_len): point for point in group.frontier}
    rows = (
        (str(seq), *(frontier_words(points[name, seq]) if (name, seq) in points else "" for name in group.trainers))
        for seq in evenly(group.seq_lens, MOST_ROWS)
    )
    yield from _table(("seq", *(escaped(name) for name in group.trainers)), rows)
    yield ""


def _privacy(group: Group) -> Iterator[str]:
    if group.privacy_spent:
        yield "**Privacy**\n"
        shown = evenly(group.privacy_spent, MOST_ROWS)
        yield from _table(HEADINGS, (tuple(map(escaped, privacy_cells(row))) for row in shown))
        yield ""
    yield from (f"{escaped(note)}\n" for note in privacy_notes(group))


def _failure(failure: Failure) -> Iterator[str]:
    yield f"#### {escaped(failure.outcome)}, {failure.count:,}×: {escaped(failure.cause)}\n"
    yield f"- example {escaped(failure.example)}: {escaped(failure.reason)}"
    yield from (f"- {escaped(advice)}" for advice in failure.advice)
    if failure.command:
        yield f"\n{fenced(one_line(failure.command))}"
    for title, block in (("last lines of its log", failure.log_tail), ("stacks", failure.stacks)):
        if block:
            yield f"\n<details><summary>{title}</summary>\n\n{fenced(block)}\n\n</details>"
    yield ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], sides: str = "") -> Iterator[str]:
    """A table; columns are aligned right unless `sides` has an `l` at their place."""
    yield f"| {' | '.join(head)} |"
    marks = [":--" if place < len(sides) and sides[place] == "l" else "--:" for place in range(len(head))]
    yield f"| {' | '.join(marks)} |"
    yield from (f"| {' | '.join(row)} |" for row in rows)
