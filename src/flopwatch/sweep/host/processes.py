"""Starts and ends the worker of a trial, and finds and kills every process that the worker has started.

On Linux, /proc and prctl also find processes that left the worker's session or lost their parent; elsewhere only the
process group is known. Supervisors import this module, so it uses the standard library only.
"""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.process import all_pids, descendants, keyed_lines, read_stat
from flopwatch.records.settings import placeholders
from flopwatch.records.trial import TrialJob, TrialSpec
from flopwatch.sweep.host.memory import MemoryLimit

TRIAL_MARK = "FLOPWATCH_TRIAL_DIR"
"""Environment variable that every process of a trial inherits, so that its orphans can be found."""

ATTEMPT_MARK = "FLOPWATCH_TRIAL_ATTEMPT"
"""Environment variable of the processes of one attempt, by which users and campaigns tell attempts apart."""

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_KILL_PATIENCE_SECONDS = 10.0  # time for killed processes to end


def check_system() -> None:
    """Raise an InputError on a system that cannot run trials at all.

    Without /proc (macOS), trials run, but their memory limits and processes that left the session are not watched.
    """
    if not hasattr(os, "fork"):
        raise InputError(
            "sweep, trial and fit need Linux (or macOS, without memory limits), because they use os.fork, process "
            "groups and file locks, which this system does not have; counting, monitoring, watch and report need none"
        )


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this signal to this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def ends_with_parent(signal_number: int) -> bool:
    """As `die_with_parent`; return False if the parent has ended already, according to the variable PARENT."""
    die_with_parent(signal_number)
    expected = os.environ.get(PARENT)
    return expected is None or os.getppid() == int(expected)


def dies_with(parent: int) -> Callable[[], None]:
    """A `preexec_fn` for subprocess: the kernel kills the child when its parent, whose pid is given, ends."""

    def bind() -> None:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)

    return bind


def adopt_orphans() -> None:
    """Make this process the parent of all its descendants that lose their parent, even after `setsid`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def marked_processes(trial_dir: Path) -> list[int]:
    """Pids of this host's processes with this trial's environment variable.

    Without this process and its ancestors, because a user's shell may have the same environment variables.
    """
    spared, pid = {0}, os.getpid()
    while pid not in spared:
        spared.add(pid)
        stat = read_stat(pid)
        pid = stat.parent if stat is not None else 0
    return [pid for pid in all_pids() if pid not in spared and _is_marked(pid, trial_dir)]


def _is_marked(pid: int, trial_dir: Path) -> bool:
    try:
        return os.fsencode(f"{TRIAL_MARK}={trial_dir}") in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def kill_descendants(pid: int) -> list[int]:
    """SIGKILL all descendants until none is left; return those that survive because they are stuck in the kernel."""
    return _kill_until_gone(lambda: descendants(pid))


def kill_marked(trial_dir: Path) -> list[int]:
    """SIGKILL what `marked_processes` finds until nothing is left or the time is over; return the pids that survive."""
    return _kill_until_gone(lambda: marked_processes(trial_dir))


def _kill_until_gone(find: Callable[[], list[int]]) -> list[int]:
    deadline = time.monotonic() + _KILL_PATIENCE_SECONDS
    while left := find():
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # reap adopted orphans, so that they do not stay as zombies
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return left
        time.sleep(0.002)
    return []


PARENT = "FLOPWATCH_PARENT_PID"
"""Environment variable with the pid of a supervisor's parent, by which a supervisor sees that it lost its parent."""

CORES = "FLOPWATCH_CORES"
"""Environment variable with the cores of a supervisor and its trial, such as `0,1`."""

GPUS = "FLOPWATCH_GPUS"
"""Environment variable with a trial's GPUs. If torch finds none, the worker fails instead of measuring the CPU."""

_STACKS_PATIENCE_SECONDS = 2.0  # time to wait for the stacks, which a process stuck in the kernel never writes
_STACKS_LENGTH = 20_000  # the stacks of one process are cut to this number of characters
_TERM_PATIENCE_SECONDS = 2.0  # time for a command to clean up after SIGTERM


def start_worker(folder: Path, job: TrialJob, limit: MemoryLimit, output: int) -> "subprocess.Popen[bytes]":
    """Start the worker. `folder` is the trial's. `output` is the file descriptor that the worker prints to."""
    bind = dies_with(os.getpid())

    def become_worker() -> None:
        bind()
        limit.join()

    return subprocess.Popen(
        _command(folder, job.spec),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=_environment(folder, job.spec),
        cwd=job.cwd if job.cwd and os.path.isdir(job.cwd) else None,
        start_new_session=True,
        preexec_fn=become_worker,
    )


def _command(folder: Path, spec: TrialSpec) -> list[str]:
    if spec.trainer != "command":
        module = "torchrun" if spec.runs_torchrun else "main"
        return [sys.executable, "-m", f"flopwatch.sweep.worker.{module}", str(folder)]
    values = placeholders(spec) | {"trial_dir": shlex.quote(str(folder))}
    command = spec.command or ""
    for key, value in values.items():  # not str.format, because shell commands contain other braces
        command = command.replace("{" + key + "}", str(value))
    return ["/bin/sh", "-c", command]


def _environment(folder: Path, spec: TrialSpec) -> dict[str, str]:
    environment = {
        **os.environ,
        TRIAL_MARK: str(folder),
        "FLOPWATCH_TRIAL_NAME": folder.name,
        "FLOPWATCH_BATCH_SIZE": str(spec.batch_size),
        "FLOPWATCH_SEQ_LEN": str(spec.seq_len),
        "FLOPWATCH_MODEL": spec.model,
        "FLOPWATCH_PROCESSES": str(spec.processes),
        # NVML numbers GPUs by bus. CUDA does so only with this setting; by default it numbers them by speed.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop(PARENT, None)
    if spec.threads is not None:
        environment |= {variable: str(spec.threads) for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return environment


def ends_within(worker: "subprocess.Popen[bytes]", seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(seconds)
        return True
    return False


def end_worker(worker: "subprocess.Popen[bytes]", *, sigterm_first: bool) -> None:
    if sigterm_first:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGTERM)
        ends_within(worker, _TERM_PATIENCE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
    ends_within(worker, 10.0)


def python_stacks(pids: Sequence[int], files: Sequence[Path]) -> list[str]:
    """The stacks of all threads of these processes, which they write to these files; empty where one does not.

    faulthandler writes them in a handler of SIGUSR1, even while a thread holds the GIL. Without a handler, the signal
    would end the process.
    """
    for pid in pids:
        handled = int(keyed_lines(f"/proc/{pid}/status").get(b"SigCgt", b"0"), 16)
        if handled >> (signal.SIGUSR1 - 1) & 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
    return _written_texts(files)


def _written_texts(files: Sequence[Path]) -> list[str]:
    """Wait until all of these files have content and have stopped growing; return their beginnings."""
    deadline, sizes = time.monotonic() + _STACKS_PATIENCE_SECONDS, [-1]
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, sizes = sizes, [file.stat().st_size if file.exists() else 0 for file in files]
        if before == sizes and all(sizes):
            break
    return [file.read_text(errors="replace")[:_STACKS_LENGTH] if file.exists() else "" for file in files]
