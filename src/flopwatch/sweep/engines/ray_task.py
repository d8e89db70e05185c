"""What runs in processes of Ray: the driver, which talks to Ray, and the tasks of trials, on the nodes that Ray chose.

The driver is `python -m flopwatch.sweep.engines.ray_task PIPE`. It calls the methods of `Driver` that the runner
sends through the pipe, each until Ray has answered, and sends back what has happened.

The task of a trial runs its supervisor. If the node can read the sweep's folder, the trial writes its files there.
Otherwise the trial runs in a temporary folder, and the task returns its files as a value.

Undocumented names of Ray are used here and in `ray.py` (`_OUTAGE_ERRORS`, `_OTHER_CLUSTER`, `_RECONNECT`), each with a
comment that says why. Checked with Ray 2.60.0.
"""

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flopwatch.library_internals import ray_records
from flopwatch.optional import require
from flopwatch.records.trial_files import RESULT, SPEC, log_file, run_folder, trial_folder
from flopwatch.sweep.host.processes import PARENT, ends_with_parent
from flopwatch.text import first_line

FOLDER_TOKEN = ".ray-token"
"""A file in the sweep's folder. A node that reads the expected token in it has access to the same folder."""

_TICK_SECONDS = 0.05
_RETRY_SECONDS = 1.0  # This is the time between two tries of a call while Ray does not answer.
_GET_SECONDS = 60.0  # Reading the value of a finished task may take long, because the value may be on another node.
_LEAVE_SECONDS = 20.0

# Limits of what a task returns through Ray's object store, which is small (see `start_local`).
_FILE_BYTES = 4 << 20
_ALL_BYTES = 64 << 20
_TAIL_BYTES = 4000

_RAY_TOKEN = secrets.token_hex(32)  # the same during the whole process, because Ray's core reads it only once


def local_environment() -> dict[str, str]:
    """Return environment variables for a local Ray. Ray ignores those that it does not know."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Without this variable, Ray uses the address of the network card and listens on all interfaces.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray runs its workers at nice 15. Trials would inherit this, and other load would make their steps slower.
        "RAY_worker_niceness": "0",
        # Without these, Ray's authentication would depend on whether the home folder contains a token for Ray.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _RAY_TOKEN,
    }


def start_local(ray: Any, cpus: int | None, gpus: int | None) -> None:
    """Start a local Ray with one node, without dashboard. It ends together with this process."""
    ray.init(
        address="local",  # otherwise Ray connects to an older cluster if it finds that cluster's files
        num_cpus=cpus,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 << 20,  # the minimum, because tasks return little data
        _node_ip_address="127.0.0.1",  # undocumented; makes Ray listen on loopback only
    )


@dataclass(frozen=True, slots=True)
class Order:
    """The argument of a trial's task.

    Attributes:
        token: Content of the file FOLDER_TOKEN in that folder.
        spec: Content of `trials/NAME/spec.json`.
        need: The cores and GPUs on each node: `{"CPU": 1, "GPU": 0.5}`.
    """

    sweep: str
    name: str
    token: str
    spec: bytes
    cwd: str
    environment: Mapping[str, str]
    need: Mapping[str, float]

    @property
    def record(self) -> bytes:
        """The key of its node in Ray's key-value store."""
        return f"flopwatch/{self.token}/{self.name}".encode()

    def options(self) -> dict[str, Any]:
        """Return Ray's options for the task of this trial."""
        return {"num_cpus": self.need["CPU"], "num_gpus": self.need["GPU"], "name": f"flopwatch {self.name}"}


@dataclass(frozen=True, slots=True)
class Returned:
    """The return value of a trial's task.

    Attributes:
        evidence: What is known about the trial's end, for `Ended.evidence`.
        files: Content of each file, by its path in the sweep's folder. Empty if the node has access to that folder.
    """

    evidence: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Placed:
    """A task, and Ray's reference of it."""

    order: Order
    reference: Any = None
    is_recalled: bool = False


