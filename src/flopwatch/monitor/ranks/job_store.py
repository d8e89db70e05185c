"""The key-value store that the ranks of a training share: how it is opened, and how ranks find each other in it.

Nothing here waits inside the store for a key that may not be there.
"""

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from flopwatch.errors import FlopwatchError
from flopwatch.monitor.ranks.reports import Message
from flopwatch.torch_internals.modules import default_store
from flopwatch.version import __version__

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 2.0
_MOST_POLLS_PER_SECOND = 8000
"""How many polls per second, of all ranks together, the store's single thread answers without delaying the training."""
PLAN, PUBLISHED, OVER, ON_ANY_DEVICE = "plan", "published", "over", "on_any_device"
"""Keys of a run: its plan, how many logging ranks have published it, whether it has ended, how many ranks there are."""


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

    @property
    def by_log(self) -> str:
        return f"log/{self.logging_rank}/{self.log}"


def find_job_store() -> Any:
    """The store of the default process group, which all ranks of the training share, for use in another thread.

    A `TCPStore` answers one call after the other on each connection, so the link opens one of its own: its calls do not
    delay those of the training, nor does a wait of the training delay them. The other stores lock themselves for each
    call and have no connection.
    """
    try:
        shared = store = default_store()
    except FlopwatchError:  # this torch has no such function, so use the address that torchrun sets
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            raise FlopwatchError("the store of the process group cannot be found in this release of torch") from None
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, FileStore | HashStore):
        return shared
    if not isinstance(store, TCPStore):
        raise FlopwatchError(f"the process group's store is a {type(store).__name__}, which flopwatch cannot use")
    if hasattr(shared, "clone"):  # a new connection with the same prefixes
        return shared.clone()
    return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


def prefix(environment: Mapping[str, str], world_size: int) -> str:
    """The prefix of all keys. torchrun may keep a store across restarts, so it differs after each restart.

    It also differs between releases of flopwatch, because the layout of their reports may differ.

    >>> prefix({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2"}, 8).replace(__version__, "1.0")
    'flopwatch/1.0/a/2/8'
    """
    names = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
    return "/".join(["flopwatch", __version__, *(environment.get(name, "") for name in names), str(world_size)])


def peek(store: Any, key: str) -> str | None:
    """The value of a key, None if it is missing; `get` would wait for it. Such a comparison never changes a value."""
    missing = "\0missing"
    found = store.compare_set(key, missing, missing).decode()
    return None if found == missing else found


def check_single(store: Any) -> None:
    """Raise an error if another training has published the same run.

    For example, two trainings share one store and differ only by a prefix that the user has given it, in a release of
    torch whose stores have no `clone`; or ranks were restarted on a store that still has the keys of the last attempt.
    """
    if int(store.add(PUBLISHED, 0)) != 1:
        raise FlopwatchError("another training uses the same store, so ranks of both could be mixed up")


def find_run(job_store: Any, key: RunKey, rank: int) -> str | None:
    """Find the run to which this rank's monitor belongs; None while that is not certain.

    A run with the same log path is the right one. If ranks write to different paths (`out/rank3`, a disk of the node),
    the n-th monitor of this rank takes the n-th run of the logging rank, or the next one that has not ended and that
    this rank has not joined. That could be the run of another monitor, so it is taken only if its log belongs to no
    other monitor of this process, and only once the logging rank has sent its plan. By then, all monitors that
    were started together have published their runs.
    """
    if (run := peek(job_store, key.by_log)) is not None:
        return run
    while (store := PrefixStore(key.run, job_store)).check([OVER]) or store.check([alive(rank)]):
        key = replace(key, number=key.number + 1)
    is_certain = store.check([PLAN]) and int(store.add(PUBLISHED, 0)) == 1
    return key.run if is_certain and peek(store, "log") not in key.known_logs else None


def pauses(ranks: int, longest_seconds: float = _LONGEST_PAUSE_SECONDS) -> Iterator[float]:
    """Yield the pauses between polls of so many ranks, in seconds: a tenth of the time waited so far, within limits."""
    began = time.monotonic()
    shortest = max(_SHORTEST_PAUSE_SECONDS, ranks / _MOST_POLLS_PER_SECOND)
    while True:
        waited = time.monotonic() - began
        yield max(shortest, min(0.1 * waited, longest_seconds))


def alive(rank: int) -> str:
    """Key of the counter that a rank increases to show that it has joined the run, and later that it is alive."""
    return f"alive/{rank}"


def _slots(rank: int) -> tuple[str, str]:
    return f"slot/{rank}", f"slot/{rank}/more"


class StoreOutbox:
    """Where a rank leaves its messages for the rank above it, which may read them much later; writing never waits.

    A message goes into the rank's first slot if the rank above has emptied it, else into the second slot, joined with
    what is unread there. `read_slots` empties the first slots of many ranks with one command, so what is in them must
    not change before they are empty. A second slot is emptied only if it still has what was read.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._first, self._second = _slots(rank)
        self._unread: Message | None = None
        """What this rank has written to its second slot last; None if both slots were empty since."""

    def write(self, message: Message) -> None:
        if self._unread is not None:
            joined = self._unread.followed_by(message)
            if _swap(self._store, self._second, self._unread.to_json(), joined.to_json()):
                self._unread = joined
                return
            self._unread = None
        text = message.to_json()
        if not _swap(self._store, self._first, "", text):
            _swap(self._store, self._second, "", text)
            self._unread = message


def _swap(store: Any, key: str, before: str, after: str) -> bool:
    return bool(store.compare_set(key, before, after).decode() == after)


def open_slots(store: Any, ranks: Sequence[int]) -> None:
    """Make sure that the slots exist, so that reading them does not wait."""
    for rank in ranks:
        for slot in _slots(rank):
            store.compare_set(slot, "", "")


def read_slots(store: Any, ranks: Sequence[int]) -> dict[int, Message]:
    """Read and empty the slots of these ranks; those of a rank that has sent its last message are deleted."""
    # Second slots first: they get something only while the first is full, and a store may read one key after the other.
    texts = store.multi_get([slot for rank in ranks for slot in reversed(_slots(rank))])
    full = [(*row, *_slots(row[0])) for row in zip(ranks, texts[1::2], texts[::2], strict=True) if any(row[1:])]
    if firsts := [slot for _, text, _, slot, _ in full if text]:
        store.multi_set(firsts, [""] * len(firsts))
    messages: dict[int, Message] = {}
    for rank, text, later, first, second in full:
        while later and (newer := store.compare_set(second, later.decode(), "")):
            later = newer
        messages[rank] = reduce(Message.followed_by, [Message.from_json(part) for part in (text, later) if part])
        if messages[rank].is_last:
            store.delete_key(first)
            store.delete_key(second)
    return messages
