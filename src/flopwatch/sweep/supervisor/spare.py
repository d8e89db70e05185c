"""Starts the supervisor of the next trial ahead, so that its imports are done when the current trial ends.

A supervisor needs 0.2 s of computing to import its modules, more than everything else between two local trials. A spare
supervisor is a process `python -m flopwatch.sweep.supervisor SWEEP_FOLDER` that has done its imports and waits on its
standard input for the name of a trial. It holds no device and no file of a trial, and ends with its runner.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from flopwatch.records.trial_files import log_file
from flopwatch.sweep.host.processes import PARENT, die_with_parent

_END_SECONDS = 5.0


class SpareSupervisor:
    """Starts the supervisors of a sweep on this machine, and keeps one more that waits for its trial."""

    def __init__(self, sweep: Path) -> None:
        self._sweep = sweep.resolve()  # because the spare stays in the folder in which it was started
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, name: str, attempt: str, variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        # The log is opened here: on a shared file system, another process may not see its folder yet.
        with log_file(self._sweep, name).open("ab") as log:
            process = self._hand_over([name, attempt], variables, log)
            process = process or self._new_process([name, attempt], variables, subprocess.DEVNULL, log)
        reads, self._pipe = socket.socketpair()
        self._environment = dict(os.environ)
        with reads as order:
            self._process = self._new_process([], {}, order, subprocess.DEVNULL)
        return process

    def _hand_over(
        self, arguments: list[str], variables: Mapping[str, str], log: IO[bytes]
    ) -> "subprocess.Popen[bytes] | None":
        """Give the trial to the spare; None if it was killed, or if the environment has changed since."""
        if self._process is None or self._process.poll() is not None or self._environment != os.environ:
            self.close()
            return None
        process, self._process = self._process, None
        with contextlib.suppress(ConnectionError), self._pipe:
            order = {"arguments": arguments, "variables": variables}
            socket.send_fds(self._pipe, [json.dumps(order).encode()], [log.fileno()])
            return process
        process.wait()
        return None

    def _new_process(
        self, arguments: list[str], variables: Mapping[str, str], order: Any, output: Any
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "flopwatch.sweep.supervisor", str(self._sweep), *arguments],
            stdin=order,
            stdout=output,
            stderr=output,
            env={**os.environ, PARENT: str(os.getpid()), **variables},
            start_new_session=True,  # otherwise Ctrl-C in the terminal would reach the supervisor too
        )

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()


def wait_for_trial() -> list[str]:
    """In the spare: wait for a trial, take over its variables and its log, and return its name and attempt.

    Exits if the runner ends, or has no more trials.
    """
    die_with_parent(signal.SIGTERM)
    with socket.socket(fileno=os.dup(0)) as pipe:
        content, handles, _, _ = socket.recv_fds(pipe, 1 << 16, 1)
    if not content:
        sys.exit(0)
    order = json.loads(content)
    os.environ.update(order["variables"])
    with open(os.devnull, "rb") as nothing, os.fdopen(handles[0], "ab") as log:
        for ours, standard in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(ours.fileno(), standard)
    arguments: list[str] = order["arguments"]
    return arguments
