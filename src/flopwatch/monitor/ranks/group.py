"""Connects the monitors of a job's ranks, and finds out which ranks share a device or a batch.

The monitors use their own gloo group on the host, so that nothing is queued on a device or comes between the training's
collectives. The group is made without `new_group`, which all ranks would have to call in the same order: a monitor that
exists only on rank 0 would then hang the training. Gloo connects two ranks when they first exchange a message. The call
blocks until both want to connect, so a rank first checks in the job's key-value store that the other rank is ready.
"""

import ctypes
import datetime as dt
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from flopwatch.records.flops import Peak
from flopwatch.torch_internals import default_store, fsdp_groups, gloo_group

_PATIENCE = dt.timedelta(days=7)
"""Gloo's timeout. It is long, so that the monitor never gives up on a suspended rank before the training does."""
_AT_ONCE = dt.timedelta(milliseconds=1)
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 2.0
"""Limits of the pause between two polls of the key-value store."""


def is_possible() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.is_gloo_available()


def open_job_store() -> Any:
    """Open the key-value store of this job's process group; all keys get the prefix `flopwatch`."""
    # `clone` opens a second connection, because waiting on the training's connection would block the training.
    return PrefixStore("flopwatch", default_store().clone())


@dataclass(frozen=True, slots=True)
class RunKey:
    """Identifies a monitor of this process for the monitors of the other ranks.

    Attributes:
        logging_rank: The rank that writes the run's log.
        number: How many monitors with this logging rank the process has started, including this one.
        log: The log's path on this rank, with a number appended, because several monitors may write to one path.
        known_logs: The logs of all monitors of this process, including those started later.
    """

    logging_rank: int
    number: int
    log: str
    known_logs: Collection[str] = ()

    @property
    def run(self) -> str:
        return f"{self.logging_rank}/{self.number}"


def run_store(job_store: Any, run: str) -> Any:
    """Return the part of the job's store that belongs to one run."""
    return PrefixStore(run, job_store)


def publish_run(job_store: Any, key: RunKey) -> None:
    """Publish a run from the logging rank, so that other ranks can find it by the path of its log."""
    run_store(job_store, key.run).set("log", key.log)
    job_store.set(_by_log(key), key.run)


def end_run(job_store: Any, key: RunKey) -> None:
    """Mark a run as ended on the logging rank, so that later monitors do not join it."""
    run_store(job_store, key.run).set("over", "")


def find_run(job_store: Any, key: RunKey, rank: int, has_plan: str) -> str | None:
    """Find the run to which this rank's monitor belongs; None while that is not certain.

    A run with the same log path is the right one. If ranks write to different paths (`out/rank3`, a disk of the node),
    the n-th monitor of this rank takes the n-th run of the logging rank, or the next one that has not ended and that
    this rank has not joined. That could be the run of another monitor, so it is taken only if its log belongs to no
    other monitor of this process, and only once the logging rank can send its `RunPlan`. By then, all monitors that
    were started together have published their runs.
    """
    if is_set(job_store, _by_log(key)):
        return str(job_store.get(_by_log(key)).decode())
    numbered = key
    while is_set(store := run_store(job_store, numbered.run), "over") or is_set(store, _joined(rank)):
        numbered = replace(numbered, number=numbered.number + 1)
    if is_set(store, has_plan) and store.get("log").decode() not in key.known_logs:
        return numbered.run
    return None


def join_run(job_store: Any, run: str, rank: int) -> Any:
    """Mark the run as joined by this rank, and return the run's store."""
    store = run_store(job_store, run)
    store.set(_joined(rank), "")
    return store


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _by_log(key: RunKey) -> str:
    return f"log/{key.logging_rank}/{key.log}"


def open_group(store: Any) -> Any:
    """Join the gloo group of a run; other ranks may join later or never."""
    return gloo_group(store, dist.get_rank(), dist.get_world_size(), device=_device(), timeout=_PATIENCE)


def is_set(store: Any, key: str) -> bool:
    """Whether the store has the key. `get` would wait for the key, and that wait cannot be interrupted."""
    return bool(store.check([key]))


