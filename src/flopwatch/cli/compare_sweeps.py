"""`flopwatch compare SWEEP_A SWEEP_B`: two sweeps, pair by pair."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from flopwatch.sweep_comparison import SweepComparison


def is_sweep(path: str) -> bool:
    """A folder `flopwatch sweep` wrote; a run whose log is called results.jsonl is none."""
    from flopwatch.errors import InputError
    from flopwatch.run_log import find_log
    from flopwatch.sweep_reading import SWEEP
    from flopwatch.sweep_results import is_sweep_folder

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
    """A run and a sweep have nothing in common that could be divided."""
    from flopwatch.errors import InputError

    sweep, other = (a, b) if is_sweep(a) else (b, a)
    if not Path(other).expanduser().exists():
        raise InputError(f"{other!r} is not there, and {sweep!r} is the folder of a sweep: name another sweep's folder")
    raise InputError(
        f"{sweep!r} is the folder of a sweep and {other!r} is not: compare two sweeps, or two runs "
        "(folders with a training_log.jsonl)"
    )


def compare_two_sweeps(a: str, b: str, *, as_json: bool, md: str | None, fail_if_slower: float | None) -> None:
    """Print or write the comparison; exit status 0, unless `fail_if_slower` says otherwise."""
    from flopwatch.errors import InputError
    from flopwatch.report.capture import capture_sweep
    from flopwatch.sweep_comparison import compare_sweeps

    if as_json and md == "-":
        raise InputError("--json and --md - would both write to standard output; name a file for the Markdown")
    comparison = compare_sweeps(capture_sweep(Path(a).expanduser()), capture_sweep(Path(b).expanduser()))
    if md is not None:
        from flopwatch.cli.report_exports import write_file
        from flopwatch.sweep_comparison.markdown import comparison_markdown

        write_file(md, comparison_markdown(comparison).encode("utf-8"))
    if as_json:
        from flopwatch.sweep_comparison.as_json import comparison_json

        typer.echo(comparison_json(comparison))
    elif md is None:
        from flopwatch.cli.compare_sweeps_text import print_sweep_comparison

        print_sweep_comparison(comparison)
    if md not in (None, "-"):
        typer.echo(f"Written: {md}", err=as_json)
    if fail_if_slower is not None:
        _refuse_slower_sweep(comparison, fail_if_slower)


def _refuse_slower_sweep(comparison: "SweepComparison", percent: float) -> None:
    """Speak on stderr, so that `--json` stays JSON. What cannot be judged is an error: a gate must not pass unseen."""
    from flopwatch.errors import InputError
    from flopwatch.plain_text import one_line

    rates = {pair.trial: pair.ratios.get("time") for pair in comparison.pairs}
    judged = {trial: ratio for trial, ratio in rates.items() if ratio is not None and ratio.verdict != "too few steps"}
    if not judged:
        raise InputError(
            "--fail-if-slower needs a configuration that ran in both sweeps with 6 measured steps or more; "
            "there is none here"
        )
    slower = [
        trial for trial, ratio in judged.items() if ratio.verdict == "worse" and 100 * (ratio.ratio - 1) > percent
    ]
    gone = [pair.trial for pair in comparison.changed_outcomes if pair.outcome_a == "ok"]
    for word, trials in ((f"slower by more than {percent:g} %", slower), ("no longer ok", gone)):
        if trials:
            typer.secho(f"failed: {len(trials):,} {word}, such as {one_line(trials[0])}", fg="red", err=True)
    if slower or gone:
        raise typer.Exit(1)
    typer.secho(f"passed: of {len(judged):,} pairs none is slower by more than {percent:g} %", err=True)
