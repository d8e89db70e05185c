"""Runs trials as Ray tasks, on this machine or on an existing cluster. Needs `flopwatch[ray]`.

Each task (`ray_task.py`) runs the supervisor of one trial. A process of its own talks to Ray (`ray_driver.py`). If it
ends, because the cluster's head is away for more than a minute, the engine starts another one until Ray answers again.
Ray ends the tasks of the old process, at the latest when the head is back. A trial that had not begun gets a new task;
if its old task starts after all, only one of the two supervisors can claim the trial.
"""

import math
import os
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.optional import require
from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import SPEC, trial_folder
from flopwatch.sweep.engines import ray_task
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.engines.ray_driver import RayConnection, RayOutage
from flopwatch.sweep.engines.ray_internals import local_environment
from flopwatch.sweep.folder import Trial, attempt_of, has_begun, is_supervised, own_result

_NODES_EVERY_SECONDS = 5.0  # This is the time between two reads of the list of nodes.
_LEAVE_SECONDS = 30.0  # After the end of a task, its supervisor may need this long to kill the trial's processes.
_CONNECT_SECONDS = 180.0  # The start of a local Ray may take long on a busy machine.
_RESTART_SECONDS = 5.0  # This is the least time between two starts of the process that talks to Ray.
_TICK_SECONDS = 0.05

