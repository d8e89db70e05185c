"""`flopwatch selftest`: does it work on this machine?"""

import typer


def selftest() -> None:
    """Check counting, monitoring and its cost on this machine; takes a few seconds."""
    from flopwatch.selftest import run_checks

    failed = 0
    for check in run_checks():
        failed += not check.passed
        typer.echo(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.detail}")
    if failed:
        raise typer.Exit(1)
