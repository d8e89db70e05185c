"""A small form of benchmarks/scale/simulate.py, and its meeting beside that of real links."""

import threading

import pytest
from torch.distributed import HashStore

from flopwatch.monitor.ranks import job_store, layout
from flopwatch.monitor.ranks.exchange import RankLink
from scale.simulate import KEY, WINDOWS, Job, NotedStore, load_of, simulate, store_process

RANKS, PER_HOST = 12, 4


@pytest.mark.slow
def test_a_window_asks_the_store_less_than_twice_per_rank():
    with store_process() as store:
        client = store.connect()
        job = Job(64, client)
        job.meet()
        load, of_ranks = load_of(lambda: [job.window(number) for number in range(WINDOWS)], store, client, WINDOWS)
        assert job.unread(WINDOWS) == 2

    writes, readers = 63, 8  # of the 8 hosts; each reads twice, with three commands
    assert load.calls == writes + readers * 2 * 3
    assert load.calls < 2 * 64
    assert load.bytes / 64 < 2048
    assert of_ranks[0].calls == 2 * 3
    assert of_ranks[63].calls == 1
    assert sum(each.bytes for each in of_ranks.values()) == pytest.approx(load.bytes)


@pytest.mark.slow
def test_a_lost_host_takes_the_hosts_below_it_along():
    found = simulate(16 * 8)
    assert found["a host lost that has no host below it"].startswith("8 ranks")
    assert found["the host with the most ranks below it lost"].startswith("64 ranks")


@pytest.mark.slow
def test_simulated_ranks_use_the_same_keys_as_real_links(monkeypatch):
    real, simulated = HashStore(), HashStore()
    monkeypatch.setattr(job_store, "find_job_store", lambda: real)
    monkeypatch.setattr(layout, "ranks_per_host", lambda world_size: PER_HOST)
    links = [RankLink(KEY, rank, RANKS, device=f"host{rank // PER_HOST}/gpu{rank % PER_HOST}") for rank in range(RANKS)]
    links[0].announce(50)
    assert all(each.wait_for_plan(30.0) for each in links)
    Job(RANKS, NotedStore(simulated), PER_HOST).meet()
    ends = [threading.Thread(target=each.finish, args=(30.0,)) for each in links]
    for thread in ends:
        thread.start()
    for thread in ends:
        thread.join()

    # At the end the slots are deleted, and the run is marked as over.
    simulated_keys = {key for key in simulated.list_keys() if "/slot/" not in key}
    assert set(real.list_keys()) ^ simulated_keys == {f"{run_of(simulated_keys)}/over"}


def run_of(keys: set[str]) -> str:
    return next(key for key in keys if key.endswith("/plan")).removesuffix("/plan")
