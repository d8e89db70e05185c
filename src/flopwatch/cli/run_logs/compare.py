"""`flopwatch compare`: shows from two logs or two sweeps whether a change made training faster.

The command does not use rich, because rich takes longer to load than everything else in it.
"""

import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import click

from flopwatch.cli import argument, flag, print_json, text_width, write_file
from flopwatch.cli.run_logs.peak_option import PEAK_TFLOPS, peak_to_use
from flopwatch.errors import InputError
from flopwatch.numbers import UNKNOWN, count, duration, flops, number, percent, step_time
from flopwatch.present.markdown import to_markdown
from flopwatch.records.sweep_results import is_sweep_folder
from flopwatch.records.trial_files import SWEEP
from flopwatch.report.capture import capture_sweep
from flopwatch.report.comparison import SweepComparison, compare_sweeps
from flopwatch.report.comparison.document import comparison_document
from flopwatch.report.exports import json_document, record_fields
from flopwatch.runs import find_log, read_log
from flopwatch.runs.comparison import Comparison, Difference, Line, RunSteps, speed_line
from flopwatch.runs.comparison import compare as compare_logs
from flopwatch.runs.given_peak import with_peak
from flopwatch.runs.per_step import LEAST_SHARE, PerStep
from flopwatch.runs.traces.splits import usable_traces
from flopwatch.runs.waterfall.change import WaterfallChange
from flopwatch.stats import FEWEST_STEPS, NO_DIFFERENCE, TOO_FEW
from flopwatch.text import one_line, plural


def compare(
    run_a: Annotated[str, argument("The run before the change (folder or log file), or a sweep (folder).", "A")],
    run_b: Annotated[str, argument("The run after the change (folder or log file), or a sweep (folder).", "B")],
    as_json: Annotated[bool, flag("Print JSON instead of text.", "--json")] = False,
    md: Annotated[str | None, flag("Write the comparison of two sweeps as Markdown.", metavar="PATH")] = None,
    fail_if_slower: Annotated[
        float | None,
        flag("Exit with status 1 if B is slower than A by more than PERCENT, and not by chance.", metavar="PERCENT"),
    ] = None,
    peak_tflops: Annotated[float | None, PEAK_TFLOPS] = None,
) -> None:
    """Compare the step time, rates and MFU of two runs or two sweeps, and tell differences from noise."""
    if fail_if_slower is not None and not fail_if_slower >= 0:
        raise InputError(f"--fail-if-slower must be a percentage of 0 or more, got {fail_if_slower:g}")
    if is_sweep(run_a) != is_sweep(run_b):
        refuse_mixed(run_a, run_b)
    if is_sweep(run_a):
        compare_two_sweeps(run_a, run_b, as_json=as_json, md=md, fail_if_slower=fail_if_slower)
        return
    if md is not None:
        raise InputError("--md works only for two sweeps; leave it out to print text, or use --json")
    traces = (usable_traces(run)[0] for run in (run_a, run_b))
    log_a, log_b = (with_peak(read_log(find_log(run)), peak_to_use(peak_tflops)) for run in (run_a, run_b))
    comparison = compare_logs(log_a, log_b, *traces)
    if as_json:
        print_json(comparison.to_json())
    else:
        print_comparison(comparison)
    if fail_if_slower is not None:
        _fail_if_slower(comparison, fail_if_slower)


def _fail_if_slower(comparison: Comparison, percent: float) -> None:
    """Exit with status 1 if B is slower than A by more than `percent`. Prints to stderr, as `--json` uses stdout."""
    line = speed_line(comparison)
    if line is None or line.change is None or line.low is None:
        raise InputError(
            f"--fail-if-slower needs {FEWEST_STEPS} timed steps after warm-up in each run, but A has "
            f"{comparison.a.compared} and B has {comparison.b.compared}; run both for more steps"
        )
    is_slower = line.verdict == "slower" and line.change < -percent
    said = f"{line.label} {line.change:+.1f} % ({line.verdict}), and {percent:g} % slower is allowed"
    click.secho(f"{'failed' if is_slower else 'passed'}: {said}", fg="red" if is_slower else None, err=True)
    if is_slower:
        raise SystemExit(1)


def is_sweep(path: str) -> bool:
    """Whether the path is the folder of a sweep. The folder of a run is not, even if its log is named results.jsonl."""
    folder = Path(path).expanduser()
    if (folder / SWEEP).exists():
        return True
    if not folder.is_dir() or not is_sweep_folder(folder):
        return False
    try:
        find_log(folder)
    except InputError:
        return True
    return False


def refuse_mixed(a: str, b: str) -> None:
    sweep, other = (a, b) if is_sweep(a) else (b, a)
    if not Path(other).expanduser().exists():
        raise InputError(f"{other!r} does not exist; name the folder of a sweep to compare with the sweep {sweep!r}")
    raise InputError(
        f"{sweep!r} is the folder of a sweep, but {other!r} is not; name two sweeps, or two runs (folders with a "
        "training_log.jsonl)"
    )


