"""`flopwatch compare`: whether a change has made training faster, as far as two logs can tell."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flopwatch.run_comparison import Comparison


def compare(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="Folder of the run before, or its log file.")],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="Folder of the run after, or its log file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    fail_if_slower: Annotated[
        float | None,
        typer.Option(
            metavar="PERCENT",
            help="Exit with 1 if B is slower than A by more than this, and noise does not explain it.",
        ),
    ] = None,
) -> None:
    """Compare two runs: step time, rates, MFU; what differs between them, and what is noise."""
    from flopwatch.errors import InputError
    from flopwatch.run_comparison import compare as compare_logs
    from flopwatch.run_log import find_log, read_log

    if fail_if_slower is not None and not fail_if_slower >= 0:
        raise InputError(f"--fail-if-slower is a percentage of 0 or more, got {fail_if_slower:g}")
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
