"""The shortcut around typer's conversion changes how long a command takes, and nothing else."""

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from flopwatch.cli.typer_internals import LightCommand, LightGroup


@pytest.fixture(params=["light", "typer's own"])
def run(request):
    app = typer.Typer(cls=LightGroup if request.param == "light" else None, rich_markup_mode=None)

    @app.callback()
    def group():
        pass

    def shout(value: str | None) -> str | None:
        return value and value.upper()

    @app.command(cls=LightCommand if request.param == "light" else None)
    def show(
        text: Annotated[str, typer.Argument()],
        loud: Annotated[str | None, typer.Option(callback=shout)] = None,
        number: int = 3,
        ratio: float = 0.5,
        words: Annotated[list[str] | None, typer.Option()] = None,
        yes: bool = False,
    ):
        typer.echo(repr((text, loud, number, ratio, words, yes)))

    def invoke(*arguments):
        result = CliRunner().invoke(app, ["show", *arguments])
        return result.exit_code, result.output.strip()

    return invoke


def test_options_that_are_not_given_have_their_defaults(run):
    assert run("a") == (0, "('a', None, 3, 0.5, None, False)")


def test_values_become_what_the_command_declares(run):
    given = ("1", "--loud", "hey", "--number", "4", "--ratio", "2", "--words", "b", "--words", "c", "--yes")
    assert run(*given) == (0, "('1', 'HEY', 4, 2.0, ['b', 'c'], True)")


def test_a_value_of_the_wrong_kind_is_refused(run):
    status, output = run("a", "--number", "four")
    assert status == 2
    assert "--number" in output


def test_a_missing_argument_is_refused(run):
    status, output = run()
    assert status == 2
    assert "Missing argument" in output
