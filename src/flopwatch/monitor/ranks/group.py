"""Where the monitors of a job's ranks find each other, and a process group for a few bytes per window.

It is a gloo group on the host whatever the training uses: nothing is queued on a device, nothing can come between the
training's own collectives. It is made without `new_group`, which every rank would have to call in the same order: a
monitor that exists on rank 0 only must not hang a training. Connections are made when first used, so a rank has as
many as it has neighbours in the tree. Gloo blocks until both ends of a connection want it, so a rank first checks in
the store that the other end does.
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
"""A rank may be suspended, or its network cut, for as long as the training itself survives it."""
_AT_ONCE = dt.timedelta(milliseconds=1)
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 2.0
"""Between two polls of the store."""


def is_possible() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.is_gloo_available()


def open_job_store() -> Any:
    """The key-value store of this job's process group, under a prefix of ours."""
    # A second connection, because waiting on the training's own would block the training's calls.
    return PrefixStore("flopwatch", default_store().clone())


@dataclass(frozen=True, slots=True)
class RunKey:
    """One monitor of this process, as the monitors of the other ranks can recognise it.

    Attributes:
        logging_rank: The rank that writes the run's log.
        number: How many monitors with this logging rank the process has started, this one included.
        log: The log's path on this rank, numbered if several monitors wrote to it.
        known_logs: The logs of all monitors of this process; later ones are added to it.
    """

    logging_rank: int
    number: int
    log: str
    known_logs: Collection[str] = ()

    @property
    def run(self) -> str:
        return f"{self.logging_rank}/{self.number}"


def run_store(job_store: Any, run: str) -> Any:
    """The part of the job's store that belongs to one run."""
    return PrefixStore(run, job_store)


def publish_run(job_store: Any, key: RunKey) -> None:
    """On the logging rank, before anything else: other ranks may now find this run by the path of its log."""
    run_store(job_store, key.run).set("log", key.log)
    job_store.set(_by_log(key), key.run)


def end_run(job_store: Any, key: RunKey) -> None:
    """On the logging rank: later monitors do not belong to this run."""
    run_store(job_store, key.run).set("over", "")


def find_run(job_store: Any, key: RunKey, rank: int, has_plan: str) -> str | None:
    """On another rank: the run this monitor belongs to; None while it cannot be decided.

    The job's store already separates jobs, so only monitors of one job can be mistaken for each other. A run with the
    same log path is the right one. Where ranks write to different paths (`out/rank3`, a disk of the node), the n-th
    monitor of a rank belongs to the n-th run of the logging rank, but not to one that is over, that this rank has
    joined before, or whose log another monitor here has. Monitors that only the logging rank has make this order
    uncertain, so it is used only once the run has a plan: by then monitors that were started together are published.
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
    """Mark the run as joined by this rank; returns the run's store."""
    store = run_store(job_store, run)
    store.set(_joined(rank), "")
    return store


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _by_log(key: RunKey) -> str:
    return f"log/{key.logging_rank}/{key.log}"


def open_group(store: Any) -> Any:
    """Join the group; other ranks may join later or never."""
    return gloo_group(store, dist.get_rank(), dist.get_world_size(), device=_device(), timeout=_PATIENCE)


def is_set(store: Any, key: str) -> bool:
    """Whether the store has the key. `get` would wait for it, and nothing can interrupt a thread that waits there."""
    return bool(store.check([key]))


def pauses() -> Iterator[float]:
    """Seconds between two polls: a tenth of the time waited so far."""
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
    """`connected` is called as soon as `end_waits` can be used with this rank."""
    buffer = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    sending = group.send([buffer], rank, tag)
    connected(rank)
    sending.wait()


def receive(group: Any, rank: int, size: int, *, tag: int, connected: Callable[[int], None]) -> bytes:
    """Blocks the calling thread, without holding the interpreter's lock."""
    buffer = torch.empty(size, dtype=torch.uint8)
    receiving = group.recv([buffer], rank, tag)
    connected(rank)
    receiving.wait()
    return bytes(buffer.tolist())


def end_waits(group: Any, rank: int, *, tag: int) -> None:
    """Make every wait in this group raise, in any thread; nothing can be sent or received afterwards.

    Gloo has no call for this (`abort` does not end waits), but one wait that times out ends all others too. `rank` must
    be a connected one.
    """
    with suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], rank, tag).wait(_AT_ONCE)


