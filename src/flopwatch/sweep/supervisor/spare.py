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

from flopwatch.records.trial_files import log_file
from flopwatch.sweep.host.processes import PARENT, die_with_parent

_END_SECONDS = 5.0


class SpareSupervisor:
    """Starts the supervisors of a sweep on this machine, and keeps one more that waits for its trial."""

    def __init__(self, sweep: Path) -> None:
        self._sweep = sweep
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, name: str, attempt: str, variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Start a trial's supervisor with the environment of this process and `variables`."""
        environment = {**os.environ, PARENT: str(os.getpid()), **variables}
        process = self._hand_over(name, attempt, environment) or self._start_new(name, attempt, environment)
        self._start_spare()
        return process

    def _hand_over(self, name: str, attempt: str, environment: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
        """Give the trial to the spare; None if there is none, for example because the kernel has killed it."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            return None
        process, self._process = self._process, None
        order = {
            "arguments": [name, attempt],
            "cwd": _working_folder(),
            "set": {key: value for key, value in environment.items() if self._environment.get(key) != value},
            "unset": [key for key in self._environment if key not in environment],
        }
        # The log is opened here: on a shared file system, another process may not see its folder yet.
        with contextlib.suppress(ConnectionError), self._pipe, log_file(self._sweep, name).open("ab") as log:
            socket.send_fds(self._pipe, [b"{"], [log.fileno()])
            self._pipe.sendall(json.dumps(order).encode()[1:])
            return process
        process.wait()
        return None

    def _start_new(self, name: str, attempt: str, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        with log_file(self._sweep, name).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "flopwatch.sweep.supervisor", str(self._sweep), name, attempt],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # otherwise Ctrl-C in the terminal would reach the supervisor too
            )

    def _start_spare(self) -> None:
        reads, self._pipe = socket.socketpair()
        self._environment = {**os.environ, PARENT: str(os.getpid())}
        with reads as order:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flopwatch.sweep.supervisor", str(self._sweep)],
                stdin=order.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )

    def close(self) -> None:
        """End the spare."""
        process, self._process = self._process, None
        if process is None:
            return
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()


def _working_folder() -> str | None:
    with contextlib.suppress(OSError):  # it was deleted
        return os.getcwd()
    return None


def wait_for_trial() -> list[str]:
    """In the spare: wait for a trial, take over its environment, folder and log, and return its name and attempt.

    Exits if the runner ends, or has no more trials.
    """
    die_with_parent(signal.SIGTERM)
    with socket.socket(fileno=os.dup(0)) as pipe:
        content, handles, _, _ = socket.recv_fds(pipe, 1, 1)
        if not content:
            sys.exit(0)
        with pipe.makefile("rb") as stream:
            order = json.loads(content + stream.read())
    os.environ.update(order["set"])
    for key in order["unset"]:
        os.environ.pop(key, None)
    if order["cwd"] is not None and order["cwd"] != _working_folder():
        os.chdir(order["cwd"])
    with open(os.devnull, "rb") as nothing, os.fdopen(handles[0], "ab") as log:
        for ours, standard in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(ours.fileno(), standard)
    arguments: list[str] = order["arguments"]
    return arguments
