"""Trials as Ray tasks: on this machine or on a cluster that is there. Needs `flopwatch[ray]`.

A task runs the supervisor of one trial in a process of its own; how the trial ended is in its files as everywhere.
"""

import math
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import trial_folder
from flopwatch.sweep.engines import ray_task
from flopwatch.sweep.engines import ray_task as ray_nodes
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.engines.ray_internals import (
    RaySilence,
    import_ray,
    in_environment,
    join,
    local_environment,
    start_local,
)
from flopwatch.sweep.folder import Trial, has_begun, is_supervised

_NODES_EVERY_SECONDS = 5.0
_GET_SECONDS = 60.0
_LEAVE_SECONDS = 30.0
_TICK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Leaving:
    """The task is over, its supervisor may still be killing the trial's tree."""

    evidence: Mapping[str, Any]
    deadline: float


class RayEngine:
    """Places trials as Ray tasks.

    Args:
        address: Of a cluster, as `ray.init` takes it (`auto`, `10.0.0.1:6379`); None starts a Ray of its own here, on
            loopback and without dashboard.
        cpus_per_trial: Cores of a trial whose configuration does not say.
        gpus_per_trial: GPUs of a trial whose configuration does not say, a fraction shares one. None is 1 where the
            cluster has GPUs and the trial is not for the CPU.
        cpus: Cores a Ray of its own may use; None is all.
        gpus: GPUs a Ray of its own may use; None is all.

    Several nodes need no shared file system: a node that does not see the sweep's folder sends the trial's files back
    at its end, and its progress is not seen before. Each node needs flopwatch installed.
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
        self._trials: dict[str, Trial] = {}
        self._references: dict[Any, str] = {}
        self._needs: dict[str, dict[str, float]] = {}
        self._groups: dict[str, Any] = {}
        self._leaving: dict[str, _Leaving] = {}
        self._nodes: list[dict[str, Any]] = []
        self._nodes_read = -math.inf
        self._is_cancelled = False
        self._unsent: list[Trial] = []
        self._recalled: set[str] = set()
        self._unrun: list[str] = []
        self._silence = RaySilence(can_come_back=address is not None)
        self._opened = ExitStack()

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """Tasks end with their runner; supervisors of a killed one may still be cleaning up and are waited for."""
        self._sweep = sweep
        if self._address is None:
            self._opened.enter_context(in_environment(local_environment()))
        self._ray = import_ray()
        self._connect()
        (sweep / ray_task.FOLDER_TOKEN).write_text(self._token)
        self._remote = self._ray.remote(max_calls=1, max_retries=0, retry_exceptions=False)(ray_task.run_trial)
        self._refresh_nodes()
        still_there = [trial for trial in unfinished if is_supervised(sweep, trial.name)]
        for trial in still_there:
            self._trials[trial.name] = trial
            self._leaving[trial.name] = _Leaving({"error": "TaskCancelledError"}, time.monotonic() + _LEAVE_SECONDS)
        return [trial.name for trial in still_there]

    def _connect(self) -> None:
        if self._ray.is_initialized():  # the program we are called from has one: it stays when we go
            return
        if self._address is None:
            start_local(self._ray, *self._local)
        else:
            try:
                join(self._ray, self._address)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise InputError(f"no Ray cluster answers at {self._address!r}: {error}") from error
        self._opened.callback(self._ray.shutdown)

    def room(self, next_up: TrialSpec) -> int:
        """A few more than run at once, so that no slot waits for us; not more, so that what is inferred is not run."""
        with self._silence.waited_out():
            self._refresh_nodes_if_old()
        if self._silence.since is not None or self._unsent:
            return 0
        need = self._need(next_up)
        if next_up.nodes > 1:
            return self._room_for_group(next_up.nodes, need)
        capacity = fits(need, self._resources())
        if capacity == 0 and self._address is None:  # nobody will join
            raise InputError(
                f"a trial asks for {_text(need)}, and this machine has {_text(self._resources()[0])}; "
                "ask for less, or join a cluster with an address"
            )
        if capacity == 0:
            return 0
        alike = sum(other == need for other in self._needs.values())
        unused = spare(need, self._resources(), self._needs.values())
        return max(0, min(capacity - alike, unused) + max(2, capacity // 10))

    def _room_for_group(self, nodes: int, need: Mapping[str, float]) -> int:
        """None ahead of time: a group that waits keeps the nodes it has from others."""
        capacity = ray_nodes.fits_spread(nodes, [fits(need, [node]) for node in self._resources()])
        if capacity == 0 and self._address is None:
            raise InputError(
                f"a trial asks for {nodes} nodes with {_text(need)} each, and this is a Ray of one node; "
                "join a cluster with an address, or leave `nodes` out"
            )
        return max(0, capacity - len(self._groups))

    def submit(self, trials: Sequence[Trial]) -> None:
        """What Ray cannot take now goes to it when it answers again."""
        self._unsent += trials
        while self._unsent and self._silence.since is None:
            with self._silence.waited_out():
                self._place(self._unsent[0])
                del self._unsent[0]

    def _place(self, trial: Trial) -> None:
        need = self._need(trial.spec)
        # A task's GPUs are always on one node, so that several need no placement group.
        options: dict[str, Any] = {
            "num_cpus": need["CPU"],
            "num_gpus": need["GPU"],
            "name": f"flopwatch {trial.name}",
        }
        if trial.spec.nodes > 1:
            group = self._groups.get(trial.name) or ray_nodes.place_group(trial.spec.nodes, need)
            self._groups[trial.name] = group
            options["scheduling_strategy"] = ray_nodes.on_bundle(group, 0)
        reference = self._remote.options(**options).remote(self._order(trial, need))
        self._references[reference] = trial.name
        self._trials[trial.name], self._needs[trial.name] = trial, need

    def _order(self, trial: Trial, need: Mapping[str, float]) -> ray_task.Order:
        handed_on = [name for name in os.environ if name == "PYTHONPATH" or name.startswith(("NCCL_", "GLOO_"))]
        environment = {name: os.environ[name] for name in handed_on}
        if not need["GPU"]:  # Ray leaves it unset, and the trial would sit on somebody's GPU 0
            environment["CUDA_VISIBLE_DEVICES"] = ""
        spec = (trial_folder(trial.sweep, trial.name) / "spec.json").read_bytes()
        where = (str(trial.sweep.resolve()), trial.name, self._token, spec, os.getcwd())
        return ray_task.Order(*where, environment, trial.spec.nodes, need)

    def wait(self, seconds: float) -> Sequence[Ended]:
        deadline = time.monotonic() + seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            with self._silence.waited_out():
                self._collect(min(left, _TICK_SECONDS) if self._leaving else left)
                self._give_up_dead_nodes()
            self.submit(())
            ended = self._gone()
            if ended or time.monotonic() >= deadline:
                return ended
            if self._silence.since is not None:
                time.sleep(min(1.0, left))

    def _collect(self, seconds: float) -> None:
        """Move tasks that are over to those leaving."""
        if not self._references:
            time.sleep(seconds)
            return
        waiting = list(self._references)
        seconds = min(seconds, _NODES_EVERY_SECONDS)
        if self._ray.wait(waiting, num_returns=1, timeout=seconds, fetch_local=False)[0]:
            for reference in self._ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)[0]:
                self._end_task(self._references.pop(reference), self._outcome(reference))

    def _outcome(self, reference: Any) -> dict[str, Any]:
        """Evidence; files that came along are put in place."""
        try:
            returned: ray_task.Returned = self._ray.get(reference, timeout=_GET_SECONDS)
        except Exception as error:  # the task's death in one of a dozen classes, or an error of the node's Python
            return {"error": _class_name(error), "detail": _first_line(error)}
        ray_task.put_in_place(self._sweep, returned.files)
        return dict(returned.evidence)

    def _end_task(self, name: str, evidence: Mapping[str, Any]) -> None:
        if self._is_cancelled:
            evidence = {**evidence, "error": "TaskCancelledError"}
        self._needs.pop(name, None)
        if name in self._groups:
            ray_nodes.remove_group(self._groups.pop(name))
        if name in self._recalled and not has_begun(self._sweep, name):
            self._recalled.remove(name)
            self._unrun.append(name)
            del self._trials[name]
            return
        self._leaving[name] = _Leaving(evidence, time.monotonic() + _LEAVE_SECONDS)
        ray_task.forget(self._token, name)

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
        """Ray ends the tasks of a node that dies, but not always those of one that is cut off (measured, 90 s)."""
        if not self._refresh_nodes_if_old():
            return
        dead = {node["NodeID"]: node["NodeManagerAddress"] for node in self._nodes if not node["Alive"]}
        if not dead:
            return
        for reference, name in list(self._references.items()):
            node = ray_task.announced(self._token, name)
            if node in dead:
                del self._references[reference]
                self._end_task(name, {"error": "NodeDiedError", "host": dead[node]})

    def withdraw(self) -> Sequence[str]:
        """Tasks that no node has begun are cancelled, and come back when Ray has let go of them."""
        self._unrun += [trial.name for trial in self._unsent]
        self._unsent = []
        with self._silence.waited_out():
            for reference, name in self._references.items():
                if name not in self._recalled and ray_task.announced(self._token, name) is None:
                    self._ray.cancel(reference, force=True)
                    self._recalled.add(name)
        back, self._unrun = self._unrun, []
        return back

    def end(self, names: Sequence[str]) -> None:
        """The guard on the trial's node kills what is left there, if the node still answers to itself."""
        for reference, name in list(self._references.items()):
            if name in names:
                del self._references[reference]
                self._ray.cancel(reference, force=True)
                self._end_task(name, {})

    def cancel(self) -> None:
        self._is_cancelled = True
        for reference in self._references:
            self._ray.cancel(reference, force=True)

    def close(self) -> None:
        """Leave the cluster; a Ray of our own ends."""
        if hasattr(self, "_sweep"):
            (self._sweep / ray_task.FOLDER_TOKEN).unlink(missing_ok=True)
        self._opened.close()

    def state(self) -> str:
        if told := self._silence.state():
            return told
        nodes = len(self._resources())
        return f"{nodes} {'node' if nodes == 1 else 'nodes'}, {len(self._references)} with Ray"

    def _need(self, spec: TrialSpec) -> dict[str, float]:
        gpus = spec.gpus or self._gpus_per_trial
        if gpus is None:
            has_gpus = spec.device != "cpu" and any(node.get("GPU") for node in self._resources())
            gpus = float(spec.processes if has_gpus else 0)
        # Ray takes fractions below one and whole numbers above.
        cpus = spec.cpus or max(self._cpus_per_trial, spec.processes)
        return {"CPU": cpus, "GPU": gpus if gpus <= 1 else math.ceil(gpus)}

    def _resources(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self._nodes if node["Alive"]]

    def _refresh_nodes_if_old(self) -> bool:
        is_old = time.monotonic() - self._nodes_read > _NODES_EVERY_SECONDS or self._silence.since is not None
        if is_old:
            self._refresh_nodes()
        return is_old

    def _refresh_nodes(self) -> None:
        """Nodes join and leave while we run."""
        self._nodes, self._nodes_read = self._ray.nodes(), time.monotonic()
        self._silence.heard()


