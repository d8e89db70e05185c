"""Links of several ranks, all in this process: they find each other in the job's store, and bear what happens to it."""

import os
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import flopwatch
from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.ranks import exchange, job_store
from flopwatch.monitor.ranks.exchange import RankLink
from flopwatch.monitor.ranks.job_store import RunKey
from flopwatch.monitor.ranks.reports import MOST_WAITING, RankDoubt, report_of
from testbeds.wait_until import wait_until

SECONDS = 60.0


@pytest.fixture
def open_links():
    """Start a process group on a store, and links of some ranks; the group is torch's fake one, which does nothing."""
    started: list[RankLink] = []

    def open_links(store, world_size, ranks, logging_rank=0):
        dist.init_process_group("fake", store=store, rank=0, world_size=world_size)
        started.extend(RankLink(RunKey(logging_rank, 1, "log"), rank, world_size) for rank in ranks)
        return {link._exchange._rank: link for link in started}

    yield open_links
    for link in started:
        link.leave()
    dist.destroy_process_group()


def tcp_store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def wait_until_published(link: RankLink) -> None:
    wait_until(
        lambda: link._exchange.store is not None and link._exchange.store.check(["log"]),
        "its run is published",
        every=0.01,
    )


def window(rank: int, step: int):
    return report_of(rank, [MeasuredStep(step, seconds=1.0, tokens=rank)], peak_flops_per_s=1.0)


def send_window(opened, step: int) -> None:
    for rank, link in opened.items():
        link.send(window(rank, step))


def summed(link: RankLink, step: int) -> tuple[int, int]:
    assert link.wait_for(step, SECONDS), link.failure
    report = link.merged.popleft()
    return report.ranks, report.total("tokens").total


@pytest.mark.parametrize(
    "ranks_per_host", ["4", *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in ("", "5", "12"))]
)
@pytest.mark.parametrize("logging_rank", [0, 6])
def test_all_ranks_of_all_hosts_are_added_up(open_links, monkeypatch, ranks_per_host, logging_rank):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_per_host)
    opened = open_links(tcp_store(), 12, range(12), logging_rank)
    wait_until(lambda: all(link.ranks_on_device for link in opened.values()), "all are counted", every=0.01)
    opened[logging_rank].announce(5)
    for step in range(3):
        send_window(opened, step)
        assert summed(opened[logging_rank], step) == (12, sum(range(12)))
    assert all(link.window_steps == 5 for link in opened.values())
    assert [link.ranks_on_device for link in opened.values()] == [12] * 12
    with ThreadPoolExecutor(12) as together:
        assert all(together.map(lambda link: link.finish(SECONDS), opened.values()))
    assert {link.failure for link in opened.values()} == {None}


@pytest.mark.slow
def test_a_store_that_does_not_answer_at_the_end_does_not_make_the_ranks_late(open_links, monkeypatch):
    opened = open_links(tcp_store(), 2, range(2))
    opened[0].announce(5)
    send_window(opened, 0)
    assert summed(opened[0], 0) == (2, 1)
    answers = threading.Event()
    monkeypatch.setattr(job_store, "check_single", lambda _: answers.wait(SECONDS))
    assert opened[1].finish(SECONDS)
    assert opened[0].finish(1.0)
    answers.set()


@pytest.mark.parametrize("kind", ["FileStore", "HashStore", "prefixed"])
def test_ranks_meet_in_every_kind_of_store(open_links, tmp_path, kind):
    stores = {
        "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), 2),
        "HashStore": dist.HashStore,
        "prefixed": lambda: dist.PrefixStore("a", dist.PrefixStore("b", tcp_store())),
    }
    opened = open_links(stores[kind](), 2, range(2))
    opened[0].announce(5)
    send_window(opened, 0)
    assert summed(opened[0], 0) == (2, 1)


