"""What runs inside a Ray task: the supervisor of one trial, on whichever node Ray chose.

Nodes that see the sweep's folder write into it. Elsewhere the trial runs in a folder of its own and its files travel
back as the task's value; a heartbeat is then not seen until the end.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flopwatch.records.trial_files import log_file, run_folder, trial_folder
from flopwatch.sweep.supervisor.job_nodes import LISTENER, TOKEN, encoded, listener

FOLDER_TOKEN = ".ray-token"
"""In the sweep's folder; a node that reads the same token sees the same folder."""

GUARD = Path(__file__).with_name("ray_guard.py")
SUPERVISOR = ("-m", "flopwatch.sweep.supervisor")

_FILE_BYTES = 4 << 20
_ALL_BYTES = 64 << 20
_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Order:
    """What a task is told.

    Attributes:
        sweep: The sweep's folder, as the runner sees it.
        name: The trial.
        token: What FOLDER_TOKEN holds in that folder.
        spec: The content of `trials/NAME/spec.json`.
        cwd: Where the runner was started: trainers are imported from there.
        environment: Set for the trial.
        nodes: Of the trial.
        need: Ray's resources on each of them, where it has several.
    """

    sweep: str
    name: str
    token: str
    spec: bytes
    cwd: str
    environment: Mapping[str, str]
    nodes: int = 1
    need: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Returned:
    """What a task gives back.

    Attributes:
        evidence: For `Ended`.
        files: By their path in the sweep's folder; empty where they are in place already.
    """

    evidence: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)


def run_trial(order: Order) -> Returned:
    """Run the supervisor to its end. Nothing it does raises; a node without flopwatch does."""
    announce(order.token, order.name)
    if sees_the_sweep(order):
        return Returned(_supervise_all(Path(order.sweep), order))
    with tempfile.TemporaryDirectory(prefix="flopwatch-") as folder:
        return _run_apart(Path(folder), order)


def sees_the_sweep(order: Order) -> bool:
    try:
        return (Path(order.sweep) / FOLDER_TOKEN).read_bytes() == order.token.encode()
    except OSError:
        return False


def _run_apart(sweep: Path, order: Order) -> Returned:
    for folder in (trial_folder(sweep, order.name), log_file(sweep, order.name).parent):
        folder.mkdir(parents=True)
    (trial_folder(sweep, order.name) / "spec.json").write_bytes(order.spec)
    evidence = _supervise_all(sweep, order)
    files, left_out = collect(sweep, order.name)
    if not left_out:
        return Returned(evidence, files)
    told = {"left_on_the_node": left_out}
    return Returned({**evidence, **told}, _with_evidence(files, str(_result(order.name)), told))


def _result(name: str) -> Path:
    return trial_folder(Path(), name) / "result.json"


def _with_evidence(files: dict[str, bytes], path: str, told: Mapping[str, Any]) -> dict[str, bytes]:
    """The files with this in the result's evidence: what did not travel is known wherever the result is."""
    try:
        content = json.loads(files[path])
        content["evidence"] = {**content.get("evidence", {}), **told}
        return {**files, path: json.dumps(content).encode()}
    except (KeyError, ValueError, TypeError, AttributeError):  # no result, or none that can be read
        return files


def _supervise_all(sweep: Path, order: Order) -> dict[str, Any]:
    if order.nodes == 1:
        return _supervise(sweep, order)

    with placed_agents(order) as meeting:
        variables = {**order.environment, **meeting.environment}
        return _supervise(sweep, replace(order, environment=variables), [meeting.socket.fileno()])


def _supervise(sweep: Path, order: Order, sockets: Sequence[int] = ()) -> dict[str, Any]:
    attempt = str(json.loads(order.spec).get("attempt", ""))
    supervisor = [sys.executable, *SUPERVISOR, str(sweep), order.name, attempt]
    guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid())]
    with tempfile.TemporaryFile() as output:
        status = subprocess.call(
            [*guard, *supervisor],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=order.cwd if os.path.isdir(order.cwd) else None,
            env={**os.environ, **order.environment},
            pass_fds=sockets,
            start_new_session=True,  # Ray sends SIGKILL to the worker's whole process group
        )
        output.seek(max(0, output.tell() - _TAIL_BYTES))
        printed = output.read().decode(errors="replace")
    return {"host": os.uname().nodename, **status_evidence(status), **({"log": printed} if printed else {})}


def status_evidence(status: int) -> dict[str, int]:
    """Of `ray_guard.py`, which hands on its child's signal as a shell does.

    >>> status_evidence(139)
    {'signal': 11}
    """
    if status < 0:
        return {"signal": -status}
    return {"signal": status - 128} if status > 128 else {"exit_code": status}


def collect(sweep: Path, name: str) -> tuple[dict[str, bytes], list[str]]:
    """The trial's files, and the names of those too large to travel; of a long log the end travels."""
    folders = (trial_folder(sweep, name), run_folder(sweep, name))
    found = [log_file(sweep, name), *(file for folder in folders for file in sorted(folder.rglob("*")))]
    files: dict[str, bytes] = {}
    left_out, total = [], 0
    for file in (file for file in found if file.is_file()):
        path, size = str(file.relative_to(sweep)), file.stat().st_size
        if file == log_file(sweep, name):
            files[path] = _tail(file)
        elif file == sweep / _result(name):  # without it the trial would be lost
            files[path] = file.read_bytes()
        elif size > _FILE_BYTES or total + size > _ALL_BYTES:
            left_out.append(path)
        else:
            files[path] = file.read_bytes()
        total += min(size, _FILE_BYTES)
    return files, left_out


def _tail(file: Path) -> bytes:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _FILE_BYTES))
        return stream.read()


def announce(token: str, name: str) -> None:
    """Tell the runner on which node the trial is: Ray never ends a task whose node is cut off, so the runner must."""
    import ray
    from ray.experimental import internal_kv

    node = ray.get_runtime_context().get_node_id()
    internal_kv._internal_kv_put(_key(token, name), node.encode(), overwrite=True)


def announced(token: str, name: str) -> str | None:
    """The node a trial runs on; None while it has not begun."""
    from ray.experimental import internal_kv

    node = internal_kv._internal_kv_get(_key(token, name))
    return None if node is None else node.decode()


def forget(token: str, name: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(_key(token, name))


def _key(token: str, name: str) -> bytes:
    return f"flopwatch/{token}/{name}".encode()


def put_in_place(sweep: Path, files: Mapping[str, bytes]) -> None:
    """Write what a node sent, `result.json` last: whoever sees it finds the rest."""
    for path in sorted(files, key=lambda path: path.endswith("/result.json")):
        file = sweep / path
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}.{os.getpid()}")
        beside.write_bytes(files[path])
        os.replace(beside, file)


# Trials over several nodes of a Ray cluster: a placement group with a bundle on each, the supervisor on the first.
#
# The task with the supervisor places the agents of the other nodes as tasks of its own, so Ray ends them with it.


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
                connection.sendall(encoded({**told, "is_lost": not is_own}))


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
    agent = [
        sys.executable,
        "-m",
        "flopwatch.sweep.supervisor.node_agent",
        str(trial_dir),
        str(told.node),
        told.address,
    ]
    subprocess.call(
        [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *agent],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=order.cwd if os.path.isdir(order.cwd) else None,
        env={**os.environ, **order.environment, TOKEN: told.token},
        start_new_session=True,  # Ray sends SIGKILL to the worker's whole process group
    )