_DRIVER_ENDED = {"error": "RayDriverEnded"}


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A task that has ended, but whose supervisor may still be killing the trial's processes."""

    evidence: Mapping[str, Any]
    deadline: float


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
        self._unsent: list[Trial] = []  # Trials that were submitted while Ray did not answer.
        self._tasks: dict[str, str] = {}  # For each Ray task that has not ended, the name of its trial.
        self._leaving: dict[str, _Leaving] = {}
        self._trials: dict[str, Trial] = {}  # All trials in `_tasks` and `_leaving`, by name.
        self._needs: dict[str, dict[str, float]] = {}
        self._recalled: set[str] = set()  # The trials whose tasks `withdraw` has cancelled.
        self._unrun: list[str] = []  # The cancelled trials that the next `withdraw` will return.
        self._nodes: list[dict[str, Any]] = []
        self._nodes_read = -math.inf
        self._is_cancelled = False
        self._outage = RayOutage()
        self._next_start = -math.inf

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """Connect to Ray. Return the names of trials in `unfinished` that an earlier runner's supervisors still run."""
        self._sweep = sweep
        if find_spec("ray") is None:
            require("ray", "ray")  # raises an error that says how to install it
        self._start_driver()
        try:
            self._driver.wait_until_connected(_CONNECT_SECONDS)
        except (ConnectionError, TimeoutError) as error:
            self._driver.close()
            if self._address is None:
                raise InputError(f"cannot start a local Ray: {error}") from error
            raise InputError(f"cannot connect to Ray at {self._address!r}; check the address: {error}") from error
        (sweep / ray_task.FOLDER_TOKEN).write_text(self._token)
        self._refresh_nodes()
        still_there = [trial for trial in unfinished if is_supervised(sweep, trial.name)]
        for trial in still_there:
            self._trials[trial.name] = trial
            self._leaving[trial.name] = _Leaving({"error": "TaskCancelledError"}, time.monotonic() + _LEAVE_SECONDS)
        return [trial.name for trial in still_there]

    def _start_driver(self) -> None:
        self._next_start = time.monotonic() + _RESTART_SECONDS
        ray = sys.modules.get("ray")
        if self._address is None and ray is not None and ray.is_initialized():  # use the Ray of the calling program
            self._driver = RayConnection({}, ray.get_runtime_context().gcs_address, None, None)
            return
        environment = local_environment() if self._address is None else {}
        self._driver = RayConnection(environment, self._address, *self._local)

    def _keep_driver(self) -> None:
        if self._driver.is_alive():
            return
        # The supervisors of begun trials may still run, so `_gone` and the runner wait for the end of each.
        for name in self._tasks.values():
            trial = self._trials[name]
            if self._is_cancelled or name in self._recalled or has_begun(self._sweep, name):
                self._end_trial(name, _DRIVER_ENDED)
            else:
                self._unsent.append(trial)
                del self._trials[name], self._needs[name]
        self._tasks.clear()
        if self._is_cancelled or time.monotonic() < self._next_start:
            raise ConnectionError(self._driver.last_words())
        self._driver.close()
        self._start_driver()

    def room(self, next_up: TrialSpec) -> int:
        """Return how many more trials to give to Ray: a few more than can run at once, so that no GPU is idle between
        two trials. All other trials wait in the runner, which skips them if a smaller trial runs out of memory.
        """
        with self._outage.tolerated():
            self._refresh_nodes()
        if self._outage.since is not None or self._unsent:
            return 0
        need = self._need(next_up)
        if next_up.nodes > 1:
            return self._room_for_group(next_up.nodes, need)
        capacity = fits(need, self._resources())
        if capacity == 0 and self._address is None:  # in a cluster, a larger node may join later
            raise InputError(
                f"a trial needs {_text(need)}, but this machine has {_text(self._resources()[0])}; "
                "request less, or set a cluster with --engine-option address=ADDRESS"
            )
        if capacity == 0:
            return 0
        alike = sum(other == need for other in self._needs.values())
        unused = spare(need, self._resources(), self._needs.values())
        return max(0, min(capacity - alike, unused) + max(2, capacity // 10))

    def _room_for_group(self, nodes: int, need: Mapping[str, float]) -> int:
        """Return how many more trials with several nodes can run now.

        Ray gets no trials that would have to wait, because a trial that waits for its last node blocks the other nodes.
        """
        capacity = fits_spread(nodes, [fits(need, [node]) for node in self._resources()])
        if capacity == 0 and self._address is None:
            raise InputError(
                f"a trial needs {nodes} nodes with {_text(need)} each, but a local Ray has one node; "
                "set a cluster with --engine-option address=ADDRESS, or remove `nodes` from the configuration"
            )
        return max(0, capacity - sum(self._trials[name].spec.nodes > 1 for name in self._needs))

    def submit(self, trials: Sequence[Trial]) -> None:
        """Create the tasks of these trials. If Ray does not answer, keep the trials until it answers again."""
        self._unsent += trials
        while self._unsent and self._outage.since is None:
            with self._outage.tolerated():
                self._place(self._unsent[0])
                del self._unsent[0]

    def _place(self, trial: Trial) -> None:
        need, environment = self._need(trial.spec), ray_task.without_node_variables(os.environ)
        if not need["GPU"]:  # Ray would not set CUDA_VISIBLE_DEVICES, so the trial would see all GPUs
            environment["CUDA_VISIBLE_DEVICES"] = ""
        spec = (trial_folder(trial.sweep, trial.name) / SPEC).read_bytes()
        where = (str(trial.sweep.resolve()), trial.name, self._token, spec, os.getcwd())
        task = f"{trial.name} {attempt_of(trial.sweep, trial.name)}"
        self._driver.call("place", task, ray_task.Order(*where, environment, trial.spec.nodes, need))
        self._tasks[task] = trial.name
        self._trials[trial.name], self._needs[trial.name] = trial, need

    def wait(self, seconds: float) -> Sequence[Ended]:
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            with self._outage.tolerated():
                self._keep_driver()
                self._collect(min(left, _TICK_SECONDS) if self._leaving else left)
                self._give_up_dead_nodes()
            self.submit(())
            if self._outage.since is not None:
                for task, name in list(self._tasks.items()):  # a trial has ended if its result is in the folder
                    if own_result(self._sweep, name) is not None:
                        self._end_trial(self._tasks.pop(task), _DRIVER_ENDED)
            ended = self._gone()
            if ended or time.monotonic() >= deadline:
                return ended
            if self._outage.since is not None:
                time.sleep(min(1.0, left))

    def _collect(self, seconds: float) -> None:
        """Wait until tasks finish, and move their trials to `_leaving` until their supervisors have ended too."""
        if not self._tasks:
            time.sleep(seconds)
            return
        seconds = min(seconds, _NODES_EVERY_SECONDS)
        for task, returned in self._driver.call("ended", seconds, seconds=seconds):
            if task in self._tasks:
                ray_task.put_in_place(self._sweep, returned.files)
                self._end_trial(self._tasks.pop(task), returned.evidence)
            self._driver.call("forget", task)

    def _end_trial(self, name: str, evidence: Mapping[str, Any]) -> None:
        if self._is_cancelled:
            evidence = {**evidence, "error": "TaskCancelledError"}
        self._needs.pop(name, None)
        if name in self._recalled and not has_begun(self._sweep, name):
            self._recalled.remove(name)
            self._unrun.append(name)
            del self._trials[name]
            return
        self._leaving[name] = _Leaving(evidence, time.monotonic() + _LEAVE_SECONDS)

    def _gone(self) -> list[Ended]:
        now = time.monotonic()
        names = [
            name
            for name, leaving in self._leaving.items()
            if now > leaving.deadline or not is_supervised(self._trials[name].sweep, name)
        ]
        for name in names:
            del self._trials[name]
        return [Ended(name, self._leaving.pop(name).evidence) for name in names]

    def _give_up_dead_nodes(self) -> None:
        """Report the tasks of dead nodes as ended, because Ray takes too long to do so (over 90 s in Ray 2.60)."""
        if not self._refresh_nodes():
            return
        dead = {node["NodeID"]: node["NodeManagerAddress"] for node in self._nodes if not node["Alive"]}
        if not dead:
            return
        begun = self._driver.call("begun")
        for task in [task for task in self._tasks if begun.get(task) in dead]:
            self._end_trial(self._tasks.pop(task), {"error": "NodeDiedError", "host": dead[begun[task]]})
            self._driver.call("forget", task)

    def withdraw(self) -> Sequence[str]:
        """Cancel the tasks that have not begun. Once Ray has ended them, the next call returns their trials' names."""
        self._unrun += [trial.name for trial in self._unsent]
        self._unsent = []
        if set(self._tasks.values()) - self._recalled:
            with self._outage.tolerated():
                begun = self._driver.call("begun")
                queued = {task: name for task, name in self._tasks.items() if begun.get(task, "") is None}
                self._driver.call("cancel", list(queued))
                self._recalled |= set(queued.values())
        back, self._unrun = self._unrun, []
        return back

    def end(self, names: Sequence[str]) -> None:
        """Cancel the tasks of these trials. The guard on each node kills the remaining processes (`guard.py`)."""
        for task in [task for task, name in self._tasks.items() if name in names]:
            with self._outage.tolerated():
                self._driver.call("cancel", [task])
                self._driver.call("forget", task)
            self._end_trial(self._tasks.pop(task), {})

    def cancel(self) -> None:
        self._is_cancelled = True
        with self._outage.tolerated():
            self._driver.call("cancel", list(self._tasks))
            return
        self._driver.kill()  # Ray does not answer, but it ends the tasks of a process that has ended

    def close(self) -> None:
        if hasattr(self, "_driver"):
            (self._sweep / ray_task.FOLDER_TOKEN).unlink(missing_ok=True)
            self._driver.close()

    def state(self) -> str:
        if outage := self._outage.state():
            return outage
        nodes = len(self._resources())
        return f"{nodes} {'node' if nodes == 1 else 'nodes'}, {len(self._tasks)} with Ray"

    def _need(self, spec: TrialSpec) -> dict[str, float]:
        gpus = spec.gpus or self._gpus_per_trial
        if gpus is None:
            has_gpus = spec.device != "cpu" and any(node.get("GPU") for node in self._resources())
            gpus = float(spec.processes if has_gpus else 0)
        # Ray accepts a fraction of one GPU, but above one GPU only whole numbers.
        cpus = spec.cpus or max(self._cpus_per_trial, spec.processes)
        return {"CPU": cpus, "GPU": gpus if gpus <= 1 else math.ceil(gpus)}

    def _resources(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._nodes if node["Alive"]]

    def _refresh_nodes(self) -> bool:
        """Read the list of nodes, which may change during a sweep, if it is old; return whether it was."""
        is_old = time.monotonic() - self._nodes_read > _NODES_EVERY_SECONDS or self._outage.since is not None
        if is_old:
            self._nodes, self._nodes_read = self._driver.call("nodes"), time.monotonic()
            self._outage.since = None
        return is_old


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


def fits_spread(nodes: int, per_node: Sequence[int]) -> int:
    """Return how many trials can run at once if each needs `nodes` nodes and node i can serve `per_node[i]` trials.

    >>> fits_spread(2, [1, 1, 1]), fits_spread(2, [4, 1]), fits_spread(2, [3, 3])
    (1, 1, 3)
    """
    trials = sum(per_node) // nodes
    while trials and sum(min(room, trials) for room in per_node) < trials * nodes:
        trials -= 1
    return trials


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
