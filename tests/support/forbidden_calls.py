"""A guard for code that must be free: it notes whatever the thread reads from a device, writes, sends or waits for.

Four witnesses, because each is blind somewhere: the profile hook sees calls by name (`os.write`, `Tensor.tolist`),
torch's dispatcher sees what has no call (`float(tensor)`, `if tensor:`), Python's audit hook sees files and sockets
opened in C, and the kernel's own count sees writes that nobody announced.
"""

import io
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__"}
SYNCHRONISING_OPS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique", "_unique2"}
COPYING_OPS = {"_to_copy", "copy_"}
HARMLESS_SYSTEM_CALLS = {"fspath", "getpid"}
AUDITED = ("open", "os.", "socket.", "subprocess.", "shutil.", "tempfile.", "mmap.")
WAITS = {"synchronize", "barrier", "monitored_barrier"}
COLLECTIVES = {"reduce", "gather", "scatter", "broadcast", "all_to_all", "send", "recv"}


@contextmanager
def forbidden_calls() -> Iterator[list[str]]:
    """Yields a list; afterwards it holds what this thread did and should not have done, in its order.

    >>> with forbidden_calls() as calls:
    ...     sum(range(10))
    45
    >>> calls
    []
    >>> with forbidden_calls() as calls:
    ...     total = float(torch.ones(3).sum())
    >>> calls
    ['op aten::_local_scalar_dense']
    """
    calls: list[str] = []
    writes = _write_calls_of_this_thread()
    _audit.listen(calls)
    with _Ops(calls):
        sys.setprofile(lambda frame, event, argument: _profile(calls, frame, event, argument))
        try:
            yield calls
        finally:
            sys.setprofile(None)
            _audit.stop_listening()
    more_writes = _write_calls_of_this_thread() - writes
    if more_writes:
        calls.append(f"kernel: {more_writes} write calls")


class _Ops(TorchDispatchMode):
    """What reaches torch's dispatcher."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if (
            namespace == "c10d"
            or name in SYNCHRONISING_OPS
            or _is_to_host(name, args, kwargs)
            or _is_masked(name, args)
        ):
            self._calls.append(f"op {namespace}::{name}")
        return func(*args, **(kwargs or {}))


def _is_to_host(name: str, args: Any, kwargs: Any) -> bool:
    if name not in COPYING_OPS:
        return False
    if name == "copy_":
        return bool(args[0].is_cpu and isinstance(args[1], torch.Tensor) and not args[1].is_cpu)
    target = (kwargs or {}).get("device")
    return not args[0].is_cpu and target is not None and torch.device(target).type == "cpu"


def _is_masked(name: str, args: Any) -> bool:
    """An index of booleans: how many there are must be known before the result can have a shape."""
    masks = args[1] if name in ("index", "index_put_", "index_put") else ()
    return any(mask is not None and mask.dtype in (torch.bool, torch.uint8) for mask in masks)


def _profile(calls: list[str], frame: FrameType, event: str, argument: Any) -> None:
    if event == "c_call":
        name, owner = argument.__name__, getattr(argument, "__self__", None)
        if _is_forbidden_builtin(name, owner, getattr(argument, "__module__", None) or ""):
            calls.append(f"call {type(owner).__name__ if owner is not None else ''}.{name}")
    elif event == "call" and _is_collective(frame.f_code.co_name, frame.f_code.co_filename):
        calls.append(f"call torch {frame.f_code.co_name}")


def _is_forbidden_builtin(name: str, owner: Any, module: str) -> bool:
    if isinstance(owner, torch.Tensor):
        return name in READS
    if isinstance(owner, io.IOBase | socket.socket):
        return True
    if module == "posix":
        return name not in HARMLESS_SYSTEM_CALLS
    in_torch = type(owner).__module__.startswith("torch")
    return (
        module in ("_socket", "select", "_io")
        or (module, name) in {("time", "sleep"), ("builtins", "print"), ("builtins", "input")}
        or (in_torch and (name in WAITS or _names_a_collective(name)))
    )


def _is_collective(name: str, filename: str) -> bool:
    path = filename.replace("\\", "/")
    if name in WAITS and "/torch/" in path:
        return True
    return "/torch/distributed/" in path and _names_a_collective(name)


def _names_a_collective(name: str) -> bool:
    return any(word in name for word in COLLECTIVES)


class _Audit:
    """Python's audit hook, which can be added but never removed."""

    def __init__(self) -> None:
        self._calls: list[str] | None = None
        self._thread = 0
        sys.addaudithook(self._hear)

    def listen(self, calls: list[str]) -> None:
        self._calls, self._thread = calls, threading.get_ident()

    def stop_listening(self) -> None:
        self._calls = None

    def _hear(self, event: str, arguments: Any) -> None:
        if self._calls is not None and event.startswith(AUDITED) and threading.get_ident() == self._thread:
            self._calls.append(f"audit {event}")


_audit = _Audit()
_OWN_COUNTS = Path("/proc/thread-self/io")


def _write_calls_of_this_thread() -> int:
    """As the kernel counts them; 0 where it does not."""
    if not _OWN_COUNTS.exists():
        return 0
    counts = dict(line.split(": ") for line in _OWN_COUNTS.read_text().splitlines())
    return int(counts["syscw"])