def pauses() -> Iterator[float]:
    """Yield the pauses between polls in seconds: a tenth of the time waited so far, within limits."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        yield min(max(_SHORTEST_PAUSE_SECONDS, 0.1 * waited), _LONGEST_PAUSE_SECONDS)


def _device() -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface, lazy_init=True)
    return dist.ProcessGroupGloo.create_default_device(lazy_init=True)


def send(group: Any, rank: int, message: bytes, *, tag: int, connected: Callable[[int], None]) -> None:
    """Send a message to a rank. `connected` is called as soon as `end_waits` can be used with this rank."""
    buffer = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    sending = group.send([buffer], rank, tag)
    connected(rank)
    sending.wait()


def receive(group: Any, rank: int, size: int, *, tag: int, connected: Callable[[int], None]) -> bytes:
    """Receive a message from a rank. Blocks the calling thread without holding the GIL."""
    buffer = torch.empty(size, dtype=torch.uint8)
    receiving = group.recv([buffer], rank, tag)
    connected(rank)
    receiving.wait()
    return bytes(buffer.tolist())


def end_waits(group: Any, rank: int, *, tag: int) -> None:
    """End all waits in this group, in all threads: each raises an error. The group cannot be used afterwards.

    Gloo has no function for this (`abort` does not end waits), but a timeout of one wait ends all others too. `rank`
    must be connected.
    """
    with suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], rank, tag).wait(_AT_ONCE)


def park(thread: threading.Thread) -> bool:
    """Stop a thread that waits inside torch while the process exits; returns whether that worked.

    Before Python 3.14, a thread that returns to an interpreter that is shutting down is ended by `pthread_exit`. C++
    code reacts with `std::terminate`, which would abort the process after a successful training. Python 3.14 makes
    such threads pause forever (https://github.com/python/cpython/pull/105805); this does the same for older versions.
    Call it at the very end of the process, while holding the GIL.
    """
    if sys.version_info >= (3, 14) or thread.ident is None or not _is_asleep(thread):
        return False
    number = _signal_that_pauses()
    if number is None:
        return False
    signal.pthread_kill(thread.ident, number)
    return True


def _is_asleep(thread: threading.Thread) -> bool:
    """Whether a thread waits in the kernel. A running one might hold a lock, such as malloc's, that the exit needs."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:  # not Linux, or the thread has just ended
        return False
    return stat.rpartition(")")[2].split()[0] == "S"


def _signal_that_pauses() -> int | None:
    """Make libc's `pause` the handler of an unused signal, because Python handlers run only in the main thread."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1):
        before = libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
        if before is None:  # SIG_DFL
            return number
        libc.signal(number, before)
    return None


_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Environment variables with the number of ranks on this host: set by torchrun and accelerate, Open MPI, or MPICH."""


def shared_peak(peak: Peak, ranks: int) -> Peak:
    """Divide a device's peak by the number of ranks that share the device. A peak given by the user is not divided.

    >>> cpu = Peak(3e12, "a CPU", "fp32", "16 cores x 3 GHz", "derived", "high")
    >>> shared_peak(cpu, 3).flops_per_s, shared_peak(cpu, 3).source
    (1000000000000.0, '16 cores x 3 GHz, shared by 3 ranks')
    """
    if ranks <= 1 or peak.kind == "override":
        return peak
    source = f"{peak.source}, shared by {ranks} ranks"
    return replace(peak, flops_per_s=peak.flops_per_s / ranks, fraction=peak.fraction / ranks, source=source)


def device_identity(device: torch.device) -> str:
    """Identify the accelerator, or the set of CPU cores, on which this rank computes.

    Sets of cores that overlap without being equal count as different devices.
    """
    host = socket.gethostname()
    if device.type == "cpu":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ["all"]
        return f"{host}/cpu/{','.join(map(str, cores))}"
    # The device's index alone is not enough: with one visible device per rank, each rank's device has index 0.
    return f"{host}/{device}/{_uuid(device) or os.environ.get('LOCAL_RANK', '')}"


def _uuid(device: torch.device) -> str | None:
    module: Any = getattr(torch, device.type, None)
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


def ranks_by_launcher(device_type: str, environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks share the device according to the launcher's variables: all ranks of a host share its CPU.

    >>> ranks_by_launcher("cpu", {"LOCAL_WORLD_SIZE": "4"}), ranks_by_launcher("cuda", {"LOCAL_WORLD_SIZE": "4"})
    (4, 1)
    """
    counts = [environment[name] for name in _LOCAL_RANKS if environment.get(name, "").isdigit()]
    return max(int(counts[0]), 1) if counts and device_type == "cpu" else 1


class DeviceCensus:
    """Counts the ranks on each device; the run's key-value store has a counter per device."""

    def __init__(self, store: Any, identity: str, world_size: int) -> None:
        self._store = store
        self._key = f"on_device/{identity}"
        self._world_size = world_size
        store.add(self._key, 1)
        store.add("on_any_device", 1)

    def ranks(self, *, is_final: bool = False) -> int | None:
        """How many ranks share this device. None until all ranks are counted; with `is_final`, the count so far."""
        if not is_final and int(self._store.add("on_any_device", 0)) < self._world_size:
            return None
        return int(self._store.add(self._key, 0))


def data_parallel_size(model: nn.Module | None, world_size: int) -> int:
    """Find out from the model's parameters how many ranks have different batches.

    This detects tensor parallelism (DTensor parameters on a mesh that is not FSDP2's). Context and pipeline parallelism
    do not change the parameters, so users must pass `data_parallel_size`.
    """
    parameter = next((p for p in model.parameters() if isinstance(p, DTensor)), None) if model is not None else None
    if model is None or parameter is None:
        return world_size
    sharded = next((size for module in model.modules() if (size := _fsdp_size(module))), None)
    if sharded is not None:
        return sharded
    mesh_size: int = parameter.device_mesh.size()
    return max(1, world_size // mesh_size)


def is_sharded(model: nn.Module | None) -> bool:
    """Whether a rank has only parts of the parameters, because of FSDP, FSDP2 or tensor parallelism."""
    if model is None:
        return False
    return any(isinstance(p, DTensor | FlatParameter) for p in model.parameters()) or any(
        isinstance(module, FullyShardedDataParallel) for module in model.modules()
    )


def _fsdp_size(module: nn.Module) -> int | None:
    """Number of ranks over which FSDP2 shards and replicates this module; None without FSDP2."""
    if not isinstance(module, FSDPModule):
        return None
    # The largest mesh is used, because experts can be sharded over a smaller mesh than other parameters.
    return max((int(group.mesh_info.mesh.size()) for group in fsdp_groups(module)), default=None)