def fits(need: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """How many such trials run at once when they have all nodes for themselves.

    >>> fits({"CPU": 1, "GPU": 2}, [{"CPU": 8, "GPU": 3}, {"CPU": 8}])
    1
    """
    asked = {resource: amount for resource, amount in need.items() if amount > 0}
    # A millionth forgives 0.1 + 0.2.
    return sum(
        math.floor(min(node.get(resource, 0) / amount for resource, amount in asked.items()) + 1e-6) for node in nodes
    )


def spare(need: Mapping[str, float], nodes: Sequence[Mapping[str, float]], taken: Iterable[Mapping[str, float]]) -> int:
    """How many more such trials the nodes together have resources for; below 0 when some are waiting already.

    >>> spare({"CPU": 1, "GPU": 1}, [{"CPU": 8, "GPU": 4}], [{"CPU": 1, "GPU": 2}, {"CPU": 1, "GPU": 0.5}])
    1
    """
    others = list(taken)

    def left(resource: str) -> float:
        return sum(node.get(resource, 0) for node in nodes) - sum(other.get(resource, 0) for other in others)

    return math.floor(min(left(resource) / amount for resource, amount in need.items() if amount > 0) + 1e-6)


def _text(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def _class_name(error: Exception) -> str:
    """`RayTaskError(ValueError)` is the name of a class made on the spot: the cause says more."""
    cause = getattr(error, "cause", None)
    return type(cause if isinstance(cause, Exception) else error).__name__


def _first_line(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, Exception) else error).strip()
    return text.splitlines()[0][:300] if text else ""
