"""`flopwatch why` and `explain` say what the log of a run shows; `compare` compares two runs."""

from pathlib import Path
from typing import Annotated

import click

from flopwatch.cli import argument, flag, print_json, say, write_file
from flopwatch.cli.run_logs import PEAK_TFLOPS, RunDir, chosen_run, peak_to_use, show
from flopwatch.errors import InputError
from flopwatch.language import Said
from flopwatch.present.json_form import strict_json
from flopwatch.present.markdown import to_markdown
from flopwatch.records.sweep_results import is_sweep_folder
from flopwatch.report.run.compared import runs_compared
from flopwatch.report.run.why import explanation_document, where_the_time_went
from flopwatch.report.run.why import why as why_is
from flopwatch.runs import find_log, read_around, read_log
from flopwatch.runs.advice import what_is_missing
from flopwatch.runs.comparison import Comparison, speed_line
from flopwatch.runs.comparison import compare as compare_logs
from flopwatch.runs.explain import explain_step, explain_window
from flopwatch.runs.given_peak import with_peak
from flopwatch.runs.log_file import NoLogError
from flopwatch.runs.traces.files import usable_traces
from flopwatch.stats import FEWEST_STEPS


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
    run = chosen_run(run_dir)
    log = with_peak(read_around(find_log(run)), peak_to_use(peak_tflops))
    content, document = why_is(log, *usable_traces(run, trace or ()))
    if as_json:
        print_json(content)
    else:
        show(document)


def explain(
    run_dir: RunDir = None,
    step: Annotated[int | None, flag("The step to explain. Default: the steps of the newest log row.")] = None,
    as_json: Annotated[bool, flag("Print JSON instead of text.", "--json")] = False,
    peak_tflops: Annotated[float | None, PEAK_TFLOPS] = None,
) -> None:
    """Print how a logged MFU was calculated: the FLOPs, the seconds, the peak, and the division."""
    logged = read_around(find_log(chosen_run(run_dir)), step)
    log = with_peak(logged, peak_to_use(peak_tflops))
    if step is None and not log.rows:
        if as_json:
            raise InputError(f"{log.path}: {what_is_missing(log)}")
        show(where_the_time_went(log, (), ())[1])
        return
    explanation = explain_window(log, log.rows[-1], logged.rows[-1]) if step is None else explain_step(log, step)
    if as_json:
        print_json(explanation.to_json())
    else:
        show(explanation_document(explanation))


def compare(
    run_a: Annotated[str, argument("The run before the change (folder or log file).", "A")],
    run_b: Annotated[str, argument("The run after the change (folder or log file).", "B")],
    as_json: Annotated[bool, flag("Print JSON instead of text.", "--json")] = False,
    md: Annotated[str | None, flag("Write the comparison as Markdown.", metavar="PATH")] = None,
    fail_if_slower: Annotated[
        float | None,
        flag("Exit with status 1 if B is slower than A by more than PERCENT, and not by chance.", metavar="PERCENT"),
    ] = None,
    peak_tflops: Annotated[float | None, PEAK_TFLOPS] = None,
) -> None:
    """Compare the step time, rates and MFU of two runs, and tell differences from noise."""
    if fail_if_slower is not None and not fail_if_slower >= 0:
        raise InputError(f"--fail-if-slower must be a percentage of 0 or more, got {fail_if_slower:g}")
    if as_json and md == "-":
        raise InputError("--json and '--md -' would both write to standard output; name a file after --md")
    log_a, log_b = (with_peak(read_log(_logged(run)), peak_to_use(peak_tflops)) for run in (run_a, run_b))
    comparison = compare_logs(log_a, log_b, *(usable_traces(run)[0] for run in (run_a, run_b)))
    document = runs_compared(comparison)
    if md is not None:
        write_file(md, to_markdown(document))
    if as_json:
        click.echo(strict_json(comparison.to_json(), indent=2))
    elif md is None:
        show(document)
    if md not in (None, "-"):
        say(f"Written: {md}", err=as_json)
    if fail_if_slower is not None:
        said, is_slower = _gate(comparison, fail_if_slower)
        # To stderr, because `--json` uses stdout.
        say(said, fg="red" if is_slower else None, err=True)
        if is_slower:
            raise SystemExit(1)


def _logged(run: str) -> Path:
    try:
        return find_log(run)
    except NoLogError:
        if not is_sweep_folder(Path(run).expanduser()):
            raise
        raise InputError(
            f"{run!r} is the folder of a sweep, and `compare` compares two runs; to compare two sweeps, write each as "
            "a table with `flopwatch report DIR --csv FILE`, and join the tables by the names of the trials"
        ) from None


def _gate(comparison: Comparison, percent: float) -> tuple[str, bool]:
    line = speed_line(comparison)
    if line is None or line.change is None or line.low is None:
        raise InputError(
            f"--fail-if-slower needs {FEWEST_STEPS} timed steps after warm-up in each run, but A has "
            f"{comparison.a.compared} and B has {comparison.b.compared}; run both for more steps"
        )
    is_slower = line.verdict == "slower" and line.change < -percent
    said = Said("failed: {measure} {change:+.1f} % ({verdict}), and {percent:g} % slower is allowed")
    if not is_slower:
        said = Said("passed: {measure} {change:+.1f} % ({verdict}), and {percent:g} % slower is allowed")
    return said.filled(measure=line.label, change=line.change, verdict=line.verdict, percent=percent), is_slower
