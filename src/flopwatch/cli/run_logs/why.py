"""`flopwatch why` shows where the rest of the peak went; `flopwatch explain` prints how a logged MFU was calculated."""

from typing import Annotated

from flopwatch.cli import flag, print_json
from flopwatch.cli.run_logs import PEAK_TFLOPS, RunDir, chosen_run, peak_to_use
from flopwatch.errors import InputError
from flopwatch.report.run_page.why import explanation_document, where_the_time_went
from flopwatch.report.run_page.why import why as why_is
from flopwatch.runs import find_log, read_around
from flopwatch.runs.advice import what_is_missing
from flopwatch.runs.explain import explain_step, explain_window
from flopwatch.runs.given_peak import with_peak
from flopwatch.runs.traces import usable_traces


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


def explain(
    run_dir: RunDir = None,
    step: Annotated[int | None, flag("The step to explain. Default: the steps of the newest log row.")] = None,
    as_json: Annotated[bool, flag("Print JSON instead of text.", "--json")] = False,
    peak_tflops: Annotated[float | None, PEAK_TFLOPS] = None,
) -> None:
    """Print how a logged MFU was calculated: the FLOPs, the seconds, the peak, and the division."""
    from flopwatch.present.terminal import print_document

    logged = read_around(find_log(chosen_run(run_dir)), step)
    log = with_peak(logged, peak_to_use(peak_tflops))
    if step is None and not log.rows:
        if as_json:
            raise InputError(f"in {str(log.path)!r}, {what_is_missing(log)}")
        print_document(where_the_time_went(log, (), ())[1])
        return
    explanation = explain_window(log, log.rows[-1], logged.rows[-1]) if step is None else explain_step(log, step)
    if as_json:
        print_json(explanation.to_json())
    else:
        print_document(explanation_document(explanation))
