"""All names and settings of Ray that flopwatch uses although Ray does not document them. Checked with Ray 2.60.0.

Each name, its purpose, and what happens with a version of Ray that does not have it:

- `_node_ip_address` of `ray.init` makes a local Ray listen on loopback only. Without it, Ray listens on the network.
- `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER` and `RAY_worker_niceness`: see `local_environment`. Ray ignores unknown variables.
- `ray.experimental.internal_kv` stores on which node each trial runs. Without it, the end of a trial on a disconnected
  node is noticed only when Ray notices it, and queued tasks are not withdrawn.
- The names of exception classes in `_OUTAGE_ERRORS` of `ray_connection.py`. With other names, an unreachable head node
  ends the sweep.
- `RAY_gcs_rpc_server_reconnect_timeout_s`: see `reconnect_seconds`.
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
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.optional import require

_RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
_PATIENCE_SECONDS = 24 * 3600.0  # an unreachable cluster is waited for at most one day


def import_ray() -> Any:
    """Import Ray, even if the package `amdsmi` is installed without ROCm (the package zeus installs it).

    In that case `import amdsmi` raises KeyError, and `import ray` fails because it handles only ImportError (Ray 2.60
    with amdsmi 7.0.2). Remove this workaround, `is_amdsmi_broken` and `_stand_in_folder` when Ray handles all errors.
    """
    if "ray" not in sys.modules and is_amdsmi_broken():
        sys.modules["amdsmi"] = None  # type: ignore[assignment]
    return require("ray", "ray")


def is_amdsmi_broken() -> bool:
    """Whether the package `amdsmi` is installed but cannot be imported."""
    if "amdsmi" in sys.modules:
        return sys.modules["amdsmi"] is None
    if find_spec("amdsmi") is None:
        return False
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # amdsmi prints an error message
            import_module("amdsmi")
    except Exception:  # KeyError, OSError or AttributeError, depending on what is missing
        return True
    return False


@functools.cache
def _stand_in_folder() -> str:
    """Create a folder with an `amdsmi` module that raises ImportError. It is for PYTHONPATH of Ray's own processes."""
    folder = tempfile.mkdtemp(prefix="flopwatch-amdsmi-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Path(folder, "amdsmi.py").write_text('raise ImportError("amdsmi is installed without ROCm")\n')
    return folder


def local_environment() -> dict[str, str]:
    """Return the environment variables for a local Ray and its processes."""
    needed = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Without this variable, Ray uses the address of the network card and listens on all interfaces.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray runs its workers at nice 15. Trials would inherit this, and other load would make their steps slower.
        "RAY_worker_niceness": "0",
        # Without these, Ray's authentication would depend on whether the home folder contains a token for Ray.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _own_token(),
    }
    if is_amdsmi_broken():
        needed["PYTHONPATH"] = os.pathsep.join(filter(None, [_stand_in_folder(), os.environ.get("PYTHONPATH")]))
    return needed


@functools.cache
def _own_token() -> str:
    """Return the same token during the whole process, because Ray's core reads it only once."""
    return secrets.token_hex(32)


def start_local(ray: Any, cpus: int | None, gpus: int | None) -> None:
    """Start a local Ray with one node, without dashboard. It ends together with this process."""
    loopback = {"_node_ip_address": "127.0.0.1"} if _has_parameter(ray.init, "_node_ip_address") else {}
    ray.init(
        address="local",  # otherwise Ray connects to an older cluster if it finds that cluster's files
        num_cpus=cpus,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 << 20,  # the minimum, because tasks return little data
        **loopback,
    )


def _has_parameter(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(one.name == name or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def publish_node(token: str, name: str) -> None:
    """Store in Ray's key-value store on which node this task runs.

    The runner needs the node, because Ray does not end a task whose node has lost its connection.
    """
    if (store := _key_value_store()) is None:
        return
    node = import_module("ray").get_runtime_context().get_node_id()
    store._internal_kv_put(_key(token, name), node.encode(), overwrite=True)


def node_of(token: str, name: str) -> str | None:
    """Return the id of the node that a trial runs on; None if the trial has not begun."""
    if (store := _key_value_store()) is None:
        return None
    node = store._internal_kv_get(_key(token, name))
    return None if node is None else node.decode()


def forget_node(token: str, name: str) -> None:
    if (store := _key_value_store()) is not None:
        store._internal_kv_del(_key(token, name))


def has_node_records() -> bool:
    """Whether this version of Ray has the key-value store, without which `node_of` always returns None."""
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


def reconnect_seconds() -> float:
    """Return how long Ray's core waits for the cluster's head before it ends the process that drives Ray."""
    try:
        return float(os.environ.get(_RECONNECT, 60))
    except ValueError:
        return 60.0


class RayOutage:
    """Suppresses errors while Ray does not answer, for example because its head node restarts.

    `since` is the time at which the outage began; None while Ray answers.
    """

    def __init__(self, clock: Clock = monotonic_seconds) -> None:
        self.since: float | None = None
        self._clock = clock
        self._message = ""

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Suppress errors which show that Ray does not answer, for at most a day. Raise all other errors."""
        try:
            yield
        except (ConnectionError, TimeoutError) as error:
            if self.since is not None and self._clock() - self.since > _PATIENCE_SECONDS:
                raise
            self.since = self._clock() if self.since is None else self.since
            self._message = " ".join(str(error).split())[:200]

    def end(self) -> None:
        """Record that Ray has answered, so that the outage is over."""
        self.since = None

    def state(self) -> str:
        if self.since is None:
            return ""
        return f"Ray has not answered for {self._clock() - self.since:.0f} s: {self._message}"
