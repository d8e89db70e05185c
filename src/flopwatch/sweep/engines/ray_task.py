"""What runs inside a Ray task: the supervisor of one trial, on whichever node Ray chose.

Nodes that see the sweep's folder write into it. Elsewhere the trial runs in a folder of its own and its files travel
back as the task's value; a heartbeat is then not seen until the end.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flopwatch.trial_files import log_file, run_folder, trial_folder

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
    from flopwatch.sweep.engines.ray_nodes import placed_agents  # it needs this module

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
