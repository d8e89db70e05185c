"""The rendezvous of a run's monitors: which run a monitor belongs to, the ranks' addresses, which ranks share a device.

All of this goes through the job's key-value store. After the ranks are connected (see `wire.py`), only the logging rank
uses it again, when the run ends.
"""

import json
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from flopwatch.errors import FlopwatchError
from flopwatch.monitor.ranks.job_store import is_set

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 2.0
"""Limits of the pause between two polls of the key-value store."""
_MOST_POLLS_PER_SECOND = 8000
"""How many polls per second, of all ranks together, the store's single thread answers without delaying the training."""
_HAS_PLAN, _PUBLISHED = "has_plan", "published"


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


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks of a run have to know before they connect.

    Attributes:
        token: The secret by which ranks of this run recognise each other.
        ranks_per_host: How many consecutive ranks are on one host, according to the logging rank's launcher. All ranks
            derive the tree from this number, so it must be the same on each.
    """

    token: str
    ranks_per_host: int


def run_store(job_store: Any, run: str) -> Any:
    """Return the part of the job's store that belongs to one run."""
    return PrefixStore(run, job_store)


def publish_run(job_store: Any, key: RunKey, terms: Terms) -> None:
    """Publish a run from the logging rank, so that other ranks can find it by the path of its log."""
    store = run_store(job_store, key.run)
    store.add(_PUBLISHED, 1)
    check_single(store)
    store.set("log", key.log)
    store.set("terms", json.dumps(asdict(terms)))
    job_store.set(_by_log(key), key.run)


def check_single(store: Any) -> None:
    """Raise an error if another training has published the same run.

    For example, two trainings share one store and differ only by a prefix that the user has given it.
    """
    if not _is_single(store):
        raise FlopwatchError("another training uses the same store, so ranks of both could be mixed up")


def _is_single(store: Any) -> bool:
    return int(store.add(_PUBLISHED, 0)) == 1


def terms_of(store: Any) -> Terms:
    return Terms(**json.loads(store.get("terms")))


def has_plan(store: Any) -> None:
    """Tell the ranks with other log paths that all monitors that were started together have published their runs."""
    store.set(_HAS_PLAN, "")


def end_run(job_store: Any, key: RunKey) -> None:
    """Mark a run as ended on the logging rank, so that later monitors do not join it."""
    run_store(job_store, key.run).set("over", "")


def find_run(job_store: Any, key: RunKey, rank: int) -> str | None:
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
    if is_set(store, _HAS_PLAN) and _is_single(store) and store.get("log").decode() not in key.known_logs:
        return numbered.run
    return None


def join_run(job_store: Any, run: str, rank: int) -> Any:
    """Mark the run as joined by this rank, and return the run's store."""
    store = run_store(job_store, run)
    store.set(_joined(rank), "")
    return store


def publish_address(store: Any, rank: int, address: str) -> None:
    """Publish the address at which a rank listens for its children."""
    store.set(_address(rank), address)


def find_address(store: Any, rank: int) -> str | None:
    """The address at which a rank listens; None until it is published."""
    return str(store.get(_address(rank)).decode()) if is_set(store, _address(rank)) else None


def _address(rank: int) -> str:
    return f"address/{rank}"


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _by_log(key: RunKey) -> str:
    return f"log/{key.logging_rank}/{key.log}"


def pauses(world_size: int) -> Iterator[float]:
    """Yield the pauses between polls in seconds: a tenth of the time waited so far, within limits."""
    began = time.monotonic()
    shortest = max(_SHORTEST_PAUSE_SECONDS, world_size / _MOST_POLLS_PER_SECOND)
    while True:
        waited = time.monotonic() - began
        yield max(shortest, min(0.1 * waited, _LONGEST_PAUSE_SECONDS))


class DeviceCensus:
    """Counts the ranks on each device; the run's key-value store has a counter per device."""

    def __init__(self, store: Any, identity: str, world_size: int) -> None:
        self._store = store
        self._key = f"on_device/{identity}"
        self._world_size = world_size
        store.add(self._key, 1)
        store.add("on_any_device", 1)

    def ranks(self, *, at_least: int | None = None) -> int | None:
        """How many ranks share this device. Until all are counted, None, or with `at_least` the larger of it and those.

        A rank that was registered in two runs of one name is counted twice, so there are never more than all ranks.
        """
        is_complete = int(self._store.add("on_any_device", 0)) >= self._world_size
        if not is_complete and at_least is None:
            return None
        counted = min(int(self._store.add(self._key, 0)), self._world_size)
        return counted if is_complete else max(counted, at_least or 1)
