"""A thread that stands still is told from one that computes and from one that waits for other ranks."""

import threading
import time

import pytest

from flopwatch.monitor.ranks.busy_time import _FEWEST_SAMPLES, BusyTime, StallSampler


@pytest.fixture
def stalls():
    sampler = StallSampler(BusyTime())
    yield sampler
    sampler.stop()


def samples_while(stalls, action, busy_seconds=0.0):
    """What looks from another thread find while this one does something for a moment."""
    begun = threading.Event()

    def look():
        begun.wait()
        time.sleep(0.05)  # until the action has begun
        for _ in range(_FEWEST_SAMPLES):
            stalls._sample(busy_seconds)

    looker = threading.Thread(target=look)
    looker.start()
    begun.set()
    action()
    looker.join()
    return stalls.share()


def wait_in(path):
    """As code of that file would."""
    code = compile("import time\ntime.sleep(0.5)\n", path, "exec")
    return lambda: exec(code, {})


def test_a_sleep_in_the_users_code_is_a_stall(stalls):
    assert samples_while(stalls, lambda: time.sleep(0.5)) == 1.0


@pytest.mark.parametrize("part", ["autograd/graph.py", "distributed/distributed_c10d.py", "nn/parallel/distributed.py"])
def test_waiting_in_a_backward_pass_or_a_collective_is_none(stalls, part):
    assert samples_while(stalls, wait_in(f"/site-packages/torch/{part}")) == 0.0


def test_waiting_elsewhere_in_torch_counts_as_its_callers(stalls):
    assert samples_while(stalls, wait_in("/site-packages/torch/utils/data/x.py")) == 1.0


def test_a_thread_that_uses_the_processor_is_not_stalled(stalls):
    assert samples_while(stalls, lambda: time.sleep(0.5), busy_seconds=0.001) == 0.0


def test_nothing_is_said_before_there_were_enough_samples(stalls):
    stalls._sample(0.0)

    assert stalls.share() is None
