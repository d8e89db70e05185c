"""The runner's side of the process that talks to Ray (`ray_driver.py`)."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from flopwatch.sweep.engines.ray_internals import reconnect_seconds
from flopwatch.sweep.host.processes import PARENT
from flopwatch.text import one_line

_ANSWER_SECONDS = 5.0  # The runner waits this long for an answer, and then shows that Ray does not answer.
_LATE_SECONDS = 0.25  # While an answer is late, each further call waits this long for it.
_SILENCE_SECONDS = 90.0  # A process that gives no answer for this long after Ray itself should have ended it is killed.
_SHUTDOWN_SECONDS = 20.0
_TAIL_BYTES = 4000

_OUTAGE_ERRORS = ("ConnectionError", "TimeoutError", "RpcError", "RaySystemError", "GetTimeoutError")
"""Exceptions in the driver process that can mean that Ray's head does not answer, by name."""


class RayConnection:
    """A driver process that is connected to Ray, or is connecting.

    Args:
        environment: Environment variables for the process, added to those of the runner.
        arguments: The arguments of `Driver.connect`.
    """

    def __init__(self, environment: Mapping[str, str], *arguments: Any) -> None:
        ours, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flopwatch.sweep.engines.ray_driver", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, **environment, PARENT: str(os.getpid())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # otherwise Ctrl-C in the terminal would reach it too
            )
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._number = 0
        self._is_unanswered = False
        self._is_connected = False
        self._failing_since: float | None = None
        self._send("connect", *arguments)

    def wait_until_connected(self, seconds: float) -> None:
        """Raise an exception if the process could not connect to Ray. Without this call, the next `call` does so."""
        self._receive(seconds)

    def call(self, method: str, *arguments: Any, seconds: float = 0.0) -> Any:
        """Call a method of `Driver` that may take `seconds`.

        Raises:
            ConnectionError: The process has ended, or Ray does not answer it.
            TimeoutError: There is no answer yet. It is discarded when it comes.
            RuntimeError: The method raised another exception.
        """
        if self._is_unanswered:
            self._receive(_LATE_SECONDS)
        self._send(method, *arguments)
        return self._receive(seconds + _ANSWER_SECONDS)

    def _send(self, method: str, *arguments: Any) -> None:
        self._number += 1
        try:
            self._connection.send((self._number, method, arguments))
        except OSError:
            raise self._ended() from None
        self._is_unanswered = True

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._connection.poll(seconds):
                self._note_failure()
                raise TimeoutError("no answer yet" if self._is_connected else "connecting again")
            _, error, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        self._is_unanswered = False
        if error is not None and (error in _OUTAGE_ERRORS or not self._is_connected):
            self._note_failure()
            raise ConnectionError(f"{error}: {answer}")
        if error is not None:
            raise RuntimeError(f"{error}: {answer}")
        self._failing_since, self._is_connected = None, True
        return answer

    def _note_failure(self) -> None:
        """Kill the process if it has failed for so long that Ray should have ended it."""
        now = time.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since > reconnect_seconds() + _SILENCE_SECONDS:
            self.kill()

    def _ended(self) -> ConnectionError:
        self.kill()
        return ConnectionError(self.last_words())

    def last_words(self) -> str:
        """Return the last line that the process printed, for example Ray's reason for ending it."""
        with contextlib.suppress(OSError, ValueError):
            size = self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, size - _TAIL_BYTES))
            lines = self._output.read().decode(errors="replace").split("\n")
            if said := [line for line in lines if line.strip()]:
                return one_line(said[-1], 200)
        return "the process that talks to Ray ended"

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process, and with it a local Ray."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SHUTDOWN_SECONDS)
        self.kill()
        self._output.close()
