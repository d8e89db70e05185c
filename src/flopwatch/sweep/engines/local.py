"""The default engine runs trials on this machine: one per GPU, or one per set of CPU cores.

A slot is the GPUs or the cores of one trial. Each GPU and core has a lock file, so two sweeps never use it at once.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flopwatch.errors import InputError
from flopwatch.files import read_object
from flopwatch.records.trial import TrialSpec
from flopwatch.records.trial_files import STARTED, log_file, trial_folder
from flopwatch.sweep.claim import is_alive_here, visible_seconds
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import Trial, attempt_of, is_supervised
from flopwatch.sweep.host import processes as process_tree
from flopwatch.sweep.host.processes import CORES, GPUS
from flopwatch.text import one_line

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def lock_folder() -> Path:
    """Return the folder of the lock files, which all users of this machine share."""
    return Path(os.environ.get("FLOPWATCH_SLOT_DIR", "/tmp/flopwatch-slots"))


@dataclass(frozen=True, slots=True)
class DeviceSlot:
    """The devices of one trial: its GPUs, or the cores that it is pinned to."""

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        found = {}
        if self.gpus:
            found[_VISIBLE] = found[GPUS] = ",".join(self.gpus)
        if self.cores:
            found[CORES] = ",".join(map(str, self.cores))
        return found


class SlotPool:
    """Reserves and releases slots: of these GPUs, or without any of the cores, for at most `jobs` trials at once.

    The path of the sweep's folder is written to the lock files, so that a waiting sweep can name it.
    """

    def __init__(self, gpus: tuple[str, ...], jobs: int, sweep: Path) -> None:
        self._sweep, self._gpus = sweep, gpus
        self._free = [DeviceSlot((gpu,)) for gpu in gpus] or [DeviceSlot(cores=cores) for cores in core_sets(jobs)]
        self._locks: dict[str, IO[str]] = {}
        self.waits_for = ""
        _make_lock_folder()

    def take(self, gpus: int) -> DeviceSlot | None:
        """Reserve a slot. If none is free, return None and set `waits_for` to a device and the sweep that uses it."""
        self.waits_for = ""
        if gpus and not self._gpus:
            raise InputError(
                f"a trial needs {gpus} GPUs, but no GPU was found on this machine; remove `gpus` from the "
                "configuration, or set the GPUs to use with CUDA_VISIBLE_DEVICES"
            )
        wanted = gpus or 1
        if self._gpus and wanted > len(self._gpus):
            raise InputError(
                f"a trial needs {wanted} GPUs, but this machine has {len(self._gpus)}; "
                "use fewer GPUs per trial, --engine ray or --engine slurm"
            )
        chosen: list[DeviceSlot] = []
        for slot in self._free:
            if len(chosen) < wanted and all(map(self._lock, self._lock_names(slot))):
                chosen.append(slot)
        is_enough = len(chosen) == wanted
        if is_enough:
            self._free = [slot for slot in self._free if slot not in chosen]
        self._unlock_free()
        return DeviceSlot(tuple(gpu for slot in chosen for gpu in slot.gpus), chosen[0].cores) if is_enough else None

    def give_back(self, slot: DeviceSlot) -> None:
        self._free += [DeviceSlot((gpu,)) for gpu in slot.gpus] or [slot]
        self._unlock_free()

    def close(self) -> None:
        while self._locks:
            self._locks.popitem()[1].close()

    def _lock_names(self, slot: DeviceSlot) -> list[str]:
        return [*(f"gpu-{gpu}" for gpu in slot.gpus), *(f"core-{core}" for core in slot.cores)]

    def _lock(self, name: str) -> bool:
        if name in self._locks:
            return True
        import fcntl  # Windows has no such module

        try:
            file = _open_lock(name)
        except OSError as error:  # the folder was usable when the sweep began, so perhaps this error is temporary
            self.waits_for = f"{name.replace('-', ' ')} (its lock file cannot be opened: {error.strerror})"
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_taken = isinstance(error, BlockingIOError)
            owner = file.read().strip() or "another sweep" if is_taken else f"its lock file: {error.strerror}"
            self.waits_for = f"{name.replace('-', ' ')} ({owner})"
            file.close()
            return False
        file.truncate(0)
        file.write(f"pid {os.getpid()}, sweep in {one_line(str(self._sweep.resolve()))}")
        file.flush()
        self._locks[name] = file
        return True

    def _unlock_free(self) -> None:
        for slot in self._free:
            for name in self._lock_names(slot):
                if name in self._locks:
                    self._locks.pop(name).close()


def visible_gpus() -> tuple[str, ...]:
    """Find the usable GPUs without importing torch: from the environment, or else from the NVIDIA driver."""
    visible = os.environ.get(_VISIBLE)
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() and part.strip() != "-1")
    with contextlib.suppress(OSError):
        return tuple(str(index) for index, _ in enumerate(Path("/proc/driver/nvidia/gpus").iterdir()))
    return ()


def core_sets(jobs: int) -> list[tuple[int, ...]]:
    cores = process_tree.usable_cores()
    if not 1 <= jobs <= len(cores):
        raise InputError(
            f"--jobs {jobs} is not possible, because each trial needs a core and there are {len(cores)} cores; "
            f"use a number from 1 to {len(cores)}"
        )
    size = len(cores) // jobs
    return [tuple(cores[index * size : (index + 1) * size]) for index in range(jobs)]


def _make_lock_folder() -> None:
    folder = lock_folder()
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            folder.chmod(0o1777)  # all users of the machine create lock files in it
        _open_lock("folder").close()
    except OSError as error:
        raise InputError(
            f"cannot write the lock files of this machine's GPUs and cores to {folder}: {error.strerror}; "
            "set FLOPWATCH_SLOT_DIR to another folder"
        ) from None


def _open_lock(name: str) -> IO[str]:
    file = lock_folder() / f"{name}.lock"
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        os.fchmod(handle, 0o666)  # the umask may have removed permissions
    except FileExistsError:
        # Linux rejects O_CREAT for another user's file in a sticky folder (sysctl fs.protected_regular).
        handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    return os.fdopen(handle, "r+", encoding="utf-8", errors="replace")


_LOOK_SECONDS = 0.02  # the time between two looks at the supervisors
_CANCEL_PATIENCE_SECONDS = 20.0  # a supervisor may need this long to kill its trial and write the result


@dataclass(slots=True)
class _Running:
    """A trial, its guard process, and when it is given up because its supervisor is blocked in the kernel."""

    trial: Trial
    process: "subprocess.Popen[bytes]"
    slot: DeviceSlot
    give_up_at: float = math.inf

    def is_gone(self) -> bool:
        if time.monotonic() > self.give_up_at:
            return True
        return self.process.poll() is not None and not is_supervised(self.trial.sweep, self.trial.name)

    def ended(self) -> Ended:
        status = self.process.returncode
        if status is None:
            return Ended(self.trial.name, {"signal": signal.SIGKILL.value})
        return Ended(self.trial.name, {"signal": -status} if status < 0 else {"exit_code": status})


def _start_supervisor(trial: Trial, slot: DeviceSlot) -> "subprocess.Popen[bytes]":
    words = [str(trial.sweep), trial.name, attempt_of(trial.sweep, trial.name)]
    with log_file(trial.sweep, trial.name).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "flopwatch.sweep.supervisor", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, process_tree.PARENT: str(os.getpid()), **slot.environment},
            start_new_session=True,  # otherwise Ctrl-C in the terminal would reach the supervisor too
        )


class LocalEngine:
    """Runs trials on these GPUs; on all visible ones if None, and if there are none, `jobs` at once on CPU cores."""

    name = "local"

    def __init__(self, gpus: Sequence[str] | None = None, jobs: int = 1) -> None:
        self._gpus = visible_gpus() if gpus is None else tuple(gpus)
        self._jobs = jobs
        if not self._gpus:
            core_sets(jobs)  # raises InputError if there are not enough cores
        self._running: dict[str, _Running] = {}
        self._next_slot: DeviceSlot | None = None
        self._pool: SlotPool

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """Wait for the supervisors of an earlier runner to end. They end soon after that runner has ended."""
        self._pool = SlotPool(self._gpus, self._jobs, sweep)
        deadline, left = time.monotonic() + visible_seconds() + _CANCEL_PATIENCE_SECONDS, unfinished
        while (left := [trial for trial in left if is_supervised(sweep, trial.name)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return ()

    def room(self, next_up: TrialSpec) -> int:
        if self._next_slot is None:
            a_gpu_each = next_up.processes if self._gpus and next_up.processes > 1 else 0
            self._next_slot = self._pool.take(next_up.gpus or a_gpu_each)
        return int(self._next_slot is not None)

    def submit(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            slot, self._next_slot = self._next_slot, None
            if slot is None:
                raise RuntimeError("submit() was called before room() returned a number above 0")
            self._running[trial.name] = _Running(trial, _start_supervisor(trial, slot), slot)

    def wait(self, seconds: float) -> Sequence[Ended]:
        deadline = time.monotonic() + seconds
        while not (gone := [running for running in self._running.values() if running.is_gone()]):
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        for running in gone:
            del self._running[running.trial.name]
            self._pool.give_back(running.slot)
        return [running.ended() for running in gone]

    def _kill(self, names: Sequence[str]) -> None:
        for name in names:
            running = self._running[name]
            running.process.kill()
            claimed = read_object(trial_folder(running.trial.sweep, name) / STARTED)
            # `running.process` is the trial's guard. When it dies, its child, the supervisor, gets only SIGTERM.
            if is_alive_here(claimed):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(claimed["pid"], signal.SIGKILL)
            process_tree.kill_marked(trial_folder(running.trial.sweep.resolve(), name))
            running.give_up_at = time.monotonic() + _CANCEL_PATIENCE_SECONDS

    def withdraw(self) -> Sequence[str]:
        return ()  # all submitted trials have begun

    def cancel(self) -> None:
        for running in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                running.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _CANCEL_PATIENCE_SECONDS
        for running in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(max(0.0, deadline - time.monotonic()))
        self._kill([name for name, running in self._running.items() if running.process.poll() is None])

    def close(self) -> None:
        if self._next_slot is not None:
            self._pool.give_back(self._next_slot)
            self._next_slot = None
        self._pool.close()

    def state(self) -> str:
        if self._pool.waits_for and self._next_slot is None:
            return f"waiting for {self._pool.waits_for}"
        return f"GPU {', '.join(self._gpus)}" if self._gpus else f"{self._jobs} at a time"