def test_without_torchs_private_function_the_store_is_found_where_the_launcher_says(open_links, monkeypatch):
    store = tcp_store()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.delattr(distributed_c10d, "_get_default_store")
    opened = open_links(store, 2, range(2))
    opened[0].announce(5)
    send_window(opened, 0)
    assert summed(opened[0], 0) == (2, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_with_a_fake_store_a_rank_steps_aside(open_links, rank):
    link = open_links(FakeStore(), 4, [rank])[rank]
    link._thread.join(SECONDS)
    assert link.is_over
    assert "store" in link.failure


def test_with_a_fake_process_group_the_log_has_this_ranks_own_numbers_and_says_so_once(tmp_path):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with flopwatch.TrainingMonitor(tmp_path, flops_fn=lambda batch: 1, log_every=2) as monitor:
            for step in range(8):
                monitor.log_step(step, batch=torch.zeros(3, 8))
        assert monitor.summary.values["total/samples"] == 8 * 3
        assert monitor.summary.notices["ranks_lost"] == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("moment", ["before the plan", "after the plan"])
def test_two_trainings_with_the_same_keys_both_say_that_they_may_be_mixed_up(open_links, moment):
    opened = open_links(tcp_store(), 2, range(2))
    wait_until(lambda: opened[1].ranks_on_device is not None, "both are there", every=0.01)
    if moment == "after the plan":
        opened[0].announce(5)
        assert opened[1].wait_for_plan(SECONDS)
    second = RankLink(RunKey(0, 1, "log"), 0, 2)
    second._thread.join(SECONDS)
    assert "another training" in second.failure
    opened[0].announce(5)
    opened[1].finish(1.0)  # before the plan, it waits in vain
    opened[0].finish(SECONDS)
    assert "another training" in opened[0].failure


def test_two_processes_never_write_to_the_slot_of_one_rank(open_links):
    opened = open_links(tcp_store(), 2, range(2))
    opened[0].announce(5)
    assert opened[1].wait_for_plan(SECONDS)
    second = RankLink(RunKey(0, 1, "log"), 1, 2)
    second.send(window(5, 0))
    second._thread.join(SECONDS)
    assert "another process" in second.failure
    send_window(opened, 0)
    assert summed(opened[0], 0) == (2, 1)


def test_a_rank_that_leaves_before_the_plan_delays_no_row(open_links):
    opened = open_links(tcp_store(), 2, range(2))
    wait_until(lambda: opened[1]._exchange._outbox, "it has joined", every=0.01)
    opened[1].leave()
    opened[0].announce(5)
    opened[0].send(window(0, 0))
    assert summed(opened[0], 0) == (1, 0)


def test_a_rank_of_a_second_training_does_not_join_the_first(open_links):
    opened = open_links(tcp_store(), 2, range(1))
    wait_until_published(opened[0])
    second = RankLink(RunKey(0, 1, "other log"), 0, 2)
    second._thread.join(SECONDS)
    stranger = RankLink(RunKey(0, 1, "other log"), 1, 2)
    wait_until(lambda: stranger.ranks_on_device is not None, "it looks for its run", every=0.01)
    opened[0].announce(5)
    opened[0]._thread.join(SECONDS)
    assert not stranger.wait_for_plan(0.5)
    stranger.leave()
    assert "no monitor of this run" in stranger.failure


def test_ranks_with_different_releases_do_not_meet(open_links, monkeypatch):
    first = open_links(tcp_store(), 2, range(1))[0]
    wait_until_published(first)
    monkeypatch.setattr(job_store, "__version__", "another release")
    other = RankLink(RunKey(0, 1, "log"), 1, 2)
    first.announce(5)
    assert not other.wait_for_plan(0.5)
    other.leave()
    assert "no monitor of this run" in other.failure


def test_ranks_meet_without_a_clone_of_the_store_too(open_links, monkeypatch):
    """`Store.clone` is newer than the oldest torch that flopwatch supports."""
    monkeypatch.delattr(dist.Store, "clone", raising=False)
    opened = open_links(dist.PrefixStore("a", tcp_store()), 2, range(2))
    opened[0].announce(5)
    send_window(opened, 0)
    assert summed(opened[0], 0) == (2, 1)


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="only a clone has the prefix of the training's store")
def test_two_trainings_that_a_prefix_keeps_apart_have_their_own_sums(open_links):
    store = tcp_store()
    first = open_links(dist.PrefixStore("a", store), 2, range(2))
    wait_until(lambda: first[1].ranks_on_device is not None, "both are there", every=0.01)
    first = dict(first)
    dist.destroy_process_group()
    second = open_links(dist.PrefixStore("b", store), 2, range(2))
    for opened in (first, second):
        opened[0].announce(5)
        send_window(opened, 0)
        assert summed(opened[0], 0) == (2, 1)


