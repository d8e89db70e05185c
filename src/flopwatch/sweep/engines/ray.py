"""Runs trials as Ray tasks, on this machine or on an existing cluster. Needs `flopwatch[ray]`.

Each task runs the supervisor of one trial. A process of its own, the driver, talks to Ray; both are in `ray_task.py`.
Ray's core ends the process that drives it if the cluster's head has been away for 60 s (seen with Ray 2.60), so the
runner itself does not import Ray, and starts another driver until Ray answers again.

Ray ends the tasks of the old driver, at the latest when the head is back. A trial that had not begun gets a new task;
if its old task starts after all, only one of the two supervisors can claim the trial.
"""

import contextlib
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from flopwatch.errors import InputError
from flopwatch.optional import require
from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import SPEC, trial_folder
from flopwatch.sweep.engines import ray_task
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import Trial, attempt_of, has_begun, is_supervised, own_result
from flopwatch.sweep.host.processes import PARENT
from flopwatch.text import one_line

_NODES_EVERY_SECONDS = 5.0  # This is the time between two reads of the list of nodes.
_ANSWER_SECONDS = 15.0  # If the driver sends nothing for this time, Ray does not answer.
_LEAVE_SECONDS = 30.0  # After the end of a task, its supervisor may need this long to kill the trial's processes.
_CONNECT_SECONDS = 180.0  # The start of a local Ray may take long on a busy machine.
_RESTART_SECONDS = 5.0  # This is the least time between two starts of the driver.
_TICK_SECONDS = 0.05
_LISTEN_SECONDS = 1.0  # While Ray does not answer, results are looked for in the sweep's folder this often.
_SILENCE_SECONDS = 90.0  # A driver that sends nothing for this long after Ray itself should have ended it is killed.
_SHUTDOWN_SECONDS = 20.0
_PATIENCE_SECONDS = 24 * 3600.0  # an unreachable cluster is waited for at most one day
_TAIL_BYTES = 4000

_RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""How long Ray's core waits for the cluster's head before it ends the driver; 60 s if this variable is not set."""

_OUTAGE_ERRORS = ("ConnectionError", "TimeoutError", "RpcError", "RaySystemError", "GetTimeoutError")
"""Exceptions in the driver which can mean that Ray's head does not answer. With other names, that ends the sweep."""

_OTHER_CLUSTER = "WrongClusterID"
"""In the message of an AuthenticationError: a new cluster that does not know the driver has the address."""

_DRIVER_ENDED = {"error": "RayDriverEnded"}

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


