"""Runs trials as tasks of a Ray cluster that exists. Needs `flopwatch[ray]`.

Ray chooses the node of a trial, and the trial's task runs its supervisor there, which writes to the sweep's folder. A
process of its own, the driver, talks to Ray, because Ray's core ends such a process if the cluster's head has been
away for 60 s, and can start no task any more if the raylet of its machine has died (seen with Ray 2.60). The engine
then starts another driver until Ray answers, and gives it the trials that have not begun, which costs none of their
retries. If an old task begins after all, only one of two supervisors can claim the trial.
"""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.optional import require
from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import Trial, attempt_of, has_begun, is_supervised
from flopwatch.sweep.host.processes import PARENT, dies_with, ends_with_parent
from flopwatch.text import first_line, plural

_NODES_EVERY_SECONDS = 5.0  # This is the time between two reads of the list of nodes.
_ANSWER_SECONDS = 15.0  # If the driver sends nothing for this time, Ray does not answer.
_SILENCE_SECONDS = 180.0  # A driver that sends nothing for this long is killed. Ray should have ended it.
_RESTART_SECONDS = 5.0  # This is the least time between two starts of the driver.
_TICK_SECONDS = 0.05
_MOST_WAITING = 2  # Ray gets so many trials more than its nodes can run at once, so that no node is idle between two.

_DRIVER = "from flopwatch.sweep.engines import ray; ray.main()"
_CANCELLED = {"error": "TaskCancelledError"}
_RAYS_OWN = ("RayDriverEnded", "TaskCancelledError", "NodeDiedError", "WorkerCrashedError", "OutOfMemoryError")
"""Ends of a task that Ray caused. If its supervisor had not begun, the trial gets another task."""

_OF_THE_MACHINE = re.compile(
    r"(RAY|SLURM|SSH|XDG|DBUS|CONDA|NVIDIA|KUBERNETES|LD)_.*|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|PATH|PYTHONHOME|"
    r"VIRTUAL_ENV|HOME|TMPDIR|TE?MP|USER|LOGNAME|SHELL|SHLVL|PWD|OLDPWD|_|HOST|HOSTNAME|TERM|DISPLAY|"
    r"FLOPWATCH_(PARENT_PID|CORES|GPUS|SLOT_DIR)"
)
"""Environment variables of the runner that describe its own machine. Trials get all others."""


@dataclass(slots=True)
class _Task:
    """A submitted trial. `is_placed` says whether the driver has it, and `lost_by` by which error Ray lost it before.

    `evidence` is how it ended; None before. Its supervisor may still be ending the trial's processes then.
    """

    trial: Trial
    attempt: str
    is_placed: bool = False
    lost_by: str = ""
    evidence: Mapping[str, Any] | None = None


