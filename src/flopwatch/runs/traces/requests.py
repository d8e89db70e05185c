"""Requests for a trace of a training that runs in another process.

A request is a small file in the run's folder. Each rank of the run looks for it at the end of a logging window. Nobody
removes the file, because a rank may look late: each rank remembers which request it has seen, and does not answer one
that is older than the rank itself.
"""

import os
from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.files import read_object, write_json

MOST_STEPS = 10
"""A trace contains at most this many steps, because a longer one would take gigabytes."""
_REQUEST = "request.json"


def write_request(folder: Path, steps: int) -> Path:
    """Ask the run with this folder of traces for a trace of its next steps. Returns the file of the request."""
    if not 1 <= steps <= MOST_STEPS:
        raise InputError(f"--steps must be between 1 and {MOST_STEPS}, got {steps}: a longer trace takes gigabytes")
    file = folder / _REQUEST
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, {"steps": steps})
    except OSError as error:
        raise InputError(
            f"the request for a trace cannot be written to {str(file)!r}: {error.strerror}; "
            "run the command as the user who trains, or call monitor.capture_trace() in the training"
        ) from None
    return file


class TraceRequests:
    """Looks for new requests in a folder of traces, until it is closed. One that is there already is not new."""

    def __init__(self, folder: Path) -> None:
        self.is_closed = False
        self._file = folder / _REQUEST
        self._seen = self._look()

    def new_steps(self) -> int | None:
        """The steps that a new request asks for; None without one. Costs one `os.stat`."""
        found = self._look()
        if found is None or found == self._seen:
            return None
        self._seen = found
        steps = read_object(self._file).get("steps")
        return steps if isinstance(steps, int) and 1 <= steps <= MOST_STEPS else None

    def _look(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._file)
        except (OSError, ValueError):
            return None
        return found.st_mtime_ns, found.st_ino
