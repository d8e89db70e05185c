"""`flopwatch report`: prints the report of a sweep or of a run, writes it to files, or logs it to W&B or MLflow."""

from typing import Annotated

from flopwatch.cli import argument, flag
from flopwatch.cli.run_logs import PEAK_TFLOPS


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
    given = locals()
    from flopwatch.cli.report_forms import put_out_report

    put_out_report(**given)
