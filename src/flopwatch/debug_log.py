"""With `FLOPWATCH_LOG=debug` in the environment: prints what flopwatch catches and decides, for its maintainers."""

import logging
import os

is_on = os.environ.get("FLOPWATCH_LOG") == "debug"
_log = logging.getLogger("flopwatch.debug")
if is_on:
    _log.addHandler(logging.StreamHandler())
    _log.setLevel(logging.DEBUG)
    _log.propagate = False


def caught(where: str, error: BaseException) -> None:
    """Print an exception that goes no further, with its traceback."""
    if is_on:
        _log.debug("flopwatch: caught in %s", where, exc_info=error)


def decided(what: str, *facts: object) -> None:
    """Print a decision about the exactness of FLOPs."""
    if is_on:
        _log.debug(f"flopwatch: {what}", *facts)