class RayEngine:
    """Runs trials as tasks of a Ray cluster. Its nodes need flopwatch and must see the sweep's folder.

    Args:
        address: Address of the cluster, as for `ray.init` (`auto`, `10.0.0.1:6379`).
        cpus_per_trial: Number of cores of a trial whose configuration does not set it.
        gpus_per_trial: Number of GPUs of a trial whose configuration does not set it. None means one per process if
            the cluster has GPUs and the trial's device is not the CPU.
    """

    name = "ray"

    def __init__(self, address: str = "", cpus_per_trial: int = 1, gpus_per_trial: float | None = None) -> None:
        if not address:
            raise InputError(
                "--engine ray needs a Ray cluster: `ray start --head` starts one and prints its address; add "
                "--engine-option address=ADDRESS, or use --engine local, which needs none"
            )
        self._address, self._cpus_per_trial, self._gpus_per_trial = address, cpus_per_trial, gpus_per_trial
        self._tasks: dict[str, _Task] = {}  # by the names of their trials
        self._nodes: list[Mapping[str, float]] | None = None  # the resources of each node that is alive
        self._trouble = self._lacks = ""  # why Ray does not answer, and what no node has
        self._is_withdrawing = self._is_cancelled = False
        self._answered = -math.inf

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """Connect to the cluster. The runner itself waits for supervisors that an earlier runner has left."""
        self._start_driver()
        while self._nodes is None:
            self._listen(1.0)
            if self._trouble:
                self.close()
                raise InputError(f"cannot connect to Ray at {self._address!r}; check the address: {self._trouble}")
        return ()

    def _start_driver(self) -> None:
        self._started = time.monotonic()
        self._pipe, theirs = Pipe()
        with theirs:
            self._driver = subprocess.Popen(
                [sys.executable, "-c", _DRIVER, str(theirs.fileno()), self._address],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, PARENT: str(os.getpid())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # otherwise Ctrl-C in the terminal would reach it too
            )

    def close(self) -> None:
        self._driver.kill()
        self._driver.wait()
        self._pipe.close()

    def room(self, next_up: TrialSpec) -> int:
        self._listen(0.0)
        need, nodes = self._need(next_up), self._nodes or ()
        capacity = sum(min(node.get(name, 0) // amount for name, amount in need.items() if amount) for node in nodes)
        self._lacks = "" if capacity else f", none with {need['CPU']} CPU and {need['GPU']} GPU: waiting for one"
        return 0 if self._trouble or not capacity else max(0, int(capacity) + _MOST_WAITING - len(self._placed()))

    def _need(self, spec: TrialSpec) -> dict[str, int]:
        gpus = spec.gpus or self._gpus_per_trial
        if gpus is None:
            has_gpus = spec.device != "cpu" and any(node.get("GPU") for node in self._nodes or ())
            gpus = spec.processes if has_gpus else 0
        return {"CPU": spec.cpus or max(self._cpus_per_trial, spec.processes), "GPU": math.ceil(gpus)}

    def _placed(self) -> list[_Task]:
        return [task for task in self._tasks.values() if task.evidence is None]

    def submit(self, trials: Sequence[Trial]) -> None:
        self._is_withdrawing = False
        for trial in trials:
            self._tasks[trial.name] = _Task(trial, attempt_of(trial.sweep, trial.name))
            self._place(self._tasks[trial.name])

    def _place(self, task: _Task) -> None:
        trial, task.is_placed = task.trial, True
        order = (str(trial.sweep.resolve()), trial.name, task.attempt, os.getcwd())
        self._send("place", task.attempt, self._need(trial.spec), order)

    def _send(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # the driver has ended, which `_listen` will notice
            self._pipe.send(message)

    def wait(self, seconds: float) -> Sequence[Ended]:
        is_any_leaving = len(self._placed()) < len(self._tasks)
        self._listen(min(seconds, _TICK_SECONDS) if is_any_leaving else seconds)
        ended = [task for task in self._tasks.values() if task.evidence is not None]
        gone = [task for task in ended if not is_supervised(task.trial.sweep, task.trial.name)]
        return [Ended(task.trial.name, self._tasks.pop(task.trial.name).evidence or {}) for task in gone]

    def _listen(self, seconds: float) -> None:
        """Note what the driver sends within this time. If the driver has ended, start another."""
        try:
            while self._pipe.poll(seconds):
                self._note(*self._pipe.recv())
                seconds = 0.0
        except (EOFError, OSError):
            self._trouble = self._trouble or "the process that talks to Ray ended"
            for task in self._placed():
                self._end(task, {"error": "RayDriverEnded"})
            if not self._is_cancelled and time.monotonic() - self._started >= _RESTART_SECONDS:
                self.close()
                self._start_driver()
            time.sleep(seconds)
        quiet = time.monotonic() - max(self._started, self._answered)
        if quiet > _ANSWER_SECONDS and self._nodes is not None:
            self._trouble = self._trouble or "no answer yet"
        if quiet > _SILENCE_SECONDS or (self._is_cancelled and self._trouble):
            self._driver.kill()  # Ray ends the tasks of a driver that has ended

    def _note(self, trouble: str, nodes: list[Mapping[str, float]], ended: Mapping[str, Any]) -> None:
        self._trouble = trouble
        if trouble:
            return
        self._nodes, self._answered = nodes, time.monotonic()
        for task in self._placed():
            if task.attempt in ended:
                self._end(task, ended[task.attempt])
            elif not task.is_placed and not self._is_withdrawing:
                self._place(task)

    def _end(self, task: _Task, evidence: Mapping[str, Any]) -> None:
        """Note that the trial's task has ended. If Ray lost it before the trial began, the trial gets another one."""
        error = evidence.get("error", "")
        if self._is_cancelled:
            task.evidence = {**evidence, **_CANCELLED}
        elif error in _RAYS_OWN and not has_begun(task.trial.sweep, task.trial.name):
            task.is_placed, task.lost_by = False, error
        else:
            # With exit code 0 and no result, the supervisor of a second task has found that the first one had begun.
            is_second = task.lost_by and evidence.get("exit_code") == 0
            task.evidence = {**evidence, "error": task.lost_by} if is_second else evidence

    def withdraw(self) -> Sequence[str]:
        """Cancel the tasks that have not begun. Once Ray has ended them, the next call returns their trials' names."""
        if not self._is_withdrawing:
            self._is_withdrawing = True
            self._send("cancel", [task.attempt for task in self._placed()], False)
        back = [task.trial.name for task in self._placed() if not task.is_placed]
        self._tasks = {name: task for name, task in self._tasks.items() if name not in back}
        return back

    def end(self, names: Sequence[str]) -> None:
        """Cancel the tasks of these trials. The guard on each node kills the remaining processes (`guard.py`)."""
        self._send("cancel", [self._tasks[name].attempt for name in names if name in self._tasks], True)

    def cancel(self) -> None:
        self._is_cancelled = True
        self.end(list(self._tasks))
        for task in [task for task in self._placed() if not task.is_placed]:
            task.evidence = _CANCELLED

    def state(self) -> str:
        if self._trouble:
            return f"Ray has not answered for {time.monotonic() - self._answered:.0f} s: {self._trouble}"
        again = [task.lost_by for task in self._placed() if task.lost_by]
        retold = f", {len(again)} of them placed again after {again[-1]}" if again else ""
        return f"{plural(len(self._nodes or ()), 'node')}{self._lacks}, {len(self._placed())} with Ray{retold}"


def drive(pipe: "Connection[Any, Any]", address: str) -> None:
    """In the driver: do what the engine asks, and send it the nodes and the ends of tasks, until an error."""
    ray: Any = require("ray", "ray")
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    run = ray.remote(max_calls=1, max_retries=0)(run_trial)  # an attempt that has begun is the runner's to retry
    environment = {name: value for name, value in os.environ.items() if not _OF_THE_MACHINE.fullmatch(name)}
    next_nodes = 0.0
    tasks: dict[Any, str] = {}  # the attempts, by Ray's references of their tasks
    while True:
        while pipe.poll(0.0 if tasks else _TICK_SECONDS):
            asked, *facts = pipe.recv()
            if asked == "place":
                attempt, need, order = facts
                options = {"num_cpus": need["CPU"], "num_gpus": need["GPU"], "name": f"flopwatch {order[1]}"}
                # Without a GPU, Ray would not set CUDA_VISIBLE_DEVICES, so the trial would see all GPUs.
                hidden = {} if need["GPU"] else {"CUDA_VISIBLE_DEVICES": ""}
                tasks[run.options(**options).remote(*order, {**environment, **hidden})] = attempt
            else:
                for reference in [reference for reference, attempt in tasks.items() if attempt in facts[0]]:
                    ray.cancel(reference, force=facts[1])
        ready = ray.wait(list(tasks), timeout=_TICK_SECONDS, fetch_local=False)[0] if tasks else ()
        if ready or time.monotonic() >= next_nodes:
            ended = {tasks.pop(reference): _evidence(ray, reference) for reference in ready}
            pipe.send(("", [node["Resources"] for node in ray.nodes() if node["Alive"]], ended))
            next_nodes = time.monotonic() + _NODES_EVERY_SECONDS


def _evidence(ray: Any, reference: Any) -> Mapping[str, Any]:
    try:
        return ray.get(reference, timeout=60.0)  # type: ignore[no-any-return]  # the value may be on another node
    except ray.exceptions.LocalRayletDiedError:
        raise  # no task of this driver can start any more
    except Exception as error:  # noqa: BLE001 - Ray has many errors for a dead task, and a task may raise anything
        cause = getattr(error, "cause", None) or error  # Ray wraps it in a generated class: `RayTaskError(ValueError)`
        return {"error": type(cause).__name__, "detail": first_line(cause, 300)}


def run_trial(sweep: str, name: str, attempt: str, cwd: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The task of a trial: run its supervisor until it ends. A failure of the trial raises no exception.

    Ray sends SIGKILL to the children of a worker that it ends (seen with Ray 2.60). The child is therefore a shell,
    and its child is the guard (see `supervisor/guard.py`), which receives SIGTERM when the shell is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # how Ray cancels without force; what has begun is not withdrawn
    words = ("-m", "flopwatch.sweep.supervisor", sweep, name, attempt)
    done = subprocess.run(
        ["/bin/sh", "-c", f'{PARENT}=$$ "$@"; exit $?', "sh", sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=cwd if os.path.isdir(cwd) else None,
        env={**os.environ, **environment},
        start_new_session=True,  # so that the guard survives Ray's SIGKILL to the process group of the worker
        preexec_fn=dies_with(os.getpid()),  # Ray's memory monitor kills the worker alone
        check=False,
    )
    status, printed = done.returncode, done.stdout.decode(errors="replace")[-4000:]
    ended = {"exit_code": status} if 0 <= status <= 128 else {"signal": abs(status) % 128}  # a shell adds 128
    return {"host": os.uname().nodename, **ended, "log": printed}


def main() -> None:
    if not ends_with_parent(signal.SIGKILL):
        return
    sys.path.remove("")  # the current folder; a user's own `ray.py` may be there
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        drive(pipe, sys.argv[2])
    except Exception as error:  # noqa: BLE001 - whatever Ray raises, the engine starts another driver
        with contextlib.suppress(OSError):
            pipe.send((f"{type(error).__name__}: {first_line(error, 300)}", [], {}))
