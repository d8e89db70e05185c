"""The command line: `flopwatch`. Answers without torch whenever the question does not need it."""

import sys
from collections.abc import Sequence

from flopwatch.errors import FlopwatchError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input ends with a message and exit status 2.

    Args:
        arguments: What follows `flopwatch`; None takes the process's own.
    """
    from flopwatch.cli.app import app

    try:
        app(args=None if arguments is None else list(arguments))
    except FlopwatchError as error:
        from flopwatch.cli.output import print_error

        print_error(str(error))
        sys.exit(2)
