"""Every name and setting of Ray that flopwatch uses outside its documented API, and the behaviour it works around.

Checked with Ray 2.60.0. Each name, its reason, and what happens if a version of Ray does not have it:

- `_node_ip_address` of `ray.init` binds a Ray of our own to loopback. Without it, Ray listens on the network.
- `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER` and `RAY_worker_niceness`: see `local_environment`. Ray ignores unknown variables.
- `ray.experimental.internal_kv` holds the node that each trial runs on. Without it, a trial whose node is cut off is
  waited for as long as Ray waits, and queued tasks are not withdrawn.
- The names of exception classes that can mean an unreachable head node. An unknown one ends the sweep as an error.
"""

import atexit
import contextlib
import functools
import inspect
import io
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.optional import require

_PATIENCE_SECONDS = 24 * 3600.0

_OUTAGE_ERRORS = ("RpcError", "RaySystemError", "GetTimeoutError")
"""Ray's exceptions that can mean that the head node does not answer; by name, to avoid importing Ray here."""


# Importing and starting Ray


def import_ray() -> Any:
    """Ray, even if `amdsmi` is installed without ROCm (the package zeus installs it).

    `import amdsmi` then raises KeyError, and `import ray` catches only ImportError, so it would fail. Still so in Ray
    2.60 with amdsmi 7.0.2; remove this, `is_amdsmi_broken` and `_stand_in_folder` when Ray catches every exception.
    """
    if "ray" not in sys.modules and is_amdsmi_broken():
        sys.modules["amdsmi"] = None  # type: ignore[assignment]
    return require("ray", "ray")


def is_amdsmi_broken() -> bool:
    """Whether it is installed and cannot be imported."""
    if "amdsmi" in sys.modules:
        return sys.modules["amdsmi"] is None
    if find_spec("amdsmi") is None:
        return False
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints an error message
            import_module("amdsmi")
    except Exception:  # KeyError, OSError, AttributeError, depending on what is missing
        return True
    return False


@functools.cache
def _stand_in_folder() -> str:
    """A folder with an `amdsmi` that raises ImportError, for PYTHONPATH: Ray's own processes import Ray too."""
    folder = tempfile.mkdtemp(prefix="flopwatch-amdsmi-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Path(folder, "amdsmi.py").write_text('raise ImportError("amdsmi is installed without ROCm")\n')
    return folder


def local_environment() -> dict[str, str]:
    """The environment variables for a Ray of our own and its processes."""
    needed = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Otherwise Ray takes the address of the network card and listens on every interface.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray runs its workers at nice 15. Trials would inherit that, and any other load would distort their times.
        "RAY_worker_niceness": "0",
        # If Ray finds a token in the home folder it turns authentication on, so give it a token for this run only.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _own_token(),
    }
    if is_amdsmi_broken():
        needed["PYTHONPATH"] = os.pathsep.join(filter(None, [_stand_in_folder(), os.environ.get("PYTHONPATH")]))
    return needed


@functools.cache
def _own_token() -> str:
    """One token for the life of this process, because Ray's core reads it only once."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def in_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables inside the context."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_local(ray: Any, cpus: int | None, gpus: int | None) -> None:
    """Start one node on loopback without dashboard; it ends with this process, even if that is killed."""
    loopback = {"_node_ip_address": "127.0.0.1"} if _has_parameter(ray.init, "_node_ip_address") else {}
    ray.init(
        address="local",  # without it Ray joins whatever address an earlier Ray left in its files
        num_cpus=cpus,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 << 20,  # the minimum; results travel as files
        **loopback,
    )


def _has_parameter(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(one.name == name or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def join(ray: Any, address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")


# On which node a trial runs, in Ray's key-value store. Ray never ends a task whose node is cut off, so the runner must.


def publish_node(token: str, name: str) -> None:
    """In a task: record the node that this trial runs on."""
    if (store := _key_value_store()) is None:
        return
    node = import_module("ray").get_runtime_context().get_node_id()
    store._internal_kv_put(_key(token, name), node.encode(), overwrite=True)


def node_of(token: str, name: str) -> str | None:
    """The node that a trial runs on; None if it has not begun."""
    if (store := _key_value_store()) is None:
        return None
    node = store._internal_kv_get(_key(token, name))
    return None if node is None else node.decode()


def forget_node(token: str, name: str) -> None:
    if (store := _key_value_store()) is not None:
        store._internal_kv_del(_key(token, name))


def has_node_records() -> bool:
    """Whether `node_of` is reliable: without the store it returns None for every trial."""
    return _key_value_store() is not None


@functools.cache
def _key_value_store() -> ModuleType | None:
    names = ("_internal_kv_put", "_internal_kv_get", "_internal_kv_del")
    with contextlib.suppress(ImportError):
        store = import_module("ray.experimental.internal_kv")
        return store if all(hasattr(store, name) for name in names) else None
    return None


def _key(token: str, name: str) -> bytes:
    return f"flopwatch/{token}/{name}".encode()


class RayOutage:
    """Tolerates a cluster that does not answer for a while, because its head restarts or the network is cut.

    Args:
        can_come_back: False for a Ray of our own, which does not restart.
        clock: Measures the outage.

    Attributes:
        since: When the outage began; None while Ray answers.
    """

    def __init__(self, *, can_come_back: bool, clock: Clock = monotonic_seconds) -> None:
        self.since: float | None = None
        self._can_come_back, self._clock = can_come_back, clock
        self._message = ""

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Suppress errors that mean an unreachable cluster, for up to a day; raise all others."""
        try:
            yield
        except Exception as error:
            is_outage = isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ in _OUTAGE_ERRORS
            if not is_outage or not self._can_come_back:
                raise
            if self.since is not None and self._clock() - self.since > _PATIENCE_SECONDS:
                raise
            self.since = self._clock() if self.since is None else self.since
            self._message = " ".join(str(error).split())[:200]

    def end(self) -> None:
        """Ray has answered."""
        self.since = None

    def state(self) -> str:
        if self.since is None:
            return ""
        return f"Ray has not answered for {self._clock() - self.since:.0f} s: {self._message}"
