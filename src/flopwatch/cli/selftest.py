"""`flopwatch selftest`: checks on this machine that counting and monitoring work."""

import click


def selftest() -> None:
    """Check on this machine that FLOPs are counted correctly and that monitoring is cheap; takes ten seconds."""
    from flopwatch.cli.selftest_checks import CHECKS

    failed = 0
    for name, check in CHECKS.items():
        try:
            passed, detail = check()
        except Exception as error:
            passed, detail = False, f"{type(error).__name__}: {error}"
        failed += not passed
        click.echo(f"{'ok  ' if passed else 'FAIL'}  {name}: {detail}")
    if failed:
        raise SystemExit(1)
