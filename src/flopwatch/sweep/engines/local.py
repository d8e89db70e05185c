"""The default engine: supervisors are processes on this machine, one per GPU or set of cores."""

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.records.reading import read_json
from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import STARTED, log_file, trial_folder
from flopwatch.sweep.claims import is_alive_here, visible_seconds
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.engines.slots import Slot, SlotPool, core_sets, visible_gpus
from flopwatch.sweep.folder import Trial, attempt_of, is_supervised
from flopwatch.sweep.host import processes as process_tree
from flopwatch.sweep.host.processes import PARENT

_CANCEL_PATIENCE_SECONDS = 20.0  # for a supervisor to kill its trial and write the result


@dataclass(frozen=True, slots=True)
class _Running:
    trial: Trial
    process: "subprocess.Popen[bytes]"
    slot: Slot


class LocalEngine:
    """Runs trials on this machine.

    Args:
        gpus: Device numbers to use; None finds them, () uses the cores.
        jobs: Trials at once on a machine without GPUs. The default is one, because parallel trials disturb each other's
            times.
    """

    name = "local"

    def __init__(self, gpus: Sequence[str] | None = None, jobs: int = 1) -> None:
        self._gpus = visible_gpus() if gpus is None else tuple(gpus)
        self._jobs = jobs
        if not self._gpus:
            core_sets(jobs)  # raises early if there are not enough cores
        self._running: dict[str, _Running] = {}
        self._next_slot: Slot | None = None
        self._give_up: dict[str, float] = {}
        self._pool: SlotPool

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """Wait for the supervisors of a killed runner: they end with it, but may still be cleaning up."""
        self._pool = SlotPool(self._gpus, self._jobs, sweep)
        for trial in unfinished:
            is_supervised(sweep, trial.name)  # for all first, so that those of other hosts are watched at the same time
        deadline = time.monotonic() + visible_seconds() + _CANCEL_PATIENCE_SECONDS
        for trial in unfinished:
            while is_supervised(sweep, trial.name) and time.monotonic() < deadline:
                time.sleep(0.05)
        return ()

    def room(self, next_up: TrialSpec) -> int:
        if next_up.nodes > 1:
            raise InputError(
                f"a trial needs {next_up.nodes} nodes and this is one machine; use --engine slurm or ray, or "
                "leave `nodes` out"
            )
        if self._next_slot is None:
            a_gpu_each = next_up.processes if self._gpus and next_up.processes > 1 else 0.0
            self._next_slot = self._pool.take(next_up.gpus or a_gpu_each)
        return int(self._next_slot is not None)

    def submit(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            slot, self._next_slot = self._next_slot, None
            if slot is None:
                raise RuntimeError("submit() without room()")
            self._running[trial.name] = _Running(trial, _start(trial, slot), slot)

    def wait(self, seconds: float) -> Sequence[Ended]:
        self._sleep_until_one_ends(seconds)
        gone = [running for running in self._running.values() if _is_gone(running) or self._is_given_up(running)]
        for running in gone:
            del self._running[running.trial.name]
            self._give_up.pop(running.trial.name, None)
            self._pool.give_back(running.slot)
        return [_ended(running) for running in gone]

    def _sleep_until_one_ends(self, seconds: float) -> None:
        handles = []
        poll = select.poll()
        try:
            for running in self._running.values():
                handles.append(os.pidfd_open(running.process.pid))
                poll.register(handles[-1], select.POLLIN)
            poll.poll(seconds * 1000)
        except (AttributeError, OSError):  # this system has no pidfds, or a process ended meanwhile
            time.sleep(0.01)
        finally:
            for handle in handles:
                os.close(handle)

    def end(self, names: Sequence[str]) -> None:
        for name in names:
            running = self._running[name]
            running.process.kill()
            claimed = read_json(trial_folder(running.trial.sweep, name) / STARTED)
            if isinstance(claimed, dict) and is_alive_here(claimed):  # killing the guard does not kill the supervisor
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(claimed["pid"], signal.SIGKILL)
            process_tree.kill_marked(trial_folder(running.trial.sweep.resolve(), name))
            self._give_up[name] = time.monotonic() + _CANCEL_PATIENCE_SECONDS

    def _is_given_up(self, running: _Running) -> bool:
        """Whether it survived SIGKILL for too long: it is stuck in the kernel and ends when that returns."""
        return time.monotonic() > self._give_up.get(running.trial.name, math.inf)

    def withdraw(self) -> Sequence[str]:
        """Nothing is queued: every submitted trial runs."""
        return ()

    def cancel(self) -> None:
        for running in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                running.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _CANCEL_PATIENCE_SECONDS
        for running in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(max(0.0, deadline - time.monotonic()))
        self.end([name for name, running in self._running.items() if running.process.poll() is None])

    def close(self) -> None:
        if self._next_slot is not None:
            self._pool.give_back(self._next_slot)
            self._next_slot = None
        self._pool.close()

    def state(self) -> str:
        if self._pool.waits_for and self._next_slot is None:
            return f"waiting for {self._pool.waits_for}"
        return f"GPU {', '.join(self._gpus)}" if self._gpus else f"{self._jobs} at a time"


def _start(trial: Trial, slot: Slot) -> "subprocess.Popen[bytes]":
    attempt = attempt_of(trial.sweep, trial.name)
    with log_file(trial.sweep, trial.name).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "flopwatch.sweep.supervisor", str(trial.sweep), trial.name, attempt],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, PARENT: str(os.getpid()), **slot.environment},
            start_new_session=True,  # so that Ctrl-C in the terminal reaches only the runner
        )


def _is_gone(running: _Running) -> bool:
    """Whether guard and supervisor have ended; a supervisor whose guard was killed may still be cleaning up."""
    return running.process.poll() is not None and not is_supervised(running.trial.sweep, running.trial.name)


def _ended(running: _Running) -> Ended:
    status = running.process.returncode
    if status is None:
        return Ended(running.trial.name, {"signal": signal.SIGKILL.value})
    return Ended(running.trial.name, {"signal": -status} if status < 0 else {"exit_code": status})
