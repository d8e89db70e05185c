"""The signature of a function declares the arguments and options of its command."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import click
import pytest
from click.testing import CliRunner

from flopwatch.cli import argument, flag
from flopwatch.cli.app import Command


@pytest.fixture
def run(monkeypatch):
    def show(
        text: Annotated[str, argument("A text.", "TEXT")],
        folder: Annotated[Path | None, flag("A folder.", "--folder", "-f")] = None,
        number: Annotated[int, flag("A number.")] = 3,
        ratio: Annotated[float | None, flag("A ratio.", metavar="X")] = None,
        words: Annotated[list[str] | None, flag("Words.")] = None,
        is_loud: Annotated[bool, flag("Loud.", "--loud")] = False,
        wait: Annotated[bool, flag("Wait.", "--wait/--no-wait")] = True,
    ):
        """Show what was given."""
        click.echo(repr((text, folder, number, ratio, words, is_loud, wait)))

    module = ModuleType("flopwatch.cli.shown")
    module.show = show
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def invoke(*arguments):
        result = CliRunner().invoke(Command("show", "shown", "Show."), arguments)
        return result.exit_code, result.output.strip()

    return invoke


def test_options_that_are_not_given_have_their_defaults(run):
    assert run("a") == (0, "('a', None, 3, None, None, False, True)")


def test_values_become_what_the_command_declares(run):
    given = ("1", "-f", "x", "--number", "4", "--ratio", "2", "--words", "b", "--words", "c", "--loud", "--no-wait")
    assert run(*given) == (0, f"('1', {Path('x')!r}, 4, 2.0, ['b', 'c'], True, False)")


def test_a_value_of_the_wrong_kind_is_refused(run):
    status, output = run("a", "--number", "four")
    assert status == 2
    assert "--number" in output


def test_a_missing_argument_is_refused(run):
    status, output = run()
    assert status == 2
    assert "Missing argument 'TEXT'" in output


def test_the_help_lists_arguments_types_and_defaults(run):
    _, output = run("--help")
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert "TEXT A text. [required]" in lines
    assert "-f, --folder <path> A folder." in lines
    assert "--number <int> A number. [default: 3]" in lines
    assert "--ratio X A ratio." in lines
