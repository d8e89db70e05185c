"""`flopwatch explain`: one MFU taken apart, so that anyone can check it by hand."""

from typing import Annotated

import typer


def explain(
    run_dir: Annotated[str, typer.Argument(metavar="RUN_DIR", help="Folder of a run, or its log file.")],
    step: Annotated[int | None, typer.Option(help="A step. Default: the newest logging window.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Where a logged MFU comes from: numerator, denominator, seconds, and the division."""
    from flopwatch.errors import InputError
    from flopwatch.explain import explain_step, explain_window
    from flopwatch.run_log import find_log, read_around

    log = read_around(find_log(run_dir), step)
    if step is None and not log.rows:
        raise InputError(f"{str(log.path)!r} has no logging window yet: the first one is written after log_every steps")
    explanation = explain_window(log, log.rows[-1]) if step is None else explain_step(log, step)
    if as_json:
        import json

        typer.echo(json.dumps(explanation.to_json(), indent=2))
    else:
        from flopwatch.cli.explain_text import print_explanation

        print_explanation(explanation)