def compare_two_sweeps(a: str, b: str, *, as_json: bool, md: str | None, fail_if_slower: float | None) -> None:
    """Print or write the comparison of two sweeps; exit with status 1 if B is too slow."""
    from flopwatch.present.terminal import print_document

    if as_json and md == "-":
        raise InputError("--json and '--md -' would both write to standard output; name a file after --md")
    comparison = compare_sweeps(capture_sweep(Path(a).expanduser()), capture_sweep(Path(b).expanduser()))
    if md is not None:
        write_file(md, to_markdown(comparison_document(comparison)))
    if as_json:
        click.echo(json_document(record_fields(comparison)))
    elif md is None:
        print_document(comparison_document(comparison))
    if md not in (None, "-"):
        click.echo(f"Written: {md}", err=as_json)
    if fail_if_slower is not None:
        _fail_if_sweep_is_slower(comparison, fail_if_slower)


def _fail_if_sweep_is_slower(comparison: SweepComparison, percent: float) -> None:
    """Exit with status 1 if a trial of B is slower by more than `percent` or no longer ends ok. Prints to stderr."""
    rates = {pair.trial: pair.ratios.get("time") for pair in comparison.pairs}
    judged = {trial: ratio for trial, ratio in rates.items() if ratio is not None and ratio.verdict != TOO_FEW}
    if not judged:
        raise InputError(
            "--fail-if-slower needs a trial that both sweeps measured for 6 steps or more; run the same trials in both "
            "sweeps, with steps=6 or more"
        )
    slower = [
        trial for trial, ratio in judged.items() if ratio.verdict == "worse" and 100 * (ratio.ratio - 1) > percent
    ]
    gone = [pair.trial for pair in comparison.changed_outcomes if pair.outcome_a == "ok"]
    for word, trials in ((f"slower by more than {percent:g} %", slower), ("no longer ok", gone)):
        if trials:
            message = f"failed: {plural(len(trials), 'trial')} {word}, such as {one_line(trials[0])}"
            click.secho(message, fg="red", err=True)
    if slower or gone:
        raise SystemExit(1)
    click.secho(f"passed: of {len(judged):,} trials, none is slower by more than {percent:g} %", err=True)


_WIDTH_FOR_INTERVALS = 98
_GOOD = ("faster", "steadier")
_BAD = ("slower", "less steady")
_SHORT = {NO_DIFFERENCE: "no clear difference", TOO_FEW: TOO_FEW}  # for a terminal of 80 columns
_LABEL_WIDTH = 20
_VALUE_WIDTH = 12
_FACT_WIDTH = 30
_FORMATS: dict[str, Callable[[float], str]] = {
    "s": lambda value: step_time(value, digits=4),
    "%": lambda value: percent(value / 100),
    "% of peak": lambda value: percent(value / 100, decimals=2),
    "x": lambda value: f"{value:.3f}",
    "per step": lambda value: number(value) if value >= 1000 else f"{value:g}",
    "steps": lambda value: f"{value:,.0f}",
    "tokens": count,
    "FLOP": flops,
    "duration": duration,
}


def print_comparison(comparison: Comparison) -> None:
    """Print the settings that differ, the table of figures, and how far the verdicts can be trusted."""
    click.echo()
    for name, run in (("A", comparison.a), ("B", comparison.b)):
        click.secho(f"{name}  {run.log}", bold=True)
        click.secho(f"   {_which_steps(run)}", dim=True)
    _print_differences(comparison.differences)
    _print_table(comparison.lines)
    if comparison.per_step is not None:
        _print_per_step(comparison.per_step, comparison.waterfall)
    _print_remarks(comparison)
    click.echo()


def _which_steps(run: RunSteps) -> str:
    left_out = f", {run.left_out:,} left out (warm-up, or no time)" if run.left_out else ""
    return f"{run.compared:,} steps compared{left_out}{'' if run.has_ended else ', the run has not ended'}"


def _print_differences(differences: Sequence[Difference]) -> None:
    click.echo()
    if not differences:
        click.echo(_wrapped("Nothing differs in device, peak, dtype, attention, mode, method, world size or versions."))
        return
    click.secho("The runs differ in these settings, so a difference in speed may have several causes:", fg="yellow")
    rows = [(entry.what, _fact(entry.a), _fact(entry.b), entry.touches) for entry in differences]
    what_width, a_width, b_width = (max(len(row[column]) for row in rows) for column in range(3))
    for what, a, b, touches in rows:
        click.echo(f"  {what:<{what_width}}  {a:<{a_width}}  {b:<{b_width}}  ", nl=False)
        click.secho(f"affects {touches}", dim=True)


def _fact(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:,.6g}" if isinstance(value, float) else str(value)
    return textwrap.shorten(text, _FACT_WIDTH, placeholder=" ...") if len(text) > _FACT_WIDTH else text


