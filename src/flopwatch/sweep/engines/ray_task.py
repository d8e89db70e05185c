"""The Ray task of a trial, which runs the trial's supervisor on the node that Ray chose.

If the node can read the sweep's folder, the trial writes its files there. Otherwise the trial runs in a temporary
folder, and the task returns its files as a value.

A trial with several nodes has a placement group with one bundle per node. The task of the first node runs the
supervisor, and starts the agents of the other nodes as child tasks, so that Ray ends them when the first task ends.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flopwatch.records.trial_files import RESULT, SPEC, log_file, run_folder, trial_folder
from flopwatch.sweep.engines.ray_internals import publish_node
from flopwatch.sweep.host.processes import PARENT
from flopwatch.sweep.supervisor.ranks import LISTENER, TOKEN, encoded, listener
from flopwatch.text import first_line

FOLDER_TOKEN = ".ray-token"
"""A file in the sweep's folder. A node that reads the expected token in it has access to the same folder."""

# Limits of what a task returns through Ray's object store, which is small (see `start_local`).
_FILE_BYTES = 4 << 20
_ALL_BYTES = 64 << 20
_TAIL_BYTES = 4000
_LEAVE_SECONDS = 20.0


_NODE_VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "VIRTUAL_ENV", "HOME", "TMPDIR", "TMP", "TEMP"),
    *("USER", "LOGNAME", "SHELL", "SHLVL", "PWD", "OLDPWD", "_", "HOSTNAME", "HOST", "TERM", "DISPLAY"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("FLOPWATCH_PARENT_PID", "FLOPWATCH_CORES", "FLOPWATCH_GPUS", "FLOPWATCH_SLOT_DIR"),
)
_NODE_PREFIXES = ("RAY_", "SLURM_", "SSH_", "XDG_", "DBUS_", "CONDA_", "NVIDIA_", "KUBERNETES_")


def without_node_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the runner's environment variables for a trial, without those that describe the runner's own machine.

    >>> without_node_variables({"HF_HOME": "/data", "PATH": "/bin", "RAY_ADDRESS": "auto"})
    {'HF_HOME': '/data'}
    """
    own = {name for name in environment if name in _NODE_VARIABLES or name.startswith(_NODE_PREFIXES)}
    return {name: value for name, value in environment.items() if name not in own}


@dataclass(frozen=True, slots=True)
class Order:
    """The argument of a trial's task.

    Attributes:
        token: Content of the file FOLDER_TOKEN in that folder.
        spec: Content of `trials/NAME/spec.json`.
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
    """The return value of a trial's task.

    Attributes:
        evidence: What is known about the trial's end, for `Ended.evidence`.
        files: Content of each file, by its path in the sweep's folder. Empty if the node has access to that folder.
    """

    evidence: Mapping[str, Any]
    files: Mapping[str, bytes] = field(default_factory=dict)


def run_trial(order: Order) -> Returned:
    """Run the supervisor until it ends. A failure of the trial raises no exception."""
    publish_node(order.token, order.name)
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
    (trial_folder(sweep, order.name) / SPEC).write_bytes(order.spec)
    evidence = _supervise_all(sweep, order)
    files, left_out = collect(sweep, order.name)
    if left_out:
        missing = {"left_on_the_node": left_out}
        evidence |= missing
        with contextlib.suppress(KeyError, ValueError, TypeError, AttributeError):  # no result, or an unreadable one
            result = json.loads(files[_result(order.name)])
            result["evidence"] = {**result.get("evidence", {}), **missing}
            files[_result(order.name)] = json.dumps(result).encode()
    return Returned(evidence, files)


def _result(name: str) -> str:
    return str(trial_folder(Path(), name) / RESULT)


def _supervise_all(sweep: Path, order: Order) -> dict[str, Any]:
    if order.nodes == 1:
        return _supervise(sweep, order, {}, [])
    with listener("") as meeting:
        variables = {LISTENER: str(meeting.fileno()), TOKEN: secrets.token_hex(16)}
        with placed_agents(order, meeting.getsockname()[1], variables[TOKEN]):
            return _supervise(sweep, order, variables, [meeting.fileno()])


def _supervise(sweep: Path, order: Order, variables: Mapping[str, str], sockets: Sequence[int]) -> dict[str, Any]:
    attempt = str(json.loads(order.spec).get("attempt", ""))
    with tempfile.TemporaryFile() as output:
        words = [str(sweep), order.name, attempt]
        status = _call("flopwatch.sweep.supervisor", words, order, output, variables, sockets)
        output.seek(max(0, output.tell() - _TAIL_BYTES))
        printed = output.read().decode(errors="replace")
    ended = {"signal": -status} if status < 0 else {"exit_code": status}
    return {"host": os.uname().nodename, **ended, **({"log": printed} if printed else {})}


