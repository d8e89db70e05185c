"""All names and settings of Ray that flopwatch uses although Ray does not document them. Checked with Ray 2.60.0.

Each name, its purpose, and what happens with a version of Ray that does not have it:

- `_node_ip_address` of `ray.init` makes a local Ray listen on loopback only. Without it, no local Ray starts.
- `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER` and `RAY_worker_niceness`: see `local_environment`. Ray ignores unknown variables.
- `ray.experimental.internal_kv` stores on which node each trial runs. Without it, the end of a trial on a disconnected
  node is noticed only when Ray notices it, and queued tasks are not withdrawn.
- The names of exception classes in `OUTAGE_ERRORS`. With other names, an unreachable head node ends the sweep.
- `OTHER_CLUSTER`, a word in a message. With another word, a head that starts again as a new cluster may end the sweep.
- `RAY_gcs_rpc_server_reconnect_timeout_s`: see `reconnect_seconds`.
"""

import contextlib
import functools
import os
import secrets
from importlib import import_module
from types import ModuleType
from typing import Any

OUTAGE_ERRORS = ("ConnectionError", "TimeoutError", "RpcError", "RaySystemError", "GetTimeoutError")
"""Exceptions in the process that talks to Ray which can mean that Ray's head does not answer, by name."""

OTHER_CLUSTER = "WrongClusterID"
"""In the message of an AuthenticationError: a new cluster that does not know this process has the address."""

_RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
_TOKEN = secrets.token_hex(32)  # the same during the whole process, because Ray's core reads it only once


def local_environment() -> dict[str, str]:
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Without this variable, Ray uses the address of the network card and listens on all interfaces.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray runs its workers at nice 15. Trials would inherit this, and other load would make their steps slower.
        "RAY_worker_niceness": "0",
        # Without these, Ray's authentication would depend on whether the home folder contains a token for Ray.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _TOKEN,
    }


def start_local(ray: Any, cpus: int | None, gpus: int | None) -> None:
    """Start a local Ray with one node, without dashboard. It ends together with this process."""
    ray.init(
        address="local",  # otherwise Ray connects to an older cluster if it finds that cluster's files
        num_cpus=cpus,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 << 20,  # the minimum, because tasks return little data
        _node_ip_address="127.0.0.1",
    )


def publish_node(token: str, name: str) -> None:
    """Store in Ray's key-value store on which node this task runs.

    The runner needs the node, because Ray does not end a task whose node has lost its connection.
    """
    if (store := _key_value_store()) is None:
        return
    node = import_module("ray").get_runtime_context().get_node_id()
    store._internal_kv_put(_key(token, name), node.encode(), overwrite=True)


def node_of(token: str, name: str) -> str | None:
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