def _print_table(lines: Sequence[Line]) -> None:
    has_intervals = shutil.get_terminal_size().columns >= _WIDTH_FOR_INTERVALS
    heading = f"  {'':<{_LABEL_WIDTH}}{'A':>{_VALUE_WIDTH}}{'B':>{_VALUE_WIDTH}}{'change':>10}"
    click.secho(f"\n{heading}{'99 % interval':>20}" if has_intervals else f"\n{heading}", dim=True)
    for line in lines:
        values = f"{_value(line.a, line.unit):>{_VALUE_WIDTH}}{_value(line.b, line.unit):>{_VALUE_WIDTH}}"
        interval = f"{_interval(line):>18}" if has_intervals else ""
        text = f"  {line.label:<{_LABEL_WIDTH}}{values}{_change(line):>12}{interval}"
        click.echo(text if line.verdict else text.rstrip(), nl=not line.verdict)
        if line.verdict:
            colour = "green" if line.verdict in _GOOD else "red" if line.verdict in _BAD else None
            click.secho(f"  {_SHORT.get(line.verdict, line.verdict)}", fg=colour, dim=line.verdict in _SHORT)


_POINTS = (
    "Points are shares of the peak, as in `flopwatch why`: recomputation and padding count there at the peak, and in "
    "milliseconds at the speed of the passes."
)
_LEAST_MS = 0.05
"""A part that is shorter in both runs would be printed as 0.0 ms."""
_PART_WIDTH = 35


def _print_per_step(per_step: PerStep, mfu: WaterfallChange | None) -> None:
    """Print what changed most, and the time per step of both runs by part, with points if there is a peak."""
    click.echo(f"\n{_wrapped(per_step.sentence)}\n")
    points = f"{'points A':>9}{'B':>6}" if mfu is not None else ""
    click.secho(f"  {'ms per step, whole run':<{_PART_WIDTH}}{'A':>9}{'B':>9}{'change':>9}{points}", dim=True)
    for part in per_step.parts:
        if max(part.a_ms, part.b_ms) >= _LEAST_MS:
            colour = "green" if part.change_ms < 0 else "red"
            is_told = abs(part.change_ms) >= LEAST_SHARE * per_step.a_ms
            cells = (part.name, part.a_ms, part.b_ms, part.a_points, part.b_points)
            _print_part(*cells, fg=colour if is_told else None)
    if mfu is None:
        _print_part("together", per_step.a_ms, per_step.b_ms, bold=True)
    else:
        _print_part("together, and MFU", per_step.a_ms, per_step.b_ms, mfu.mfu_a, mfu.mfu_b, bold=True)


def _print_part(
    name: str, a_ms: float, b_ms: float, *points: float | None, fg: str | None = None, bold: bool = False
) -> None:
    click.secho(f"  {name:<{_PART_WIDTH}}{a_ms:>9,.1f}{b_ms:>9,.1f}", nl=False, bold=bold)
    click.secho(f"{_signed(b_ms - a_ms):>9}", nl=False, fg=fg, bold=bold)
    known = [each for each in points if each is not None]
    click.secho(f"{known[0]:>9.1f}{known[1]:>6.1f}" if known else "", bold=bold)


def _value(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else _FORMATS[unit](value) if unit in _FORMATS else number(value, digits=4)


def _change(line: Line) -> str:
    if line.change is None:
        return f"{UNKNOWN}   "
    return f"{_signed(line.change)} {'pt' if line.unit == '%' else '% '}"


def _interval(line: Line) -> str:
    return "" if line.low is None or line.high is None else f"{_signed(line.low)} to {_signed(line.high)}"


def _signed(change: float) -> str:
    """The change with its sign and one decimal; a change that rounds to zero has no sign.

    >>> _signed(-4.56), _signed(0.01)
    ('-4.6', '0.0')
    """
    text = f"{change:+.1f}"
    return "0.0" if float(text) == 0 else text


def _print_remarks(comparison: Comparison) -> None:
    remarks = [
        "The verdicts compare the difference with the spread of step times within each run, in blocks of consecutive "
        "steps; about one verdict in twenty is wrong by chance. They do not cover slow drift or differences between "
        "runs, such as another node, other clock rates or other jobs on the machine: repeat both runs before you rely "
        "on a small difference."
    ]
    per_step = comparison.line("tokens_per_step")
    if per_step.change is not None and abs(per_step.change) > 1:
        remarks.insert(0, "The steps of the two runs differ in size: compare rates and MFU, not step times.")
    if comparison.per_step is not None:
        remarks[:0] = comparison.per_step.notes
    if comparison.waterfall is not None:
        remarks.insert(0, f"{comparison.waterfall.sentence} {_POINTS}")
    if comparison.waterfall is not None and any(entry.what == "peak FLOP/s" for entry in comparison.differences):
        remarks.insert(0, "The runs have different peaks: below a higher peak, the same steps lose more points.")
    wait, goodput = comparison.line("input_wait_percent"), comparison.line("perf/goodput_percent")
    if None in (wait.a, wait.b) and (goodput.a, goodput.b) != (None, None):
        remarks.insert(
            0,
            "Goodput leaves out the time between passes. Where passes were not timed, unknown input wait (–) counts as "
            "productive.",
        )
    if max(comparison.a.world_size, comparison.b.world_size) > 1:
        remarks.insert(0, "With several ranks, rates and shares are those of the rank that writes the log.")
    click.echo()
    for remark in remarks:
        click.secho(_wrapped(remark), dim=True)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, text_width())
