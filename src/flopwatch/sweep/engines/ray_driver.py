"""The process that talks to Ray: `python -m flopwatch.sweep.engines.ray_driver PIPE`.

Ray's core ends the process that drives it if the cluster's head has been away for 60 s (seen with Ray 2.60). Therefore
the runner does not import Ray. It starts this process, calls the methods of `Driver` through the pipe (see
`ray_connection.py`), and starts another one if this one ends.

An answer may be lost, so all methods may be called twice with the same arguments.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from flopwatch.sweep.engines import ray_task
from flopwatch.sweep.engines.ray_internals import forget_node, has_node_records, import_ray, node_of, start_local
from flopwatch.sweep.host.processes import PARENT, die_with_parent
from flopwatch.text import first_line

_GET_SECONDS = 60.0  # Reading the value of a finished task may take long, because the value may be on another node.
_ANSWER_SECONDS = 5.0  # Values of further tasks are left to the next call if those read so far took this long.


class Driver:
    """The tasks of a sweep's trials. `task` is an id that the runner chooses."""

    def __init__(self) -> None:
        self._references: dict[Any, str] = {}  # Ray's reference of each task that has not ended.
        self._ended: dict[str, ray_task.Returned] = {}  # Tasks that have ended, until the runner calls `forget`.
        self._groups: dict[str, Any] = {}  # The placement groups of trials with several nodes.
        self._orders: dict[str, ray_task.Order] = {}

    def connect(self, address: str | None, cpus: int | None, gpus: int | None) -> None:
        """Connect to the cluster at this address, or start a local Ray that ends with this process."""
        self._ray = import_ray()
        if address is None:
            start_local(self._ray, cpus, gpus)
        else:
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        self._remote = self._ray.remote(max_calls=1, max_retries=0, retry_exceptions=False)(ray_task.run_trial)

    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ray.nodes()
        return found

    def place(self, task: str, order: ray_task.Order) -> None:
        """Create the task of a trial."""
        if task in self._orders:
            return
        # A trial with one node needs no placement group, because Ray places all GPUs of a task on one node.
        options: dict[str, Any] = {
            "num_cpus": order.need["CPU"],
            "num_gpus": order.need["GPU"],
            "name": f"flopwatch {order.name}",
        }
        if order.nodes > 1:
            group = self._groups.get(task) or ray_task.place_group(order.nodes, order.need)
            self._groups[task] = group
            options["scheduling_strategy"] = ray_task.on_bundle(group, 0)
        self._references[self._remote.options(**options).remote(order)] = task
        self._orders[task] = order

    def ended(self, seconds: float) -> list[tuple[str, ray_task.Returned]]:
        """Wait until a task ends, but at most `seconds`. Return the ended tasks that were not forgotten."""
        waiting, began = list(self._references), time.monotonic()
        if self._ended or not waiting:
            seconds = 0.0
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
        """Release what belongs to a task whose end the runner knows."""
        self._ended.pop(task, None)
        self._references = {reference: name for reference, name in self._references.items() if name != task}
        if task in self._groups:
            ray_task.remove_group(self._groups.pop(task))
        if (order := self._orders.pop(task, None)) is not None:
            forget_node(order.token, order.name)


def serve(connection: "Connection[Any, Any]") -> None:
    """Answer calls until the runner closes the pipe, or the connection to Ray cannot be made."""
    driver = Driver()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, method, arguments = connection.recv()
            try:
                connection.send((number, None, getattr(driver, method)(*arguments)))
            except Exception as error:
                connection.send((number, type(error).__name__, first_line(error, 300)))
                if method == "connect":
                    return
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def main(pipe: int) -> int:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(os.environ.pop(PARENT)):
        return 1  # the runner ended before `die_with_parent` was called
    os.set_inheritable(pipe, False)
    if sys.path and sys.path[0] == os.getcwd():  # added by `python -m`; a user's own `ray.py` may be there
        del sys.path[0]
    serve(Connection(pipe))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
