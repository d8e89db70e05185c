"""Import Ray and start one of our own on this machine, around the traps met with ray 2.60."""

import contextlib
import functools
import io
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.optional import require

_STAND_IN = Path(__file__).with_name("no_amdsmi")


def import_ray() -> Any:
    """Ray, also where `amdsmi` (zeus brings it) is installed without ROCm.

    `import amdsmi` then raises KeyError, and `import ray` catches ImportError only, so it fails. Checked with ray 2.60
    and amdsmi 7.0.2. Delete this, `is_amdsmi_broken` and the folder `no_amdsmi` once Ray catches every exception.
    """
    if "ray" not in sys.modules and is_amdsmi_broken():
        sys.modules["amdsmi"] = None  # type: ignore[assignment]
    return require("ray", "ray")


def is_amdsmi_broken() -> bool:
    """True when it is installed and cannot be imported."""
    if "amdsmi" in sys.modules:
        return sys.modules["amdsmi"] is None
    if find_spec("amdsmi") is None:
        return False
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its complaint
            import_module("amdsmi")
    except Exception:  # KeyError, OSError, AttributeError: whatever it meets
        return True
    return False


def local_environment() -> dict[str, str]:
    """What a Ray of our own needs in the environment, for its processes too."""
    needed = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Without it Ray takes the address of the network card and listens on every interface.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Ray's workers run at nice 15, and so would our trials: whatever else runs would be measured with them.
        "RAY_worker_niceness": "0",
        # Ray turns authentication on by itself when it finds a token in the home folder; ours is only for this run.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _own_token(),
    }
    if is_amdsmi_broken():
        needed["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_STAND_IN), os.environ.get("PYTHONPATH")]))
    return needed


@functools.cache
def _own_token() -> str:
    """One for the life of this process: Ray's core reads it once and keeps it."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def in_environment(changes: Mapping[str, str]) -> Iterator[None]:
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
    """One node on loopback, without dashboard; it ends with this process, also when that is killed."""
    ray.init(
        address="local",  # a plain init joins whatever address an earlier Ray left behind
        num_cpus=cpus,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=80 << 20,  # the least it takes: results travel as files
        _node_ip_address="127.0.0.1",
    )


def join(ray: Any, address: str) -> None:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")


# A cluster that does not answer for a while: its head restarts, or the network is cut. Waited out, and told.


_PATIENCE_SECONDS = 24 * 3600.0

_PASSING = ("RpcError", "RaySystemError", "GetTimeoutError")
"""Classes of Ray that also stand for a head that is not there; by name, so that nobody has to import Ray."""


class RaySilence:
    """Remembers since when Ray has not answered.

    Args:
        can_come_back: False for a Ray of our own, which ends for good.
        clock: Measures the silence.

    Attributes:
        since: When it began; None while Ray answers.
    """

    def __init__(self, *, can_come_back: bool, clock: Clock = monotonic_seconds) -> None:
        self.since: float | None = None
        self._can_come_back, self._clock = can_come_back, clock
        self._words = ""

    @contextlib.contextmanager
    def waited_out(self) -> Iterator[None]:
        """What is asked in here may go without an answer, for a day; other mistakes are raised."""
        try:
            yield
        except Exception as error:
            is_passing = isinstance(error, ConnectionError | TimeoutError) or type(error).__name__ in _PASSING
            if not is_passing or not self._can_come_back:
                raise
            if self.since is not None and self._clock() - self.since > _PATIENCE_SECONDS:
                raise
            self.since = self._clock() if self.since is None else self.since
            self._words = " ".join(str(error).split())[:200]

    def heard(self) -> None:
        """Ray has answered."""
        self.since = None

    def state(self) -> str:
        if self.since is None:
            return ""
        return f"Ray has not answered for {self._clock() - self.since:.0f} s: {self._words}"
