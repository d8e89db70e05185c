"""The worker's process: started, waited for, asked for its stacks, killed."""

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flopwatch.sweep import process_tree
from flopwatch.sweep.memory_limit import MemoryLimit
from flopwatch.trial_files import log_file, trial_folder
from flopwatch.trial_records import TrialSpec

PARENT = "FLOPWATCH_PARENT_PID"
"""Whose child a supervisor is meant to be; one that finds another parent was orphaned before it began."""

STACKS = "stacks.txt"

_STACKS_PATIENCE_SECONDS = 2.0
_TERM_PATIENCE_SECONDS = 2.0


def start_worker(
    sweep: Path,
    name: str,
    spec: TrialSpec,
    limit: MemoryLimit,
    cwd: str | None,
    command: Sequence[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start it, or what a trial of several processes has in its place: the `command`, with further variables."""
    folder = trial_folder(sweep, name)
    bind = process_tree.dies_with(os.getpid())

    def become_worker() -> None:
        bind()
        limit.join()

    with log_file(sweep, name).open("ab") as log:
        return subprocess.Popen(
            command or _command(folder, spec),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**_environment(folder, name, spec), **(variables or {})},
            cwd=cwd if cwd and os.path.isdir(cwd) else None,
            start_new_session=True,
            preexec_fn=become_worker,
        )


def _command(folder: Path, spec: TrialSpec) -> list[str]:
    if spec.trainer != "command":
        return [sys.executable, "-m", "flopwatch.sweep.worker", str(folder)]
    values = {"batch_size": spec.batch_size, "seq_len": spec.seq_len, "model": shlex.quote(spec.model)}
    values |= {name: shlex.quote(str(value)) for name, value in spec.options.items()}
    values |= {"dtype": spec.dtype, "seed": spec.seed, "trial_dir": shlex.quote(str(folder))}
    values |= {"processes": spec.processes, "micro_batch_size": spec.micro_batch_size or spec.batch_size}
    command = spec.command or ""
    for key, value in values.items():  # not str.format: shell commands are full of braces of their own
        command = command.replace("{" + key + "}", str(value))
    return ["/bin/sh", "-c", command]


def _environment(folder: Path, name: str, spec: TrialSpec) -> dict[str, str]:
    environment = {
        **os.environ,
        process_tree.TRIAL_MARK: str(folder),
        "FLOPWATCH_TRIAL_NAME": name,
        "FLOPWATCH_BATCH_SIZE": str(spec.batch_size),
        "FLOPWATCH_SEQ_LEN": str(spec.seq_len),
        "FLOPWATCH_MODEL": spec.model,
        "FLOPWATCH_PROCESSES": str(spec.processes),
        # Without it CUDA numbers devices by speed, NVML by bus: the wrong one would be watched.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop(PARENT, None)
    if spec.threads is not None:
        environment |= {variable: str(spec.threads) for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return environment


def waiter(worker: "subprocess.Popen[bytes]") -> Callable[[float], bool]:
    """Waits for the worker's end and wakes at once, by a pidfd where the system has them."""
    try:
        poll = select.poll()
        handle = os.pidfd_open(worker.pid)
        poll.register(handle, select.POLLIN)
    except (AttributeError, OSError):
        return lambda seconds: _ends_within(worker, seconds)
    return lambda seconds: bool(poll.poll(seconds * 1000)) and worker.wait() is not None


def _ends_within(worker: "subprocess.Popen[bytes]", seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(seconds)
        return True
    return False


def end_worker(worker: "subprocess.Popen[bytes]", folder: Path, *, is_command: bool, wants_stacks: bool) -> str:
    """Kill it, and return its stacks when they are wanted. A command of the user's is asked to go first."""
    stacks = ""
    if is_command:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGTERM)
        _ends_within(worker, _TERM_PATIENCE_SECONDS)
    elif wants_stacks:
        stacks = _stacks(worker, folder)
    with contextlib.suppress(ProcessLookupError):
        worker.kill()
    _ends_within(worker, 10.0)
    return stacks


def _stacks(worker: "subprocess.Popen[bytes]", folder: Path) -> str:
    """What every thread does, by faulthandler: it answers in the signal handler, also while the GIL is held."""
    file = folder / STACKS
    if not file.exists():
        return "none: it had not come far enough to answer"
    if _blocks(worker.pid, signal.SIGUSR1):
        return f"none: it blocks signals; {_kernel_state(worker.pid)}"
    worker.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + _STACKS_PATIENCE_SECONDS
    size = -1
    while time.monotonic() < deadline and worker.poll() is None:
        time.sleep(0.05)
        if 0 < file.stat().st_size == size:  # it has stopped growing
            break
        size = file.stat().st_size
    return file.read_text(errors="replace")[:20_000]


def _blocks(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.split("SigBlk:")[1].split()[0], 16) >> (number - 1) & 1)
    return False


def _kernel_state(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text()
        return f"process state {status.split('State:')[1].splitlines()[0].strip()}"
    return "process state unknown"