def test_a_run_has_a_fixed_number_of_keys_and_leaves_no_report_behind(open_links):
    store = tcp_store()
    opened = open_links(store, 4, range(4))
    opened[0].announce(5)
    keys = set()
    for step in range(5):
        send_window(opened, step)
        assert summed(opened[0], step) == (4, 6)
        keys.add(store.num_keys())
    assert len(keys) == 1
    with ThreadPoolExecutor(4) as together:
        assert all(together.map(lambda link: link.finish(SECONDS), opened.values()))
    assert not any(opened[0]._exchange.store.check([f"slot/{rank}"]) for rank in range(4))


def test_a_rank_that_is_ahead_of_the_one_above_it_loses_nothing(open_links):
    opened = open_links(tcp_store(), 2, range(2))
    opened[0].announce(5)
    windows = 3 * MOST_WAITING
    for step in range(windows):
        opened[1].send(window(1, step))
    opened[1].add_doubt(RankDoubt(3, 1))
    assert opened[1].finish(SECONDS)  # although the rank above reads nothing before its own first report
    for step in range(windows):
        opened[0].send(window(0, step))
    assert opened[0].finish(SECONDS)
    assert sum(report.total("tokens").total for report in opened[0].merged) == windows
    assert opened[0].merged[-1].last_step == windows - 1
    assert opened[0].take_doubt() == RankDoubt(3, 1)


@pytest.mark.slow
def test_a_rank_that_shows_no_sign_of_life_is_left_out_after_a_while(open_links, monkeypatch):
    opened = open_links(tcp_store(), 3, range(3))
    opened[0].announce(5)
    send_window(opened, 0)
    assert summed(opened[0], 0) == (3, 3)
    monkeypatch.setattr(opened[1]._exchange, "_keep_in_touch", lambda: None)  # as if its process were killed
    for name in ("_FIRST_LOOK_SECONDS", "_LOOK_SECONDS", "_BEAT_SECONDS"):
        monkeypatch.setattr(exchange, name, 0.1)
    monkeypatch.setattr(exchange, "_LOST_SECONDS", 1.0)
    opened[2].send(window(2, 1))  # its thread waits with the new times from now on
    opened[0].send(window(0, 1))
    assert summed(opened[0], 1) == (2, 2)
    opened[0].send(window(0, 2))
    assert not opened[0].wait_for(2, 3.0)  # it has nothing to report, but is alive
    opened[2].send(window(2, 2))
    assert summed(opened[0], 2) == (2, 2)
    assert opened[0].absent == ()


def test_a_rank_that_never_joins_is_named_and_left_out(open_links, monkeypatch):
    monkeypatch.setattr(exchange, "_ABSENT_SECONDS", 1.0)
    opened = open_links(tcp_store(), 3, (0, 1))
    opened[0].announce(5)
    send_window(opened, 0)
    assert summed(opened[0], 0) == (2, 1)
    assert opened[0].absent == (2,)


