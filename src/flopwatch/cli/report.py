"""`flopwatch report`: what a sweep found, on the screen, as a page, Markdown or JSON, as a table, or in a tracker."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flopwatch.report.capture import Capture
    from flopwatch.report.records import SweepSummary


def report(
    directory: Annotated[str | None, typer.Argument(metavar="[DIR]", help="Folder of a sweep.")] = None,
    logs_dir: Annotated[str | None, typer.Option(help="Its logs folder instead: DIR/logs.")] = None,
    html: Annotated[str | None, typer.Option(metavar="PATH", help="Write one self-contained page.")] = None,
    md: Annotated[str | None, typer.Option(metavar="PATH", help="Write Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    output: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write the same JSON, to results.json say.")
    ] = None,
    csv: Annotated[
        str | None, typer.Option(metavar="PATH", help="Write a row per trial as CSV; - is standard output.")
    ] = None,
    parquet: Annotated[
        str | None, typer.Option(metavar="PATH", help="The same as Parquet, with pyarrow; - is standard output.")
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Log every trial to W&B; again updates the same runs.")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(metavar="EXPERIMENT", help="Log every trial to MLflow; again updates the same runs.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Matrices to print: memory, time, tokens, samples, mfu, hfu; comma between.")
    ] = None,
) -> None:
    """What a sweep found: what to run, memory and time and MFU of every trainer, what failed and why."""
    from flopwatch.cli.trials.tracking import log_capture, refuse_unusable
    from flopwatch.report.capture import capture_sweep
    from flopwatch.report.summary import summarise

    metrics = _metrics(metric)
    refuse_two_on_standard_output(csv, parquet, as_json=as_json)
    refuse_unusable(wandb, mlflow)
    capture = capture_sweep(_sweep_folder(directory, logs_dir))
    written = write_tables(capture, csv, parquet)
    is_printed = STANDARD_OUTPUT in (csv, parquet)
    is_logged = wandb is not None or mlflow is not None
    if (written or is_printed or is_logged) and not (html or md or output or as_json or metrics):
        _say_written(written, err=is_printed)
        if is_logged:
            log_capture(capture, wandb, mlflow)
        return
    summary = summarise(capture)
    written += _write_files(summary, html=html, md=md, output=output)
    if as_json:
        from flopwatch.report.exports import report_json

        typer.echo(report_json(summary))
    elif (not written or metrics) and not is_printed:
        _print(summary, metrics)
    _say_written(written, err=as_json or is_printed)
    if is_logged:
        log_capture(capture, wandb, mlflow)


def _say_written(paths: "Iterable[str]", *, err: bool) -> None:
    for path in paths:
        typer.echo(f"Written: {path}", err=err)


def _sweep_folder(directory: str | None, logs_dir: str | None) -> Path:
    from flopwatch.errors import InputError
    from flopwatch.records.sweep_results import is_sweep_folder

    if (directory is None) == (logs_dir is None):
        raise InputError("name one folder: `flopwatch report DIR`, or its logs with --logs-dir DIR/logs")
    folder = Path(directory or logs_dir or "").expanduser()
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder; name the folder `flopwatch sweep` wrote")
    # docs/requirements.md: --logs-dir names DIR/logs. The folder of a sweep itself is accepted too.
    return folder if directory is not None or is_sweep_folder(folder) else folder.resolve().parent


def _metrics(names: str | None) -> tuple[str, ...]:
    if names is None:
        return ()
    from flopwatch.errors import InputError
    from flopwatch.report.contents import METRICS

    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in METRICS:
            raise InputError(f"--metric does not know {name!r}; it knows {', '.join(METRICS)}")
    return chosen


def _write_files(summary: "SweepSummary", *, html: str | None, md: str | None, output: str | None) -> list[str]:
    written = []
    if html is not None:
        from flopwatch.report.html_page.page import report_page

        written.append(_write(html, report_page(summary)))
    if md is not None:
        from flopwatch.report.exports import report_markdown

        written.append(_write(md, report_markdown(summary)))
    if output is not None:
        from flopwatch.report.exports import report_json

        written.append(_write(output, report_json(summary) + "\n"))
    return written


def _write(path: str, text: str) -> str:
    from flopwatch.errors import InputError

    try:
        Path(path).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path!r}: {error.strerror}; name a file in a folder that exists") from error
    return path


def _print(summary: "SweepSummary", metrics: tuple[str, ...]) -> None:
    from rich.console import Console

    from flopwatch.report.terminal import draw_report

    console = Console(highlight=False)
    console.print(draw_report(summary, metrics, console.width))


STANDARD_OUTPUT = "-"


def write_tables(capture: "Capture", csv: str | None, parquet: str | None) -> list[str]:
    """Write the requested tables. Returns the files written, without standard output."""
    from flopwatch.records.reading import one_line
    from flopwatch.report.exports import table_csv, table_parquet
    from flopwatch.report.table import make_table

    if csv is None and parquet is None:
        return []
    table = make_table(capture)
    for trouble in table.troubles:
        typer.echo(one_line(trouble), err=True)
    written = []
    if csv is not None:
        written.append(write_file(csv, table_csv(table).encode("utf-8")))
    if parquet is not None:
        written.append(write_file(parquet, table_parquet(table)))
    return [path for path in written if path != STANDARD_OUTPUT]


def refuse_two_on_standard_output(csv: str | None, parquet: str | None, *, as_json: bool) -> None:
    """Refuse two formats on standard output, which a reader could not separate."""
    from flopwatch.errors import InputError

    asked = [f"--{name} -" for name, path in (("csv", csv), ("parquet", parquet)) if path == STANDARD_OUTPUT]
    asked += ["--json"] if as_json else []
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)} would both write to standard output; name a file for one of them")


def write_file(path: str, content: bytes) -> str:
    """Write to the file, or to standard output for `-`. Returns the path."""
    from flopwatch.errors import InputError

    if path == STANDARD_OUTPUT:
        typer.echo(content, nl=False)
        return path
    try:
        Path(path).expanduser().write_bytes(content)
    except OSError as error:
        raise InputError(f"cannot write {path!r}: {error.strerror}; name a file in a folder that exists") from error
    return path