class Driver:
    """The tasks of a sweep's trials. `task` is an id that the runner chooses.

    It sends `("nodes", Ray's list of nodes, node of each begun task)` every few seconds, the latter only if a node is
    dead, `("ended", task, what it returned, whether recall cancelled it)` and `("failed", class of an exception, its
    message)`.
    """

    def __init__(self, pipe: "Connection[Any, Any]") -> None:
        self._pipe = pipe
        self.tasks: dict[str, _Placed] = {}
        self._next_nodes = 0.0
        self.is_connected = False

    def connect(self, address: str | None, cpus: int | None, gpus: int | None, nodes_every_seconds: float) -> None:
        """Connect to the cluster at this address, or start a local Ray that ends with this process."""
        self._ray, self._nodes_every = require("ray", "ray"), nodes_every_seconds
        if address is None:
            start_local(self._ray, cpus, gpus)
        else:
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        self._run_trial = _remote(run_trial)
        self.is_connected = True

    def place(self, task: str, order: Order) -> None:
        placed = self.tasks.setdefault(task, _Placed(order))
        placed.reference = self._run_trial.options(**order.options()).remote(order)

    def recall(self) -> None:
        """Cancel the tasks that have not begun, if Ray can tell."""
        begun = self._begun() if ray_records() is not None else self.tasks
        for task, placed in self.tasks.items():
            if task not in begun and not placed.is_recalled:
                self._ray.cancel(placed.reference, force=True)
                placed.is_recalled = True

    def cancel(self, tasks: Sequence[str]) -> None:
        for task in tasks:
            if task in self.tasks:
                self._ray.cancel(self.tasks[task].reference, force=True)

    def _begun(self) -> dict[str, str]:
        if (records := ray_records()) is None:
            return {}
        nodes = {task: records.get(placed.order.record) for task, placed in self.tasks.items()}
        return {task: node.decode() for task, node in nodes.items() if node is not None}

    def report(self) -> None:
        """Wait a moment for a task to end, and send what has happened."""
        tasks = {placed.reference: task for task, placed in self.tasks.items() if placed.reference is not None}
        for reference in self._ray.wait(list(tasks), timeout=_TICK_SECONDS, fetch_local=False)[0] if tasks else ():
            placed = self.tasks.pop(tasks[reference])
            self._pipe.send(("ended", tasks[reference], self._value(reference), placed.is_recalled))
            self._forget(placed)
        if time.monotonic() >= self._next_nodes:
            nodes = self._ray.nodes()
            begun = {} if all(node["Alive"] for node in nodes) else self._begun()
            self._pipe.send(("nodes", nodes, begun))
            self._next_nodes = time.monotonic() + self._nodes_every

    def _value(self, reference: Any) -> Returned:
        try:
            returned: Returned = self._ray.get(reference, timeout=_GET_SECONDS)
            return returned
        except Exception as error:  # noqa: BLE001 - Ray has many errors for a dead task, and a task may raise anything
            cause = getattr(error, "cause", None)  # Ray wraps it in a generated class: `RayTaskError(ValueError)`
            cause = cause if isinstance(cause, Exception) else error
            return Returned({"error": type(cause).__name__, "detail": first_line(cause, 300)})

    def _forget(self, placed: _Placed) -> None:
        with contextlib.suppress(Exception):
            if (records := ray_records()) is not None:
                records.delete(placed.order.record)


def drive(pipe: "Connection[Any, Any]") -> None:
    """Do what the runner asks until it closes the pipe, or the connection to Ray cannot be made."""
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # It reads all the time: otherwise the runner would block in `send` while this process waits for Ray.
    threading.Thread(target=_read, args=[pipe, asked], daemon=True).start()
    driver, calls = Driver(pipe), deque[Any]()
    while True:
        with contextlib.suppress(queue.Empty):
            calls.append(asked.get(timeout=0.0 if calls or driver.tasks else _TICK_SECONDS))
            while True:
                calls.append(asked.get_nowait())
        if None in calls:
            return
        try:
            while calls:
                method, arguments = calls[0]
                getattr(driver, method)(*arguments)
                calls.popleft()
            driver.report()
        except Exception as error:  # noqa: BLE001 - Ray has many errors for an outage; the runner decides
            pipe.send(("failed", type(error).__name__, first_line(error, 300)))
            if not driver.is_connected:
                return
            time.sleep(_RETRY_SECONDS)


def _read(pipe: "Connection[Any, Any]", asked: "queue.SimpleQueue[Any]") -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked.put(pipe.recv())
    asked.put(None)


def main(pipe: int) -> int:
    if not ends_with_parent(signal.SIGKILL):
        return 1
    del os.environ[PARENT]
    os.set_inheritable(pipe, False)
    if sys.path and sys.path[0] == os.getcwd():  # added by `python -m`; a user's own `ray.py` may be there
        del sys.path[0]
    with contextlib.suppress(ConnectionError):  # the runner has ended
        drive(Connection(pipe))
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    return 0


