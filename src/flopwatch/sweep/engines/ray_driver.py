"""The process that talks to Ray, `python -m flopwatch.sweep.engines.ray_driver PIPE`, and the runner's side of it.

Ray's core ends the process that drives it if the cluster's head has been away for 60 s (seen with Ray 2.60). Therefore
the runner does not import Ray. Its `RayConnection` starts this process, which calls the methods of `Driver` that come
through the pipe, and the engine starts another one if this one ends.

An answer may be lost, so all methods of `Driver` may be called twice with the same arguments.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from flopwatch.optional import require
from flopwatch.sweep.engines import ray_task
from flopwatch.sweep.engines.ray_internals import (
    OTHER_CLUSTER,
    OUTAGE_ERRORS,
    forget_node,
    has_node_records,
    node_of,
    reconnect_seconds,
    start_local,
)
from flopwatch.sweep.host.processes import PARENT, ends_with_parent
from flopwatch.text import first_line, one_line

_GET_SECONDS = 60.0  # Reading the value of a finished task may take long, because the value may be on another node.
_ANSWER_SECONDS = 5.0  # The runner waits this long for an answer, and then shows that Ray does not answer.
_LATE_SECONDS = 0.25  # While an answer is late, each further call waits this long for it.
_SILENCE_SECONDS = 90.0  # A process that gives no answer for this long after Ray itself should have ended it is killed.
_SHUTDOWN_SECONDS = 20.0
_PATIENCE_SECONDS = 24 * 3600.0  # an unreachable cluster is waited for at most one day
_TAIL_BYTES = 4000


class RayOutage:
    """Suppresses errors while Ray does not answer, for example because its head node restarts.

    `since` is the time at which the outage began; None while Ray answers.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._message = ""

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Suppress errors which show that Ray does not answer, for at most a day. Raise all other errors."""
        try:
            yield
        except (ConnectionError, TimeoutError) as error:
            self.since = time.monotonic() if self.since is None else self.since
            if time.monotonic() - self.since > _PATIENCE_SECONDS:
                raise
            self._message = one_line(str(error), 200)

    def state(self) -> str:
        if self.since is None:
            return ""
        return f"Ray has not answered for {time.monotonic() - self.since:.0f} s: {self._message}"


class RayConnection:
    """A driver process that is connected to Ray, or is connecting; `arguments` are those of `Driver.connect`."""

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
        try:
            self._connection.send((method, arguments))
        except OSError:
            raise self._ended() from None
        self._is_unanswered = True

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._connection.poll(seconds):
                self._note_failure()
                raise TimeoutError("no answer yet" if self._is_connected else "connecting again")
            error, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        self._is_unanswered = False
        if error is not None and OTHER_CLUSTER in str(answer):
            self.kill()  # it belongs to the old cluster and cannot join the new one
            raise ConnectionError("the head was started again as a new cluster")
        if error is not None and (error in OUTAGE_ERRORS or not self._is_connected):
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


class Driver:
    """The tasks of a sweep's trials. `task` is an id that the runner chooses."""

    def __init__(self) -> None:
        self._references: dict[Any, str] = {}  # Ray's reference of each task that has not ended.
        self._ended: dict[str, ray_task.Returned] = {}  # Tasks that have ended, until the runner calls `forget`.
        self._groups: dict[str, Any] = {}  # The placement groups of trials with several nodes.
        self._orders: dict[str, ray_task.Order] = {}

    def connect(self, address: str | None, cpus: int | None, gpus: int | None) -> None:
        """Connect to the cluster at this address, or start a local Ray that ends with this process."""
        self._ray = require("ray", "ray")
        if address is None:
            start_local(self._ray, cpus, gpus)
        else:
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        self._remote = self._ray.remote(max_calls=1, max_retries=0, retry_exceptions=False)(ray_task.run_trial)

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ray.nodes()
        return found

    def place(self, task: str, order: ray_task.Order) -> None:
        if task in self._orders:
            return
        # A trial with one node needs no placement group, because Ray places all GPUs of a task on one node.
        options: dict[str, Any] = {
            "num_cpus": order.need["CPU"],
            "num_gpus": order.need["GPU"],
            "name": f"flopwatch {order.name}",
        }
        if order.nodes > 1:
            bundle = {resource: amount for resource, amount in order.need.items() if amount > 0}
            if task not in self._groups:
                nodes = [bundle] * order.nodes
                self._groups[task] = self._ray.util.placement_group(nodes, strategy="STRICT_SPREAD")
            options["scheduling_strategy"] = ray_task.on_bundle(self._groups[task], 0)
        self._references[self._remote.options(**options).remote(order)] = task
        self._orders[task] = order

    def ended(self, seconds: float) -> list[tuple[str, ray_task.Returned]]:
        waiting = list(self._references)
        seconds = 0.0 if self._ended else seconds
        if waiting and self._ray.wait(waiting, num_returns=1, timeout=seconds, fetch_local=False)[0]:
            began = time.monotonic()
            for reference in self._ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)[0]:
                self._ended[self._references[reference]] = self._outcome(reference)
                del self._references[reference]
                if time.monotonic() - began > _ANSWER_SECONDS:
                    break
        return list(self._ended.items())

    def _outcome(self, reference: Any) -> ray_task.Returned:
        try:
            returned: ray_task.Returned = self._ray.get(reference, timeout=_GET_SECONDS)
            return returned
        except Exception as error:  # Ray has many errors for a dead task, and a task may raise anything
            cause = getattr(error, "cause", None)  # Ray wraps it in a generated class: `RayTaskError(ValueError)`
            cause = cause if isinstance(cause, Exception) else error
            return ray_task.Returned({"error": type(cause).__name__, "detail": first_line(cause, 300)})

    def begun(self) -> Mapping[str, str | None]:
        """Return the node of each task that has not ended, None if it has not begun; empty if Ray cannot tell."""
        if not has_node_records():
            return {}
        orders = {task: self._orders[task] for task in self._references.values()}
        return {task: node_of(order.token, order.name) for task, order in orders.items()}

    def cancel(self, tasks: Sequence[str]) -> None:
        for reference, task in self._references.items():
            if task in tasks:
                self._ray.cancel(reference, force=True)

    def forget(self, task: str) -> None:
        self._ended.pop(task, None)
        self._references = {reference: name for reference, name in self._references.items() if name != task}
        if task in self._groups:
            with contextlib.suppress(Exception):  # if Ray does not answer, it removes the group when this process ends
                self._ray.util.remove_placement_group(self._groups.pop(task))
        if (order := self._orders.pop(task, None)) is not None:
            forget_node(order.token, order.name)


def serve(connection: "Connection[Any, Any]") -> None:
    """Answer calls until the runner closes the pipe, or the connection to Ray cannot be made."""
    driver = Driver()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            method, arguments = connection.recv()
            try:
                connection.send((None, getattr(driver, method)(*arguments)))
            except Exception as error:
                connection.send((type(error).__name__, first_line(error, 300)))
                if method == "connect":
                    return
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def main(pipe: int) -> int:
    if not ends_with_parent(signal.SIGKILL):
        return 1
    del os.environ[PARENT]
    os.set_inheritable(pipe, False)
    if sys.path and sys.path[0] == os.getcwd():  # added by `python -m`; a user's own `ray.py` may be there
        del sys.path[0]
    serve(Connection(pipe))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
