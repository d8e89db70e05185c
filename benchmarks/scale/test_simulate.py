"""A small form of benchmarks/scale/simulate.py, and its meeting beside that of real links."""

import threading

import pytest

from flopwatch.monitor.ranks import layout, link
from flopwatch.monitor.ranks.job_store import JobStore
from flopwatch.monitor.ranks.link import RankLink, RunPlan
from flopwatch.monitor.ranks.meeting import RunKey
from flopwatch.monitor.ranks.reports import REPORT_BYTES
from flopwatch.version import __version__
from scale.simulate import WINDOWS, Costs, CountingStore, Job, count_windows, lose_host, meet, row_seconds

RANKS, PER_HOST = 12, 4


def test_every_rank_but_the_logging_one_sends_one_report_per_window():
    job = Job(64)
    rows = count_windows(job)

    assert [row.ranks for row in rows] == [64] * WINDOWS
    assert job.messages == dict.fromkeys(range(1, 64), WINDOWS)
    assert job.bytes_sent == 63 * WINDOWS * REPORT_BYTES


def test_the_row_comes_when_the_last_report_has_gone_up_the_tree():
    job, costs = Job(64), Costs(rank_seconds=1e-3, child_seconds=1e-4)
    on_time, late = row_seconds(job, costs, {}), row_seconds(job, costs, {63: 5.0})

    assert on_time < 0.01
    assert 5.0 < late < 5.01


@pytest.mark.parametrize(("host", "missing"), [(7, 8), (1, 8 * 8)])
def test_a_lost_host_takes_the_hosts_below_it_along_and_rows_come_without_them(host, missing):
    rows, lost = lose_host(16 * 8, host)

    assert len(lost) == missing
    assert [row.ranks for row in rows] == [128, 128 - missing, 128 - missing]


def test_ranks_ask_the_store_for_nothing_once_they_have_met():
    assert meet(Job(64), CountingStore()).calls_after == 0


@pytest.mark.slow
def test_simulated_ranks_write_the_same_keys_as_real_links(monkeypatch):
    real, simulated = CountingStore(), CountingStore()
    monkeypatch.setattr(link, "find_job_store", lambda: JobStore(None, direct=real))
    monkeypatch.setattr(layout, "ranks_per_host", lambda world_size: PER_HOST)
    key = RunKey(0, 1, "runs/log/1")
    links = [RankLink(key, rank, RANKS, device=f"host{rank // PER_HOST}/gpu{rank % PER_HOST}") for rank in range(RANKS)]
    links[0].announce(RunPlan(50))
    assert all(each.wait_for_plan(30.0) for each in links)
    meet(Job(RANKS, PER_HOST), simulated)
    ends = [threading.Thread(target=each.finish, args=(30.0,)) for each in links]
    for thread in ends:
        thread.start()
    for thread in ends:
        thread.join()

    assert without_probes(real) ^ without_probes(simulated) == {f"flopwatch/{__version__}///0/{key.run}/over"}


def without_probes(store: CountingStore) -> set[str]:
    """Which keys were written, without those that have a random name."""
    return {key for key in store.written if "/probe/" not in key}
