"""Messages of a rank arrive once and in order, whenever the rank above it reads; a rank never waits for that."""

import random

import pytest
import torch.distributed as dist

from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.ranks.job_store import StoreOutbox, open_slots, read_slots
from flopwatch.monitor.ranks.reports import MOST_WAITING, Message, RankDoubt, report_of


def message(step: int, *, is_last: bool = False) -> Message:
    report = report_of(1, [MeasuredStep(step, tokens=1)], peak_flops_per_s=None)
    return Message([report], RankDoubt(step, 1) if step % 3 == 0 else None, is_last)


def steps(messages: dict[int, Message]) -> list[int]:
    return [report.first_step for each in messages.values() for report in each.reports]


@pytest.fixture(params=["HashStore", "FileStore", "TCPStore"])
def store(request, tmp_path):
    stores = {
        "HashStore": dist.HashStore,
        "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "TCPStore": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    found = stores[request.param]()
    open_slots(found, [1, 2])
    return found


class Interrupted:
    """A store on which another rank writes between any two calls of the rank that reads."""

    def __init__(self, store, write) -> None:
        self._store, self._write = store, write

    def __getattr__(self, name):
        self._write()
        return getattr(self._store, name)


@pytest.mark.parametrize("seed", range(5))
def test_every_message_arrives_once_and_in_order_whenever_it_is_written(store, seed):
    chance, outbox = random.Random(seed), StoreOutbox(store, 1)
    sent: list[int] = []
    read: list[int] = []

    def write() -> None:
        if chance.random() < 0.7:
            outbox.write(message(len(sent)))
            sent.append(len(sent))

    while len(sent) < 25:
        write()
        if chance.random() < 0.5:
            read += steps(read_slots(Interrupted(store, write), [1, 2]))
    outbox.write(message(99, is_last=True))
    while not (last := read_slots(store, [1])) or not last[1].is_last:
        read += steps(last)
    assert [*read, *steps(last)] == [*sent, 99]
    assert not store.check(["slot/1"])
    assert not store.check(["slot/1/more"])


@pytest.mark.slow
def test_a_rank_that_nobody_reads_writes_its_last_message_all_the_same(store):
    outbox = StoreOutbox(store, 1)
    for step in range(1, 3 * MOST_WAITING):
        outbox.write(message(step))
    outbox.write(Message([], None, True))
    found = read_slots(store, [1, 2])

    assert list(found) == [1]
    assert (found[1].is_last, found[1].doubt) == (True, RankDoubt(3, 1))
    assert sum(report.total("tokens").total for report in found[1].reports) == 3 * MOST_WAITING - 1
    assert len(found[1].reports) == MOST_WAITING
