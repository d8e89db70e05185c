"""Slots of this machine: GPUs or sets of cores, each locked by a file so that two sweeps never share one."""

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flopwatch.errors import InputError
from flopwatch.records.reading import one_line
from flopwatch.sweep.host.processes import CORES, GPUS

_EPSILON = 1e-9


def lock_folder() -> Path:
    """The folder of the lock files, shared by all users of this machine."""
    return Path(os.environ.get("FLOPWATCH_SLOT_DIR", "/tmp/flopwatch-slots"))


@dataclass(frozen=True, slots=True)
class Slot:
    """The devices of one trial.

    Attributes:
        gpus: Device numbers.
        share: The trial's share of its GPU if several trials share it; otherwise 1.0.
        cores: The cores it is pinned to; empty does not pin it.
    """

    gpus: tuple[str, ...] = ()
    share: float = 1.0
    cores: tuple[int, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        found = {}
        if self.gpus:
            found[_variable()] = found[GPUS] = ",".join(self.gpus)
        if self.cores:
            found[CORES] = ",".join(map(str, self.cores))
        return found


class SlotPool:
    """Hands out slots.

    Args:
        gpus: Device numbers; empty divides the cores instead.
        jobs: How many trials may run at once on the cores; not used with GPUs.
        sweep: The folder that the lock files name, for a sweep that waits for them.
    """

    def __init__(self, gpus: tuple[str, ...], jobs: int, sweep: Path) -> None:
        self._sweep = sweep
        self._free_share = dict.fromkeys(gpus, 1.0)
        self._lock_names = {gpu: f"gpu-{uuid}" for gpu, uuid in gpu_uuids(gpus).items()}
        self._core_sets = [] if gpus else core_sets(jobs)
        self._locks: dict[str, IO[str]] = {}
        self.waits_for = ""
        _need_folder()

    def take(self, gpus: float) -> Slot | None:
        """A free slot; None if there is none, and `waits_for` then names the sweep that has it."""
        self.waits_for = ""
        if not self._free_share:
            return self._take_cores(gpus)
        wanted = gpus or 1.0
        self._refuse_more_than_there_is(wanted)
        if wanted < 1.0:
            return self._take_share(wanted)
        free = [gpu for gpu, share in self._free_share.items() if share > 1.0 - _EPSILON and self._lock_gpu(gpu)]
        if len(free) < round(wanted):
            self._unlock_unused()
            return None
        chosen = tuple(free[: round(wanted)])
        self._free_share.update(dict.fromkeys(chosen, 0.0))
        self._unlock_unused()
        return Slot(gpus=chosen)

    def give_back(self, slot: Slot) -> None:
        for gpu in slot.gpus:
            self._free_share[gpu] = min(1.0, self._free_share[gpu] + slot.share)
        if slot.cores:
            self._core_sets.append(slot.cores)
            for core in slot.cores:
                self._unlock(f"core-{core}")
        self._unlock_unused()

    def close(self) -> None:
        for name in list(self._locks):
            self._unlock(name)

    def _take_share(self, wanted: float) -> Slot | None:
        for gpu, share in self._free_share.items():
            if share + _EPSILON >= wanted and self._lock_gpu(gpu):
                self._free_share[gpu] = share - wanted
                return Slot(gpus=(gpu,), share=wanted)
        return None

    def _take_cores(self, gpus: float) -> Slot | None:
        if gpus:
            raise InputError(
                f"a trial needs {gpus:g} GPUs and this machine has none; leave `gpus` out, or name GPUs with --gpu-ids"
            )
        for cores in self._core_sets:
            locked = [core for core in cores if self._lock(f"core-{core}")]
            if len(locked) == len(cores):
                self._core_sets.remove(cores)
                return Slot(cores=cores)
            for core in locked:
                self._unlock(f"core-{core}")
        return None

    def _refuse_more_than_there_is(self, wanted: float) -> None:
        if wanted > len(self._free_share):
            raise InputError(
                f"a trial needs {wanted:g} GPUs and this machine has {len(self._free_share)}; "
                "use fewer, or --engine ray or slurm"
            )

    def _lock_gpu(self, gpu: str) -> bool:
        return self._lock(self._lock_names[gpu])

    def _lock(self, name: str) -> bool:
        if name in self._locks:
            return True
        try:
            file = _open_lock(name)
        except OSError as error:  # the folder existed when the sweep began, so wait for it
            self.waits_for = f"{name.replace('-', ' ')} (its lock cannot be opened: {error.strerror})"
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError):  # ENOLCK, EOPNOTSUPP: waiting would not help
                file.close()
                raise InputError(
                    f"slots cannot be locked in {lock_folder()} ({error.strerror}); "
                    "set FLOPWATCH_SLOT_DIR to a folder on a disk of this machine"
                ) from None
            self.waits_for = f"{name.replace('-', ' ')} ({file.read().strip() or 'another sweep'})"
            file.close()
            return False
        file.truncate(0)
        file.write(f"pid {os.getpid()}, sweep in {one_line(str(self._sweep))}")
        file.flush()
        self._locks[name] = file
        return True

    def _unlock(self, name: str) -> None:
        self._locks.pop(name).close()

    def _unlock_unused(self) -> None:
        for gpu, share in self._free_share.items():
            if share > 1.0 - _EPSILON and self._lock_names[gpu] in self._locks:
                self._unlock(self._lock_names[gpu])


