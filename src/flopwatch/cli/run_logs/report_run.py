"""`flopwatch report` for the folder of a run: its page, Markdown, JSON, the rows as CSV, or a short form as text."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import click

from flopwatch.errors import InputError
from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from flopwatch.report.run_page.collecting import read_report
from flopwatch.report.run_page.document import run_document, run_json
from flopwatch.runs.given_peak import ChoosePeak, with_peak
from flopwatch.runs.reading import read_log
from flopwatch.runs.traces.splits import usable_traces

STANDARD_OUTPUT = "-"


def refuse_options_of_sweeps(log: Path, **given: str | None) -> None:
    """Raise an error if an option was given that only the report of a sweep has."""
    wrong = [f"--{name}" for name, value in given.items() if value is not None]
    if wrong:
        raise InputError(
            f"{str(log)!r} is the log of a run, and {' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} for "
            "sweeps only; for a run use --html, --md, --json, --output or --csv"
        )


def report_run(
    log: Path,
    *,
    html: str | None,
    md: str | None,
    as_json: bool,
    output: str | None,
    csv: str | None,
    choose_peak: ChoosePeak | None = None,
) -> None:
    """Write the asked files of a run's report, and print JSON or, if nothing else was asked, the short form."""
    is_printed = STANDARD_OUTPUT in (html, md, output, csv)
    written = []
    if csv is not None:
        written.append(write_bytes(csv, rows_as_csv(log, choose_peak).encode(errors="backslashreplace")))
        if not (html or md or output or as_json):
            say_written(written, err=False)
            return
    from flopwatch.present.terminal import print_document

    traces, problems = usable_traces(log.parent)
    for problem in problems:
        click.echo(problem, err=True)
    report = read_report(log, traces, choose_peak)
    document = run_document(report)
    written += write_asked(
        (html, lambda: to_page(document)),
        (md, lambda: to_markdown(document)),
        (output, lambda: f"{run_json(report)}\n"),
    )
    if as_json:
        click.echo(run_json(report))
    elif not written:
        print_document(document)
    say_written(written, err=as_json or is_printed)


def rows_as_csv(log: Path, choose_peak: ChoosePeak | None = None) -> str:
    """The rows of a run's log as CSV: step, time, whether the FLOPs are exact, and every metric of any row."""
    rows = with_peak(read_log(log), choose_peak).rows
    metrics = list(dict.fromkeys(key for row in rows for key in row.values))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "unix_time", "exact", *metrics])
    for row in rows:
        writer.writerow([row.step, row.unix_time, row.exact, *(row.values.get(key, "") for key in metrics)])
    return text.getvalue()


def say_written(paths: list[str], *, err: bool) -> None:
    for path in paths:
        if path != STANDARD_OUTPUT:
            click.echo(f"Written: {path}", err=err)


def write_asked(*files: tuple[str | None, Callable[[], str]]) -> list[str]:
    """Make and write the texts whose path is not None. Returns the paths."""
    return [write_bytes(path, make().encode("utf-8")) for path, make in files if path is not None]


def write_bytes(path: str, content: bytes) -> str:
    """Write a file that the user named, or to standard output if the path is `-`. Returns the path."""
    if path == STANDARD_OUTPUT:
        click.echo(content, nl=False)
        return path
    try:
        Path(path).expanduser().write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write {path!r}: {error.strerror}; name a file in a folder that exists") from error
    return path
