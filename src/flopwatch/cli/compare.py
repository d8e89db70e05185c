"""`flopwatch compare`: whether a change has made training faster, as far as two logs can tell."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flopwatch.run_comparison import Comparison


def compare(
    run_a: Annotated[str, typer.Argument(metavar="A", help="Folder of the run before, its log file, or a sweep.")],
    run_b: Annotated[str, typer.Argument(metavar="B", help="Folder of the run after, its log file, or a sweep.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    md: Annotated[str | None, typer.Option(metavar="PATH", help="Of two sweeps: write Markdown.")] = None,
    fail_if_slower: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="Exit with 1 if B is slower than A by more than this, and noise does not explain it.",
        ),
    ] = None,
) -> None:
    """Compare two runs, or two sweeps: step time, rates, MFU; what differs between them, and what is noise."""
    from flopwatch.cli.compare_sweeps import compare_two_sweeps, is_sweep, refuse_mixed
    from flopwatch.errors import InputError
    from flopwatch.run_comparison.compare import compare as compare_logs
    from flopwatch.run_log import find_log, read_log

    if fail_if_slower is not None and not fail_if_slower >= 0:
        raise InputError(f"--fail-if-slower is a percentage of 0 or more, got {fail_if_slower:g}")
    if is_sweep(run_a) != is_sweep(run_b):
        refuse_mixed(run_a, run_b)
    if is_sweep(run_a):
        compare_two_sweeps(run_a, run_b, as_json=as_json, md=md, fail_if_slower=fail_if_slower)
        return
    if md is not None:
        raise InputError("--md is for two sweeps; of two runs there is text and --json")
    comparison = compare_logs(read_log(find_log(run_a)), read_log(find_log(run_b)))
    if as_json:
        import json

        typer.echo(json.dumps(comparison.to_json(), indent=2))
    else:
        from flopwatch.cli.compare_text import print_comparison

        print_comparison(comparison)
    if fail_if_slower is not None:
        _refuse_slower(comparison, fail_if_slower)


def _refuse_slower(comparison: "Comparison", percent: float) -> None:
    """Speak on stderr, so that `--json` stays JSON. What cannot be judged is an error: a gate must not pass unseen."""
    from flopwatch.errors import InputError
    from flopwatch.run_comparison import speed_line
    from flopwatch.run_comparison.bootstrap import FEWEST_STEPS

    line = speed_line(comparison)
    if line is None or line.change is None or line.low is None:
        raise InputError(
            f"--fail-if-slower needs {FEWEST_STEPS} timed steps outside warm-up in each run, "
            f"and there are {comparison.a.compared} in A and {comparison.b.compared} in B: train for longer"
        )
    is_slower = line.verdict == "slower" and line.change < -percent
    said = f"{line.label} {line.change:+.1f} % ({line.verdict}), and {percent:g} % slower is allowed"
    typer.secho(f"{'failed' if is_slower else 'passed'}: {said}", fg="red" if is_slower else None, err=True)
    if is_slower:
        raise typer.Exit(1)