def _remote(function: Any) -> Any:
    return require("ray", "ray").remote(max_calls=1, max_retries=0, retry_exceptions=False)(function)


def run_trial(order: Order) -> Returned:
    """Run the supervisor until it ends. A failure of the trial raises no exception."""
    if (records := ray_records()) is not None:
        node = require("ray", "ray").get_runtime_context().get_node_id()
        records.put(order.record, node.encode(), overwrite=True)
    if _sees_the_sweep(order):
        return Returned(_supervise(Path(order.sweep), order))
    with tempfile.TemporaryDirectory(prefix="flopwatch-") as folder:
        return _run_apart(Path(folder), order)


def _sees_the_sweep(order: Order) -> bool:
    try:
        return (Path(order.sweep) / FOLDER_TOKEN).read_bytes() == order.token.encode()
    except OSError:
        return False


def _run_apart(sweep: Path, order: Order) -> Returned:
    for folder in (trial_folder(sweep, order.name), log_file(sweep, order.name).parent):
        folder.mkdir(parents=True)
    (trial_folder(sweep, order.name) / SPEC).write_bytes(order.spec)
    evidence = _supervise(sweep, order)
    files, left_out = collect(sweep, order.name)
    if left_out:
        missing = {"left_on_the_node": left_out}
        evidence |= missing
        file = _result(order.name)
        with contextlib.suppress(KeyError, ValueError, TypeError, AttributeError):  # no result, or an unreadable one
            result = json.loads(files[file])
            files[file] = json.dumps({**result, "evidence": {**result.get("evidence", {}), **missing}}).encode()
    return Returned(evidence, files)


def _result(name: str) -> str:
    return str(trial_folder(Path(), name) / RESULT)


def _supervise(sweep: Path, order: Order) -> dict[str, Any]:
    """Run the supervisor; return the evidence of its end."""
    words = [str(sweep), order.name, str(json.loads(order.spec).get("attempt", ""))]
    with contextlib.ExitStack() as held:
        output = held.enter_context(tempfile.TemporaryFile())
        status = _call("flopwatch.sweep.supervisor", words, order, output)
        output.seek(max(0, output.tell() - _TAIL_BYTES))
        printed = output.read().decode(errors="replace")
    ended = {"signal": -status} if status < 0 else {"exit_code": status}
    return {"host": os.uname().nodename, **ended, **({"log": printed} if printed else {})}


def _call(module: str, words: Sequence[str], order: Order, output: Any) -> int:
    """Run a supervisor. It survives, if Ray ends this worker and kills the worker's children.

    Ray sends SIGKILL to them (seen with Ray 2.60). The child is therefore a shell, and its child is the guard (see
    `supervisor/guard.py`), which receives SIGTERM when the shell is killed. Without the shell, Ray would kill the
    guard, and nothing would end the trial if its supervisor was killed in the same moment.
    """
    status = subprocess.call(
        ["/bin/sh", "-c", f'{PARENT}=$$ "$@"; exit $?', "sh", sys.executable, "-m", module, *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=order.cwd if os.path.isdir(order.cwd) else None,
        env={**os.environ, **order.environment},
        start_new_session=True,  # so that this process survives Ray's SIGKILL to the process group of the worker
    )
    return 128 - status if status > 128 else status  # a shell adds 128 to the number of a signal


def collect(sweep: Path, name: str) -> tuple[dict[str, bytes], list[str]]:
    """Return the content of the trial's files (only the end of a long log), and the paths of files above the limit."""
    log, files, left_out, total = log_file(sweep, name), {}, [], 0
    folders = (trial_folder(sweep, name), run_folder(sweep, name))
    for file in (log, *(file for folder in folders for file in sorted(folder.rglob("*")))):
        if not file.is_file():
            continue
        path, size = str(file.relative_to(sweep)), file.stat().st_size
        is_small = size <= _FILE_BYTES and total + size <= _ALL_BYTES
        # The result is always returned, because without it the trial would count as lost.
        if is_small or file == log or path == _result(name):
            with file.open("rb") as stream:
                stream.seek(max(0, size - _FILE_BYTES) if file == log else 0)
                files[path] = stream.read()
        else:
            left_out.append(path)
        total += min(size, _FILE_BYTES)
    return files, left_out


if __name__ == "__main__":
    from flopwatch.sweep.engines import ray_task  # Ray would send the functions of `__main__` to nodes as code

    sys.exit(ray_task.main(int(sys.argv[1])))
