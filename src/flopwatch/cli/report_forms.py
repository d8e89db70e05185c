"""What `flopwatch report` prints and writes: the forms of the report of a sweep, and of a run."""

import csv as csv_files
import io
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path

import click

from flopwatch.cli import STANDARD_OUTPUT, say, write_file
from flopwatch.cli.run_logs import chosen_run, peak_to_use
from flopwatch.errors import InputError
from flopwatch.present.document import Document
from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from flopwatch.present.terminal import print_document
from flopwatch.records.sweep_results import is_sweep_folder
from flopwatch.report.capture import capture_sweep
from flopwatch.report.cells import METRICS
from flopwatch.report.run.contents import RunReport, read_report
from flopwatch.report.run.document import run_document, run_json
from flopwatch.report.summary import RESUME, summarise
from flopwatch.report.sweep.document import sweep_document, sweep_json
from flopwatch.report.table import make_table, table_csv
from flopwatch.runs.given_peak import ChoosePeak, with_peak
from flopwatch.runs.log_file import NoLogError, find_log, runs_below
from flopwatch.runs.reading import read_log
from flopwatch.runs.traces.files import usable_traces
from flopwatch.sweep.runner.observing import find_runner
from flopwatch.text import one_line

_Forms = tuple[dict[str, Callable[[], str]], Callable[[tuple[str, ...]], Document]]
"""A function for each form but page and Markdown, by the name of its option, and one that makes the document."""


def put_out_report(
    directory: str | None, logs_dir: str | None, as_json: bool, peak_tflops: float | None, **given: str | None
) -> None:
    metrics = _metrics(given["metric"])
    paths = {name: path for name in ("csv", "html", "md", "output") if (path := given[name]) is not None}
    on_stdout = [f"--{name} -" for name in given if paths.get(name) == STANDARD_OUTPUT] + ["--json"] * as_json
    if len(on_stdout) > 1:
        asked = " and ".join(on_stdout)
        raise InputError(f"{asked} would both write to standard output; name a file for one of them")
    folder = _folder(directory, logs_dir)
    log = _log_of_run(folder)
    if log is not None:
        if metrics:
            raise InputError(f"--metric chooses tables of a sweep, and {str(log)!r} is the log of a run")
        makers, document = _forms_of_run(log, peak_to_use(peak_tflops))
    elif peak_tflops is not None:
        raise InputError(
            "--peak-tflops is for the report of a run; the trials of a sweep keep the peak they were given"
        )
    else:
        makers, document = _forms_of_sweep(folder)
    makers |= {"html": lambda: to_page(document(())), "md": lambda: to_markdown(document(()))}
    for name, path in paths.items():
        write_file(path, makers[name]())
    is_printed = STANDARD_OUTPUT in paths.values()
    if as_json:
        click.echo(makers["output"](), nl=False)
    elif (metrics or not paths) and not is_printed:
        print_document(document(metrics))
    for path in paths.values():
        if path != STANDARD_OUTPUT:
            say(f"Written: {path}", err=as_json or is_printed)


def _forms_of_sweep(folder: Path) -> _Forms:
    capture = capture_sweep(folder)
    summary = cache(lambda: summarise(capture, _next_step(folder)))

    def csv() -> str:
        table = make_table(capture)
        for trouble in table.troubles:
            say(one_line(trouble), err=True)
        return table_csv(table)

    return {
        "csv": csv,
        "output": lambda: f"{sweep_json(summary())}\n",
    }, lambda metrics: sweep_document(summary(), metrics)


def _forms_of_run(log: Path, choose_peak: ChoosePeak) -> _Forms:
    @cache
    def report() -> RunReport:
        traces, problems = usable_traces(log.parent)
        for problem in problems:
            say(problem, err=True)
        return read_report(log, traces, choose_peak)

    return {
        "csv": lambda: _rows_as_csv(log, choose_peak),
        "output": lambda: f"{run_json(report())}\n",
    }, lambda _: run_document(report())


def _rows_as_csv(log: Path, choose_peak: ChoosePeak) -> str:
    rows = with_peak(read_log(log), choose_peak).rows
    metrics = list(dict.fromkeys(key for row in rows for key in row.values))
    text = io.StringIO()
    writer = csv_files.writer(text, lineterminator="\n")
    writer.writerow(["step", "unix_time", "exact", *metrics])
    for row in rows:
        writer.writerow([row.step, row.unix_time, row.exact, *(row.values.get(key, "") for key in metrics)])
    return text.getvalue()


def _folder(directory: str | None, logs_dir: str | None) -> Path:
    if directory is not None and logs_dir is not None:
        raise InputError("name one folder: either `flopwatch report DIR` or `flopwatch report --logs-dir DIR/logs`")
    named = directory if logs_dir is None else logs_dir
    folder = Path(chosen_run(None) if named is None else named).expanduser()
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; name the folder of a run, or that `flopwatch sweep` wrote")
    # `--logs-dir` is meant for DIR/logs (docs/requirements.md), but DIR itself is accepted too.
    return folder if logs_dir is None or is_sweep_folder(folder) else folder.resolve().parent


def _log_of_run(folder: Path) -> Path | None:
    if folder.is_dir() and is_sweep_folder(folder):
        return None
    try:
        return find_log(folder)
    except NoLogError:
        if runs_below(folder):
            return find_log(chosen_run(str(folder)))
        raise InputError(
            f"{str(folder)!r} is not the folder of a sweep and has no log of a run: name the folder that "
            "`flopwatch sweep` wrote, or the output_dir of a TrainingMonitor"
        ) from None


def _next_step(sweep: Path) -> str:
    if (found := find_runner(sweep)) is None:
        return RESUME
    state, holder = found
    show = f"flopwatch watch {shlex.quote(str(sweep))}"
    if holder.life == "alive":
        return f"the sweep is running; to see it: {show}"
    return f"if process {state.pid} on {state.host} still runs the sweep, `{show}` shows it; otherwise {RESUME}"


def _metrics(names: str | None) -> tuple[str, ...]:
    chosen = () if names is None else tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in METRICS:
            raise InputError(f"--metric has no table {name!r}; choose from {', '.join(METRICS)}")
    return chosen
