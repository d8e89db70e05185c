"""`--help` works with every release of click and rich that can be installed."""

import pytest

from flopwatch.cli.app import app


@pytest.mark.portable
def test_every_command_has_help(flopwatch):
    names = list(app.commands)
    assert len(names) >= 14

    for name in names:
        status, out, err = flopwatch(name, "--help")
        assert (status, err) == (0, "")
        assert out.startswith(f"Usage: flopwatch {name} ")