# A thread that is inside torch when the process exits:
#
# Before Python 3.14, a thread that returns to an interpreter that is shutting down is ended by `pthread_exit`. C++
# answers that with `std::terminate`, so the whole process would abort after a training that went well. Python 3.14 lets
# such a thread pause forever (https://github.com/python/cpython/pull/105805); `park` does the same for older versions.


def park(thread: threading.Thread) -> bool:
    """Keep a thread that waits in the kernel there until the process is gone; True if that worked.

    Call it at the very end of the process, from a thread that holds the GIL, so that the other thread does not.
    """
    if sys.version_info >= (3, 14) or thread.ident is None or not _is_asleep(thread):
        return False
    number = _signal_that_pauses()
    if number is None:
        return False
    signal.pthread_kill(thread.ident, number)
    return True


def _is_asleep(thread: threading.Thread) -> bool:
    """A running thread might hold a lock that the exit of the process needs, such as malloc's."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:  # not Linux, or the thread has just ended
        return False
    return stat.rpartition(")")[2].split()[0] == "S"


def _signal_that_pauses() -> int | None:
    """An unused signal, with libc's `pause` as its handler: the thread could not run a handler in Python."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1):
        before = libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))
        if before is None:  # SIG_DFL
            return number
        libc.signal(number, before)
    return None


# What ranks share: a device, and with it its peak; or a batch, so that only some ranks see different data.


_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Variables that hold the number of ranks on this host: torchrun and accelerate, Open MPI, MPICH."""


def shared_peak(peak: Peak, ranks: int) -> Peak:
    """The part of a device's peak that each of `ranks` ranks can use. A peak given by the user is not divided.

    >>> cpu = Peak(3e12, "a CPU", "fp32", "16 cores x 3 GHz", "derived", "high")
    >>> shared_peak(cpu, 3).flops_per_s, shared_peak(cpu, 3).source
    (1000000000000.0, '16 cores x 3 GHz, shared by 3 ranks')
    """
    if ranks <= 1 or peak.kind == "override":
        return peak
    source = f"{peak.source}, shared by {ranks} ranks"
    return replace(peak, flops_per_s=peak.flops_per_s / ranks, fraction=peak.fraction / ranks, source=source)


def device_identity(device: torch.device) -> str:
    """A text that is equal for ranks on the same device: the same set of cores of a host, or the same accelerator.

    Sets of cores that overlap without being equal count as different devices.
    """
    host = socket.gethostname()
    if device.type == "cpu":
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ["all"]
        return f"{host}/cpu/{','.join(map(str, cores))}"
    # The index alone is not enough: with one visible device per rank, every rank calls its own number 0.
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
    """Counts the ranks on each device, with one counter per device in the run's store."""

    def __init__(self, store: Any, identity: str, world_size: int) -> None:
        self._store = store
        self._key = f"on_device/{identity}"
        self._world_size = world_size
        store.add(self._key, 1)
        store.add("on_any_device", 1)

    def ranks(self, *, is_final: bool = False) -> int | None:
        """How many ranks share this one's device; None while ranks are missing, unless `is_final`."""
        if not is_final and int(self._store.add("on_any_device", 0)) < self._world_size:
            return None
        return int(self._store.add(self._key, 0))


def data_parallel_size(model: nn.Module | None, world_size: int) -> int:
    """How many ranks work on different batches, as far as the model's parameters show.

    Tensor parallelism is visible (DTensor parameters on a mesh that is not FSDP2's). Context and pipeline parallelism
    leave no mark on parameters, so users pass `data_parallel_size`.
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
    """Whether a rank holds only parts of the parameters: FSDP of either kind, tensor parallelism."""
    if model is None:
        return False
    return any(isinstance(p, DTensor | FlatParameter) for p in model.parameters()) or any(
        isinstance(module, FullyShardedDataParallel) for module in model.modules()
    )


def _fsdp_size(module: nn.Module) -> int | None:
    """Ranks that FSDP2 shards and replicates this module over."""
    if not isinstance(module, FSDPModule):
        return None
    # Experts may be sharded over a smaller mesh than the rest.
    return max((int(group.mesh_info.mesh.size()) for group in fsdp_groups(module)), default=None)