def visible_gpus() -> tuple[str, ...]:
    """The GPUs this process may use, without loading torch: from the environment, or else from the NVIDIA driver."""
    visible = os.environ.get(_variable())
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() and part.strip() != "-1")
    with contextlib.suppress(OSError):
        return tuple(str(index) for index, _ in enumerate(Path("/proc/driver/nvidia/gpus").iterdir()))
    return ()


def _variable() -> str:
    """The variable that limits the visible devices: HIP's only if CUDA's is not set."""
    is_hip = "HIP_VISIBLE_DEVICES" in os.environ and "CUDA_VISIBLE_DEVICES" not in os.environ
    return "HIP_VISIBLE_DEVICES" if is_hip else "CUDA_VISIBLE_DEVICES"


def gpu_uuids(gpus: Sequence[str]) -> dict[str, str]:
    """The UUID of each device, for its lock: device numbers differ between containers and with the device order.

    From nvidia-smi, which sees the same devices as this process; if it fails, the given name stands for the device.
    """
    if not gpus:
        return {}
    ask = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    listed: dict[str, str] = {}
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        output = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
        listed = dict(line.split(", ", 1) for line in output.splitlines())
    # A device may also be named by the beginning of its UUID.
    whole = {gpu: next((uuid for uuid in listed.values() if uuid.startswith(gpu)), gpu) for gpu in gpus}
    return {gpu: listed.get(gpu, whole[gpu]) for gpu in gpus}


def check_gpus(gpus: Sequence[str]) -> None:
    """Raise InputError for a GPU that this machine does not have, because torch would silently use the CPU instead."""
    known = visible_gpus()
    if not known and any(Path(place).exists() for place in _UNCOUNTED):
        return
    has = f"the GPUs {', '.join(known)}" if known else "no GPU"
    for gpu in gpus:
        if gpu.isdecimal() and gpu not in known:
            raise InputError(
                f"--gpu-ids {gpu} names the device with that number, and this machine has {has}; leave it out, or "
                "name GPUs it has. The number of GPUs per trial is --gpus-per-trial"
            )


_UNCOUNTED = ("/dev/kfd", "/dev/dxg", "/dev/accel", "/dev/nvidiactl")
"""If one of these exists, there is an accelerator that /proc/driver/nvidia does not list: AMD, WSL or another."""


def core_sets(jobs: int) -> list[tuple[int, ...]]:
    """Divide the cores of this process into so many sets."""
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= jobs <= len(cores):
        raise InputError(
            f"--jobs {jobs} on {len(cores)} cores: every trial needs at least one core, so --jobs is 1 to {len(cores)}"
        )
    size = len(cores) // jobs
    return [tuple(cores[index * size : (index + 1) * size]) for index in range(jobs)]


def _need_folder() -> None:
    folder = lock_folder()
    try:
        _make_folder(folder)
        is_usable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
        reason = "" if is_usable else "not a folder that can be written to"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise InputError(
            f"cannot keep the locks of this machine's slots in {folder}: {reason}; "
            "name another folder with FLOPWATCH_SLOT_DIR"
        )


def _make_folder(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(parents=True)
        folder.chmod(0o1777)  # all users of the machine share the locks


def _open_lock(name: str) -> IO[str]:
    folder = lock_folder()
    _make_folder(folder)
    file = folder / f"{name}.lock"
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        os.fchmod(handle, 0o666)  # despite this user's umask
    except FileExistsError:
        # Without O_CREAT, which the kernel refuses for another user's file in a sticky folder (fs.protected_regular).
        handle = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    return os.fdopen(handle, "r+", encoding="utf-8", errors="replace")
