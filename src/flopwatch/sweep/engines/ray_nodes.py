"""Trials over several nodes of a Ray cluster: a placement group with a bundle on each, the supervisor on the first.

The task with the supervisor places the agents of the other nodes as tasks of its own, so Ray ends them with it.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch.sweep.engines.ray_task import GUARD, Order, sees_the_sweep
from flopwatch.sweep.job_messages import LISTENER, TOKEN, written
from flopwatch.sweep.job_nodes import listener
from flopwatch.trial_files import log_file, trial_folder

_LEAVE_SECONDS = 20.0


def place_group(nodes: int, need: Mapping[str, float]) -> Any:
    """A bundle of these resources on each of so many different nodes; Ray makes it when there is room."""
    from ray.util import placement_group

    bundle = {resource: amount for resource, amount in need.items() if amount > 0}
    return placement_group([bundle] * nodes, strategy="STRICT_SPREAD")


def remove_group(group: Any) -> None:
    from ray.util import remove_placement_group

    with contextlib.suppress(Exception):  # where Ray does not answer, the group goes with us
        remove_placement_group(group)


def on_bundle(group: Any, index: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def fits_spread(nodes: int, per_node: Sequence[int]) -> int:
    """How many trials run at once, each on so many different nodes, when a node has room for so many of their parts.

    >>> fits_spread(2, [1, 1, 1]), fits_spread(2, [4, 1]), fits_spread(2, [3, 3])
    (1, 1, 3)
    """
    trials = sum(per_node) // nodes
    while trials and sum(min(room, trials) for room in per_node) < trials * nodes:
        trials -= 1
    return trials


@dataclass(frozen=True, slots=True)
class AgentOrder:
    """What the task of one further node is told.

    Attributes:
        order: What the task of the first node was told.
        node: The number of the node among those of the trial.
        address: Host and port of the supervisor.
        token: The secret it asks for.
    """

    order: Order
    node: int
    address: str
    token: str


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the agents meet their supervisor: a socket that is open before either is there."""

    socket: socket.socket
    token: str
    address: str

    @property
    def environment(self) -> dict[str, str]:
        return {LISTENER: str(self.socket.fileno()), TOKEN: self.token}


@contextlib.contextmanager
def placed_agents(order: Order) -> Iterator[Meeting]:
    """In the task of the first node: tasks for the others, which connect to the socket."""
    import ray

    own, token = listener(""), secrets.token_hex(16)
    address = f"{ray.util.get_node_ip_address()}:{own.getsockname()[1]}"
    meeting = Meeting(own, token, address)
    group = ray.util.get_current_placement_group()
    remote = ray.remote(max_calls=1, max_retries=0, retry_exceptions=False)(run_agent)
    references = {}
    for node in range(1, order.nodes):
        needs = {"num_cpus": order.need["CPU"], "num_gpus": order.need["GPU"]}
        placed = remote.options(**needs, scheduling_strategy=on_bundle(group, node), name=f"flopwatch {order.name}")
        references[placed.remote(AgentOrder(order, node, address, token))] = node
    threading.Thread(target=_watch, args=[references, meeting], daemon=True).start()
    try:
        yield meeting
    finally:
        with contextlib.suppress(Exception):
            left = ray.wait(list(references), num_returns=len(references), timeout=_LEAVE_SECONDS)[1]
            for reference in left:
                ray.cancel(reference, force=True)


def _watch(references: Mapping[Any, int], meeting: Meeting) -> None:
    """A node that dies or cannot run its agent says nothing to the supervisor, so we do."""
    import ray

    left = list(references)
    while left:
        (ready, *_), left = ray.wait(left, num_returns=1, fetch_local=False)
        try:
            ray.get(ready)
        except Exception as error:
            is_own = isinstance(error, ray.exceptions.RayTaskError)
            said = (str(getattr(error, "cause", None) or error).strip().splitlines() or [""])[0][:300]
            told = {"token": meeting.token, "gone": references[ready], "why": f"{type(error).__name__}: {said}"}
            host, _, port = meeting.address.rpartition(":")
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(written({**told, "is_lost": not is_own}))


def run_agent(told: AgentOrder) -> None:
    """In the task of a further node: its agent, in the sweep's folder or in one of its own."""
    order = told.order
    if sees_the_sweep(order):
        with log_file(Path(order.sweep), order.name).open("ab") as log:
            _run(told, trial_folder(Path(order.sweep), order.name), log)
        return
    with tempfile.TemporaryDirectory(prefix="flopwatch-node-") as folder:
        trial_dir = trial_folder(Path(folder), order.name)
        trial_dir.mkdir(parents=True)
        (trial_dir / "spec.json").write_bytes(order.spec)
        with tempfile.TemporaryFile() as output:
            _run(told, trial_dir, output)


def _run(told: AgentOrder, trial_dir: Path, output: Any) -> None:
    order = told.order
    agent = [sys.executable, "-m", "flopwatch.sweep.node_agent", str(trial_dir), str(told.node), told.address]
    subprocess.call(
        [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *agent],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=order.cwd if os.path.isdir(order.cwd) else None,
        env={**os.environ, **order.environment, TOKEN: told.token},
        start_new_session=True,  # Ray sends SIGKILL to the worker's whole process group
    )
