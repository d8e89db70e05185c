"""Runs the command line: `flopwatch`, or `python -m flopwatch`."""

import os
import signal
import sys


def main() -> None:
    # Before the other imports, which take most of a second.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _leave)
    import flopwatch.cli.app  # noqa: F401 (click makes a KeyboardInterrupt of what follows a quiet end)
    from flopwatch.cli import main

    if is_default and not is_sweeping(sys.argv[1:]):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def is_sweeping(words: list[str]) -> bool:
    return words[:1] in (["sweep"], ["trial"], ["fit"]) and words[1:2] not in (["attach"], ["stop"])


def _leave(number: int, frame: object) -> None:
    """End at once on Ctrl-C, until the running trials have a handler of their own.

    A KeyboardInterrupt would print a traceback, and is lost if it is raised in a callback of the garbage collector.
    """
    try:
        sys.stdout.flush()
        os.write(2, b"flopwatch: stopped by Ctrl-C\n")
    finally:  # also if stdout is closed, or is being written to
        os._exit(130)


if __name__ == "__main__":
    main()
