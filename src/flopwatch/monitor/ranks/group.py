"""A process group of our own, for a few bytes per window.

It is a gloo group on the host whatever the training uses: nothing is queued on a device, nothing can come between the
training's own collectives. It is made without `new_group`, which every rank would have to call in the same order: a
monitor that exists on rank 0 only must not hang a training. Connections are made when first used, so a rank has as
many as it has neighbours in the tree. Gloo waits inside itself until both ends of a connection want it, so a rank
first looks into the store whether the other does.
"""

import datetime as dt
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_PATIENCE = dt.timedelta(days=7)
"""A rank may be stopped, or its link cut, for as long as the training bears it."""
_AT_ONCE = dt.timedelta(milliseconds=1)
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 2.0
"""Between two looks into the store."""


def is_possible() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.is_gloo_available()


def open_store(name: str) -> Any:
    """Where ranks find each other."""
    # A connection to the store of its own: a wait on the training's would block the training's own calls.
    training_store: Any = distributed_c10d._get_default_store()
    return distributed_c10d.PrefixStore(f"flopwatch/{name}", training_store.clone())


def open_group(store: Any) -> Any:
    """Join the group; the other ranks may come later or never."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [_device()]
    options._timeout = _PATIENCE
    return gloo(store, dist.get_rank(), dist.get_world_size(), options)


def is_set(store: Any, key: str) -> bool:
    """Does not wait, as `get` would: nothing but the end of the process reaches a thread that waits in there."""
    return bool(store.check([key]))


def pauses() -> Iterator[float]:
    """Between two looks: a tenth of the time waited so far."""
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
    """Whatever waits in this group, in any thread, raises; nothing can be sent or received afterwards.

    Gloo has no call for it (`abort` leaves waits alone), but a wait that runs into its time limit takes the others
    with it. `rank` must be one that is connected.
    """
    with suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], rank, tag).wait(_AT_ONCE)