def _call(
    module: str,
    words: Sequence[str],
    order: Order,
    output: Any,
    variables: Mapping[str, str],
    sockets: Sequence[int] = (),
) -> int:
    """Run a supervisor or an agent. It survives, if Ray ends this worker and kills the worker's children.

    Ray sends SIGKILL to them (seen with Ray 2.60), but this child is only a guard (see `supervisor/guard.py`). When the
    guard is killed, the supervisor or agent below it receives SIGTERM and ends its trial.
    """
    return subprocess.call(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=order.cwd if os.path.isdir(order.cwd) else None,
        env={**os.environ, **order.environment, PARENT: str(os.getpid()), **variables},
        pass_fds=sockets,
        start_new_session=True,  # so that this process survives Ray's SIGKILL to the process group of the worker
    )


def collect(sweep: Path, name: str) -> tuple[dict[str, bytes], list[str]]:
    """Return the content of the trial's files (only the end of a long log), and the paths of files above the limit."""
    folders = (trial_folder(sweep, name), run_folder(sweep, name))
    found = [log_file(sweep, name), *(file for folder in folders for file in sorted(folder.rglob("*")))]
    files: dict[str, bytes] = {}
    left_out, total = [], 0
    for file in (file for file in found if file.is_file()):
        path, size = str(file.relative_to(sweep)), file.stat().st_size
        if file == log_file(sweep, name):
            files[path] = _tail(file)
        elif path == _result(name):  # always returned, because without it the trial would count as lost
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


def put_in_place(sweep: Path, files: Mapping[str, bytes]) -> None:
    """Write the files that a node returned, `result.json` last, because it marks the trial's files as complete."""
    for path in sorted(files, key=lambda path: path.endswith("/result.json")):
        file = sweep / path
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}.{os.getpid()}")
        beside.write_bytes(files[path])
        os.replace(beside, file)


def on_bundle(group: Any, index: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


@dataclass(frozen=True, slots=True)
class AgentOrder:
    """The argument of `run_agent`, the task on every node but the first. The last three are the supervisor's."""

    order: Order
    node: int
    host: str
    port: int
    token: str


@contextlib.contextmanager
def placed_agents(order: Order, port: int, token: str) -> Iterator[None]:
    """In the first node's task, start the tasks of the other nodes, whose agents connect to this port."""
    import ray

    group = ray.util.get_current_placement_group()
    remote = ray.remote(max_calls=1, max_retries=0, retry_exceptions=False)(run_agent)
    references = {}
    for node in range(1, order.nodes):
        needs = {"num_cpus": order.need["CPU"], "num_gpus": order.need["GPU"]}
        placed = remote.options(**needs, scheduling_strategy=on_bundle(group, node), name=f"flopwatch {order.name}")
        references[placed.remote(AgentOrder(order, node, ray.util.get_node_ip_address(), port, token))] = node
    threading.Thread(target=_watch, args=[references, port, token], daemon=True).start()
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            left = ray.wait(list(references), num_returns=len(references), timeout=_LEAVE_SECONDS)[1]
            for reference in left:
                ray.cancel(reference, force=True)


def _watch(references: Mapping[Any, int], port: int, token: str) -> None:
    import ray

    left = list(references)
    while left:
        (ready, *_), left = ray.wait(left, num_returns=1, fetch_local=False)
        try:
            ray.get(ready)
        except Exception as error:
            is_own = isinstance(error, ray.exceptions.RayTaskError)
            message = first_line(getattr(error, "cause", None) or error, 300)
            report = {"token": token, "gone": references[ready], "why": f"{type(error).__name__}: {message}"}
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(encoded({**report, "is_lost": not is_own}))


def run_agent(agent: AgentOrder) -> None:
    order = agent.order
    if sees_the_sweep(order):
        with log_file(Path(order.sweep), order.name).open("ab") as log:
            _run(agent, trial_folder(Path(order.sweep), order.name), log)
        return
    with tempfile.TemporaryDirectory(prefix="flopwatch-node-") as folder:
        trial_dir = trial_folder(Path(folder), order.name)
        trial_dir.mkdir(parents=True)
        (trial_dir / SPEC).write_bytes(order.spec)
        with tempfile.TemporaryFile() as output:
            _run(agent, trial_dir, output)


def _run(agent: AgentOrder, trial_dir: Path, output: Any) -> None:
    words = [str(trial_dir), str(agent.node), f"{agent.host}:{agent.port}"]
    _call("flopwatch.sweep.supervisor.ranks", words, agent.order, output, {TOKEN: agent.token})