class Cluster:
    """A Ray cluster, or a local Ray without an address, and the driver, which is replaced when it has ended.

    Attributes:
        nodes: The nodes as Ray lists them. They may change during a sweep.
        begun: The node of each task that has begun, by the task's id, if a node is dead and Ray can tell.
        ended: What the driver sent of each task that has ended: its id, what it returned, and whether it was recalled.
        stage: That of the driver. What the last driver sent has been read when it is `ended`.
        silent_since: The time since which Ray does not answer, for example because its head restarts; None if it does.
    """

    def __init__(self, address: str | None, cpus: int | None, gpus: int | None) -> None:
        self._arguments = (address, cpus, gpus)
        self.nodes: list[dict[str, Any]] = []
        self.ended: list[tuple[Any, ...]] = []
        self.silent_since: float | None = None
        self._start_driver()

    def _start_driver(self) -> None:
        self.begun: Mapping[str, str] = {}
        self.stage: Literal["connecting", "connected", "ended"] = "connecting"
        self._started = self._heard = time.monotonic()
        self._trouble = "connecting again"
        (address, *amounts), ray = self._arguments, sys.modules.get("ray")
        environment = ray_task.local_environment() if address is None else {}
        if address is None and ray is not None and ray.is_initialized():  # use the Ray of the calling program
            address, amounts, environment = ray.get_runtime_context().gcs_address, [None, None], {}
        ours, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flopwatch.sweep.engines.ray_task", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, **environment, PARENT: str(os.getpid())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # otherwise Ctrl-C in the terminal would reach it too
            )
        self._pipe: Connection[Any, Any] = Connection(ours.detach())
        self.send("connect", address, *amounts, _NODES_EVERY_SECONDS)

    def connect(self) -> None:
        while self.stage != "connected":
            self.listen(1.0)
            if self.silent_since is not None:
                self.close()
                if self._arguments[0] is None:
                    raise InputError(f"cannot start a local Ray: {self._trouble}")
                where = f"{self._arguments[0]!r}; check the address"
                raise InputError(f"cannot connect to Ray at {where}: {self._trouble}")

    def send(self, method: str, *arguments: Any) -> None:
        """Have the driver call a method of `Driver`, again and again while Ray does not answer it."""
        with contextlib.suppress(OSError):  # the driver has ended, which `listen` will notice
            self._pipe.send((method, arguments))

    def listen(self, seconds: float) -> None:
        """Wait until the driver sends something, but at most `seconds`, and note all that it has sent.

        Raises:
            ConnectionError: Ray has not answered for a day.
            RuntimeError: The driver met an error that is no outage.
        """
        try:
            while self._pipe.poll(seconds):
                self._note(*self._pipe.recv())
                seconds = 0.0
        except (EOFError, ConnectionError):
            self.stage = "ended"
            self._note_trouble(self._last_words() if self.silent_since is None else self._trouble)
            time.sleep(seconds)
            return
        quiet = time.monotonic() - self._heard
        allowed = _ANSWER_SECONDS if self.stage == "connected" else _CONNECT_SECONDS
        if quiet > allowed:
            self._note_trouble("no answer yet")
        if quiet > allowed + float(os.environ.get(_RECONNECT) or 60) + _SILENCE_SECONDS:
            self.kill_driver()  # Ray should have ended it

    def _note(self, kind: str, *facts: Any) -> None:
        self._heard = time.monotonic()
        if kind == "nodes":
            self.nodes, self.begun = facts
            self.stage, self.silent_since = "connected", None
        elif kind == "ended":
            self.ended.append(facts)
        elif _OTHER_CLUSTER in facts[1]:
            self._note_trouble("the head was started again as a new cluster")
            self.kill_driver()  # it belongs to the old cluster and cannot join the new one
        elif facts[0] in _OUTAGE_ERRORS or self.stage == "connecting":
            self._note_trouble(": ".join(facts))
        else:
            raise RuntimeError(": ".join(facts))

    def _note_trouble(self, trouble: str) -> None:
        self._trouble, now = one_line(trouble, 200), time.monotonic()
        self.silent_since = self.silent_since or now
        if now - self.silent_since > _PATIENCE_SECONDS:
            raise ConnectionError(self._trouble)

    def _last_words(self) -> str:
        handle = self._output.fileno()
        printed = os.pread(handle, _TAIL_BYTES, max(0, os.fstat(handle).st_size - _TAIL_BYTES))
        lines = [line for line in printed.decode(errors="replace").split("\n") if line.strip()]
        return lines[-1] if lines else "the process that talks to Ray ended"

    def resources(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self.nodes if node["Alive"]]

    def outage(self) -> str:
        if self.silent_since is None:
            return ""
        return f"Ray has not answered for {time.monotonic() - self.silent_since:.0f} s: {self._trouble}"

    def restart_driver(self) -> bool:
        """Start another driver, unless the last one was started only a moment ago; return whether it was started."""
        is_due = time.monotonic() - self._started >= _RESTART_SECONDS
        if is_due:
            self.close()
            self._start_driver()
        return is_due

    def kill_driver(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the driver, and with it a local Ray."""
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_SHUTDOWN_SECONDS)
        self.kill_driver()
        self._output.close()


@dataclass(slots=True)
class _RayTask:
    """A submitted trial.

    Attributes:
        id: Its id at the driver, which differs for each attempt.
        evidence: How the task ended; None before. Its supervisor may still be killing the trial's processes then, for
            which the engine waits until the time `deadline`.
    """

    trial: Trial
    need: Mapping[str, float]
    id: str
    evidence: Mapping[str, Any] | None = None
    deadline: float = math.inf

    def end(self, evidence: Mapping[str, Any]) -> None:
        self.evidence, self.deadline = evidence, time.monotonic() + _LEAVE_SECONDS

    def is_gone(self) -> bool:
        if self.evidence is None:
            return False
        return time.monotonic() > self.deadline or not is_supervised(self.trial.sweep, self.trial.name)


class RayEngine:
    """Runs trials as Ray tasks.

    Args:
        address: Address of a cluster, as for `ray.init` (`auto`, `10.0.0.1:6379`). None starts a local Ray, which
            listens on loopback only and has no dashboard.
        cpus_per_trial: Number of cores of a trial whose configuration does not set it.
        gpus_per_trial: Number of GPUs of a trial whose configuration does not set it. Trials with a fraction share a
            GPU. None means one per process if the cluster has GPUs and the trial's device is not the CPU.
        cpus: Number of cores that a local Ray may use; None means all.
        gpus: Number of GPUs that a local Ray may use; None means all.

    The nodes need no shared file system: a node that cannot read the sweep's folder returns the trial's files when the
    trial has ended. Until then the trial's progress is not visible. flopwatch must be installed on each node.
    """

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        cpus_per_trial: int = 1,
        gpus_per_trial: float | None = None,
        cpus: int | None = None,
        gpus: int | None = None,
    ) -> None:
        self._address, self._local = address, (cpus, gpus)
        self._cpus_per_trial, self._gpus_per_trial = cpus_per_trial, gpus_per_trial
        self._token = uuid.uuid4().hex
        self._tasks: dict[str, _RayTask] = {}  # by the names of their trials
        self._withdrawn: list[str] = []  # the trials that the next `withdraw` will return
        self._is_withdrawing = self._is_cancelled = False

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """Connect to Ray. Return the names of trials in `unfinished` that an earlier runner's supervisors still run."""
        if find_spec("ray") is None:
            require("ray", "ray")  # raises an error that says how to install it
        self._cluster = Cluster(self._address, *self._local)
        self._cluster.connect()
        self._sweep = sweep
        (sweep / ray_task.FOLDER_TOKEN).write_text(self._token)
        for trial in unfinished:
            if is_supervised(sweep, trial.name):
                self._tasks[trial.name] = _RayTask(trial, {}, "")
                self._tasks[trial.name].end({"error": "TaskCancelledError"})
        return list(self._tasks)

    def room(self, next_up: TrialSpec) -> int:
        """Return how many more trials to give to Ray: a few more than can run at once, so that no GPU is idle between
        two trials. All other trials wait in the runner, which skips them if a smaller trial runs out of memory.
        """
        self._cluster.listen(0.0)
        if self._cluster.silent_since is not None:
            return 0
        need, nodes = self._need(next_up), self._cluster.resources()
        capacity = fits(need, nodes)
        if capacity == 0 and self._address is None:  # in a cluster, a larger node may join later
            raise InputError(
                f"a trial needs {_text(need)}, but this machine has {_text(nodes[0])}; "
                "request less, or set a cluster with --engine-option address=ADDRESS"
            )
        if capacity == 0:
            return 0
        taken = [task.need for task in self._placed()]
        return max(0, min(capacity - taken.count(need), spare(need, nodes, taken)) + max(2, capacity // 10))

    def _need(self, spec: TrialSpec) -> dict[str, float]:
        gpus = spec.gpus or self._gpus_per_trial
        if gpus is None:
            has_gpus = spec.device != "cpu" and any(node.get("GPU") for node in self._cluster.resources())
            gpus = float(spec.processes if has_gpus else 0)
        # Ray accepts a fraction of one GPU, but above one GPU only whole numbers.
        cpus = spec.cpus or max(self._cpus_per_trial, spec.processes)
        return {"CPU": cpus, "GPU": gpus if gpus <= 1 else math.ceil(gpus)}

    def _placed(self) -> list[_RayTask]:
        return [task for task in self._tasks.values() if task.evidence is None]

    def submit(self, trials: Sequence[Trial]) -> None:
        """Create the tasks of these trials. If Ray does not answer, the driver creates them later."""
        self._is_withdrawing = False
        for trial in trials:
            task_id = f"{trial.name} {attempt_of(trial.sweep, trial.name)}"
            self._tasks[trial.name] = _RayTask(trial, self._need(trial.spec), task_id)
            self._place(self._tasks[trial.name])

    def _place(self, task: _RayTask) -> None:
        trial, environment = task.trial, without_node_variables(os.environ)
        if not task.need["GPU"]:  # Ray would not set CUDA_VISIBLE_DEVICES, so the trial would see all GPUs
            environment["CUDA_VISIBLE_DEVICES"] = ""
        spec = (trial_folder(trial.sweep, trial.name) / SPEC).read_bytes()
        where = (str(trial.sweep.resolve()), trial.name, self._token, spec, os.getcwd())
        self._cluster.send("place", task.id, ray_task.Order(*where, environment, task.need))

    def wait(self, seconds: float) -> Sequence[Ended]:
        deadline = time.monotonic() + seconds
        while True:
            is_any_leaving = len(self._placed()) < len(self._tasks)
            left = max(0.0, deadline - time.monotonic())
            self._cluster.listen(min(left, _TICK_SECONDS if is_any_leaving else _LISTEN_SECONDS))
            self._note_ends()
            self._keep_driver()
            gone = {name: task for name, task in self._tasks.items() if task.is_gone()}
            if gone or time.monotonic() >= deadline:
                self._tasks = {name: task for name, task in self._tasks.items() if name not in gone}
                return [Ended(name, task.evidence or {}) for name, task in gone.items()]

    def _note_ends(self) -> None:
        placed = {task.id: task for task in self._placed()}
        ended, self._cluster.ended = self._cluster.ended, []
        for task_id, returned, is_recalled in ended:
            if (task := placed.pop(task_id, None)) is not None:
                put_in_place(self._sweep, returned.files)
                self._end(task, returned.evidence, is_recalled=is_recalled)
        dead = {node["NodeID"]: node["NodeManagerAddress"] for node in self._cluster.nodes if not node["Alive"]}
        for task in placed.values():
            if (node := self._cluster.begun.get(task.id)) in dead:  # Ray takes over 90 s to end it (Ray 2.60)
                self._end(task, {"error": "NodeDiedError", "host": dead[node]})
            elif self._cluster.silent_since is not None and own_result(self._sweep, task.trial.name) is not None:
                self._end(task, _DRIVER_ENDED)

    def _end(self, task: _RayTask, evidence: Mapping[str, Any], *, is_recalled: bool = False) -> None:
        if is_recalled and not has_begun(self._sweep, task.trial.name):
            self._withdrawn.append(task.trial.name)
            del self._tasks[task.trial.name]
        else:
            task.end({**evidence, "error": "TaskCancelledError"} if self._is_cancelled else evidence)

    def _keep_driver(self) -> None:
        """Replace a driver that has ended. The supervisors of begun trials may still run; `wait` waits for them."""
        if self._is_cancelled and self._cluster.silent_since is not None:
            self._cluster.kill_driver()  # Ray does not answer, but it ends the tasks of a process that has ended
        if self._cluster.stage != "ended":
            return
        for task in self._placed():
            if self._is_cancelled or self._is_withdrawing or has_begun(self._sweep, task.trial.name):
                self._end(task, _DRIVER_ENDED, is_recalled=self._is_withdrawing)
        if not self._is_cancelled and self._cluster.restart_driver():
            for task in self._placed():
                self._place(task)

    def withdraw(self) -> Sequence[str]:
        """Cancel the tasks that have not begun. Once Ray has ended them, the next call returns their trials' names."""
        if not self._is_withdrawing:
            self._is_withdrawing = True
            self._cluster.send("recall")
        back, self._withdrawn = self._withdrawn, []
        return back

    def end(self, names: Sequence[str]) -> None:
        """Cancel the tasks of these trials. The guard on each node kills the remaining processes (`guard.py`)."""
        ending = [task for task in self._placed() if task.trial.name in names]
        self._cluster.send("cancel", [task.id for task in ending])
        for task in ending:
            self._end(task, {})

    def cancel(self) -> None:
        self._is_cancelled = True
        self._cluster.send("cancel", [task.id for task in self._placed()])

    def close(self) -> None:
        if hasattr(self, "_sweep"):
            (self._sweep / ray_task.FOLDER_TOKEN).unlink(missing_ok=True)
            self._cluster.close()

    def state(self) -> str:
        nodes = len(self._cluster.resources())
        return self._cluster.outage() or f"{nodes} {'node' if nodes == 1 else 'nodes'}, {len(self._placed())} with Ray"


def put_in_place(sweep: Path, files: Mapping[str, bytes]) -> None:
    """Write the files that a node returned, `result.json` last, because it marks the trial's files as complete."""
    for path in sorted(files, key=lambda path: path.endswith("/result.json")):
        file = sweep / path
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}.{os.getpid()}")
        beside.write_bytes(files[path])
        os.replace(beside, file)


def fits(need: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many trials that need these resources can run at once if all nodes are idle.

    >>> fits({"CPU": 1, "GPU": 2}, [{"CPU": 8, "GPU": 3}, {"CPU": 8}])
    1
    """
    needed = {resource: amount for resource, amount in need.items() if amount > 0}
    # The added 1e-6 absorbs rounding errors such as that of 0.1 + 0.2.
    return sum(
        math.floor(min(node.get(resource, 0) / amount for resource, amount in needed.items()) + 1e-6) for node in nodes
    )


def spare(need: Mapping[str, float], nodes: Sequence[Mapping[str, float]], taken: Iterable[Mapping[str, float]]) -> int:
    """Return how many more trials that need these resources can run now; negative if trials are waiting for resources.

    >>> spare({"CPU": 1, "GPU": 1}, [{"CPU": 8, "GPU": 4}], [{"CPU": 1, "GPU": 2}, {"CPU": 1, "GPU": 0.5}])
    1
    """
    others = list(taken)

    def left(resource: str) -> float:
        return sum(node.get(resource, 0) for node in nodes) - sum(other.get(resource, 0) for other in others)

    return math.floor(min(left(resource) / amount for resource, amount in need.items() if amount > 0) + 1e-6)


def _text(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