def test_the_first_rank_whose_process_has_the_store_ends_after_the_logging_rank_has_read_all(open_links):
    opened = open_links(tcp_store(), 2, range(2), logging_rank=1)
    opened[1].announce(5)
    send_window(opened, 0)
    assert summed(opened[1], 0) == (2, 1)
    closing = threading.Thread(target=opened[0].finish, args=(SECONDS,))
    closing.start()
    closing.join(1.0)
    assert closing.is_alive()
    assert opened[1].finish(SECONDS)
    closing.join(SECONDS)
    assert not closing.is_alive()


class DistantStore:
    """A store behind a line that can be silenced or cut."""

    def __init__(self) -> None:
        self._store = tcp_store()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._may_pass = threading.Event()
        self._may_pass.set()
        threading.Thread(target=self._accept, daemon=True).start()
        self.client = dist.TCPStore("127.0.0.1", self._listener.getsockname()[1], is_master=False)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._store.port))
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while received := source.recv(4096):
                self._may_pass.wait()
                target.sendall(received)
            target.shutdown(socket.SHUT_RDWR)

    def stop_answering(self) -> None:
        self._may_pass.clear()

    def die(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._may_pass.set()


@pytest.fixture
def distant_store():
    store = DistantStore()
    yield store
    store.die()


def test_a_store_that_dies_ends_the_exchange_and_the_reason_is_known(open_links, distant_store):
    opened = open_links(distant_store.client, 2, range(2))
    opened[0].announce(5)
    assert opened[1].wait_for_plan(SECONDS)
    distant_store.die()
    send_window(opened, 0)
    assert opened[0].wait_for(0, SECONDS)
    assert "store" in opened[0].failure or "onnection" in opened[0].failure or "ecv" in opened[0].failure
    for link in reversed(opened.values()):
        assert link.finish(SECONDS)


def test_a_rank_that_has_not_met_the_others_when_the_store_dies_says_so(open_links, distant_store):
    link = open_links(distant_store.client, 2, [1])[1]
    wait_until(lambda: link._exchange.store is not None, "it has reached the store", every=0.01)
    distant_store.die()
    link._thread.join(SECONDS)
    assert link.is_over
    assert link.failure is not None


@pytest.mark.parametrize("moment", ["in the meeting", "before"])
def test_a_store_that_does_not_answer_keeps_nobody_from_ending(open_links, distant_store, moment):
    if moment == "before":
        distant_store.stop_answering()
    link = open_links(distant_store.client, 2, [1])[1]
    if moment == "in the meeting":
        wait_until(lambda: link._exchange.store is not None, "it has reached the store", every=0.01)
        distant_store.stop_answering()
    else:
        link._thread.join(0.2)
    assert not link.is_over
    began = time.monotonic()
    link.leave()
    assert time.monotonic() - began < exchange._END_SECONDS + 1


def test_the_close_of_a_link_that_was_given_up_does_not_wait_for_a_store_that_does_not_answer(
    open_links, distant_store
):
    link = open_links(distant_store.client, 2, [1])[1]
    wait_until(lambda: link._exchange.store is not None, "it has reached the store", every=0.01)
    distant_store.stop_answering()
    link._thread.join(1.0)  # by then it has asked the store again
    link.give_up()
    closing = threading.Thread(target=link.finish, args=(SECONDS,), daemon=True)
    closing.start()
    closing.join(SECONDS / 2)
    assert not closing.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("moment", ["before the plan", "after the plan"])
def test_a_forked_process_forgets_its_copies_and_the_ranks_go_on(open_links, moment):
    opened = open_links(tcp_store(), 2, range(2))
    wait_until(lambda: opened[1].ranks_on_device is not None, "both are counted", every=0.01)
    if moment == "after the plan":
        opened[0].announce(5)
        assert opened[1].wait_for_plan(SECONDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and later warn of threads, which is why the process ends at once
        pid = os.fork()
    if pid == 0:
        is_right = not exchange._links
        for link in opened.values():
            link.give_up()
            is_right &= link.finish(0.1)
        exchange._leave_all()
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    opened[0].announce(5)
    send_window(opened, 0)
    assert summed(opened[0], 0) == (2, 1)
