"""The commands of `flopwatch`. Their modules import heavy packages inside functions, so that `--help` is quick."""

from typing import Annotated

import typer

from flopwatch.cli.compare import compare
from flopwatch.cli.explain import explain
from flopwatch.cli.flops import flops, peak
from flopwatch.cli.report import report
from flopwatch.cli.trials.sweep import sweep
from flopwatch.cli.trials.trial import fit, trial
from flopwatch.cli.typer_internals import LightCommand, LightGroup
from flopwatch.cli.watch import watch
from flopwatch.version import __version__


def selftest() -> None:
    """Check counting, monitoring and its cost on this machine, in a few seconds."""
    from flopwatch.cli.selftest import run_checks

    failed = 0
    for check in run_checks():
        failed += not check.passed
        typer.echo(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.detail}")
    if failed:
        raise typer.Exit(1)


app = typer.Typer(
    name="flopwatch",
    cls=LightGroup,
    help="What a PyTorch training step really costs, to the FLOP, and how much of the hardware it uses.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text: drawing the help with rich doubles its time.
    rich_markup_mode=None,
)
app.command("peak", cls=LightCommand)(peak)
app.command("flops", cls=LightCommand)(flops)
app.command("watch", cls=LightCommand)(watch)
app.command("explain", cls=LightCommand)(explain)
app.command("compare", cls=LightCommand)(compare)
app.command("selftest", cls=LightCommand)(selftest)
app.command("trial", cls=LightCommand)(trial)
app.command("sweep", cls=LightCommand)(sweep)
app.command("fit", cls=LightCommand)(fit)
app.command("report", cls=LightCommand)(report)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"flopwatch {__version__}")
        raise typer.Exit


@app.callback()
def _flopwatch(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
