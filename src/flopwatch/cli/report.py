"""`flopwatch report`: prints the report of a sweep or of a run, writes it to files, or logs it to W&B or MLflow."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import click

from flopwatch.cli import argument, flag
from flopwatch.cli.run_logs.peak_option import PEAK_TFLOPS, peak_to_use
from flopwatch.cli.run_logs.report_run import (
    STANDARD_OUTPUT,
    refuse_options_of_sweeps,
    report_run,
    say_written,
    write_asked,
    write_bytes,
)
from flopwatch.cli.run_logs.run_argument import chosen_run
from flopwatch.cli.trials.tracking import log_capture, refuse_unusable
from flopwatch.errors import InputError
from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from flopwatch.records.sweep_results import is_sweep_folder
from flopwatch.report.capture import Capture, capture_sweep
from flopwatch.report.contents import METRICS
from flopwatch.report.exports import report_json, table_csv, table_parquet
from flopwatch.report.records import SweepSummary
from flopwatch.report.summary import RESUME, summarise
from flopwatch.report.sweep.document import sweep_document
from flopwatch.report.table import make_table
from flopwatch.runs.log_file import NoLogError, find_log, runs_below
from flopwatch.sweep.runner.observing import is_alive, read_runner
from flopwatch.text import one_line


def report(
    directory: Annotated[str | None, argument("The folder of a sweep, of a run or of runs.", "[DIR]")] = None,
    logs_dir: Annotated[str | None, flag("The folder DIR/logs of a sweep; may be given instead of DIR.")] = None,
    html: Annotated[str | None, flag("Write one self-contained HTML page; - is stdout.", metavar="PATH")] = None,
    md: Annotated[str | None, flag("Write Markdown; - is stdout.", metavar="PATH")] = None,
    as_json: Annotated[bool, flag("Print JSON instead of text.", "--json")] = False,
    output: Annotated[str | None, flag("Write the JSON to a file.", metavar="PATH")] = None,
    csv: Annotated[
        str | None,
        flag("Write one row per trial, or per logging window of a run, as CSV; - is stdout.", metavar="PATH"),
    ] = None,
    parquet: Annotated[str | None, flag("Write one row per trial as Parquet; - is stdout.", metavar="PATH")] = None,
    wandb: Annotated[str | None, flag("Log every trial to W&B; update those logged before.", metavar="PROJECT")] = None,
    mlflow: Annotated[
        str | None, flag("Log every trial to MLflow; update those logged before.", metavar="EXPERIMENT")
    ] = None,
    metric: Annotated[str | None, flag("Tables to print, such as memory,time,tokens,samples,mfu,hfu.")] = None,
    peak_tflops: Annotated[float | None, PEAK_TFLOPS] = None,
) -> None:
    """Print the report of a sweep or of a run, or write it as a page.

    Of a sweep: the best configuration, memory, time and MFU of each trainer, and failures. Of a run: MFU, where the
    rest of the peak and the wall time went, and how the numbers were found.
    """
    metrics = _metrics(metric)
    paths = {"html": html, "md": md, "output": output, "csv": csv, "parquet": parquet}
    refuse_two_on_standard_output(paths, as_json=as_json)
    refuse_unusable(wandb, mlflow)
    if directory is None and logs_dir is None:
        directory = chosen_run(None)
    folder = _sweep_folder(directory, logs_dir)
    if (log := _log_of_run(folder)) is not None:
        refuse_options_of_sweeps(log, parquet=parquet, metric=metric, wandb=wandb, mlflow=mlflow)
        chosen = peak_to_use(peak_tflops)
        report_run(log, html=html, md=md, as_json=as_json, output=output, csv=csv, choose_peak=chosen)
        return
    if peak_tflops is not None:
        raise InputError(
            "--peak-tflops is for the report of a run; the trials of a sweep keep the peak they were given"
        )
    capture = capture_sweep(folder)
    written = write_tables(capture, csv, parquet)
    is_printed = STANDARD_OUTPUT in paths.values()
    is_logged = wandb is not None or mlflow is not None
    if (written or is_logged) and not (html or md or output or as_json or metrics):
        say_written(written, err=is_printed)
        if is_logged:
            log_capture(capture, wandb, mlflow)
        return
    summary = summarise(capture, _next_step(folder))
    written += _write_files(summary, html=html, md=md, output=output)
    if as_json:
        click.echo(report_json(summary))
    elif (not written or metrics) and not is_printed:
        from flopwatch.present.terminal import print_document

        print_document(sweep_document(summary, metrics))
    say_written(written, err=as_json or is_printed)
    if is_logged:
        log_capture(capture, wandb, mlflow)


def _log_of_run(folder: Path) -> Path | None:
    """The log, if the folder is that of a monitored run and not of a sweep."""
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


def _sweep_folder(directory: str | None, logs_dir: str | None) -> Path:
    if directory is not None and logs_dir is not None:
        raise InputError("name one folder: either `flopwatch report DIR` or `flopwatch report --logs-dir DIR/logs`")
    folder = Path(directory or logs_dir or "").expanduser()
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; name the folder of a run, or that `flopwatch sweep` wrote")
    # `--logs-dir` is meant for DIR/logs (docs/requirements.md), but DIR itself is accepted too.
    return folder if directory is not None or is_sweep_folder(folder) else folder.resolve().parent


def _next_step(sweep: Path) -> str:
    """What to do about trials without a result: look at the runner if it is alive, else start one."""
    state = read_runner(sweep)
    if state is None or (runs := is_alive(state)) is False:
        return RESUME
    show = f"flopwatch sweep attach {shlex.quote(str(sweep))}"
    if runs:
        return f"the sweep is running; to see it: {show}"
    return f"if process {state.pid} on {state.host} still runs the sweep, `{show}` shows it; otherwise {RESUME}"


def _metrics(names: str | None) -> tuple[str, ...]:
    if names is None:
        return ()
    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in METRICS:
            raise InputError(f"--metric has no table {name!r}; choose from {', '.join(METRICS)}")
    return chosen


def _write_files(summary: SweepSummary, *, html: str | None, md: str | None, output: str | None) -> list[str]:
    return write_asked(
        (html, lambda: to_page(sweep_document(summary))),
        (md, lambda: to_markdown(sweep_document(summary))),
        (output, lambda: f"{report_json(summary)}\n"),
    )


def write_tables(capture: Capture, csv: str | None, parquet: str | None) -> list[str]:
    """Write the requested tables. Returns their paths."""
    if csv is None and parquet is None:
        return []
    table = make_table(capture)
    for trouble in table.troubles:
        click.echo(one_line(trouble), err=True)
    written = []
    if csv is not None:
        written.append(write_bytes(csv, table_csv(table).encode("utf-8")))
    if parquet is not None:
        written.append(write_bytes(parquet, table_parquet(table)))
    return written


def refuse_two_on_standard_output(paths: Mapping[str, str | None], *, as_json: bool) -> None:
    """Raise an error if two formats would be mixed on standard output."""
    asked = [f"--{name} -" for name, path in paths.items() if path == STANDARD_OUTPUT]
    asked += ["--json"] if as_json else []
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)} would both write to standard output; name a file for one of them")
