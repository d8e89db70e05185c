"""`flopwatch why`: shows where the rest of the peak went, from 100 % down to the MFU of a run."""

from typing import Annotated

from flopwatch.cli import flag, print_json
from flopwatch.cli.run_logs.run_argument import PEAK_TFLOPS, RunDir, chosen_run, peak_to_use
from flopwatch.report.run_page.why import why as why_is
from flopwatch.runs import find_log, read_around
from flopwatch.runs.given_peak import with_peak
from flopwatch.runs.traces.splits import usable_traces


def why(
    run_dir: RunDir = None,
    as_json: Annotated[bool, flag("Print JSON instead of text.", "--json")] = False,
    trace: Annotated[
        list[str] | None,
        flag("A trace of this run; may be given for several ranks. Default: the newest in RUN_DIR.", metavar="FILE"),
    ] = None,
    peak_tflops: Annotated[float | None, PEAK_TFLOPS] = None,
) -> None:
    """Show where the rest of the peak went: every loss between 100 % and the MFU of a run, and what to try next.

    Where MFU is unknown, show where the time went.
    """
    from flopwatch.present.terminal import print_document

    run = chosen_run(run_dir)
    log = with_peak(read_around(find_log(run)), peak_to_use(peak_tflops))
    content, document = why_is(log, *usable_traces(run, trace or ()))
    if as_json:
        print_json(content)
    else:
        print_document(document)
