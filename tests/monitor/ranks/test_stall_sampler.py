"""A thread that stands still is told from one that computes and from one that waits for other ranks."""

import os
import sys
import threading
import types

import pytest

from flopwatch.monitor.ranks.rank import _FEWEST_SAMPLES, StallSampler
from testbeds.wait_until import wait_until


@pytest.fixture
def stalls():
    sampler = StallSampler(types.SimpleNamespace(is_working=False))
    yield sampler
    sampler.stop()


def samples_while_waiting_in(stalls, path, busy_seconds=0.0):
    """What samples from another thread find while this one waits in code of that file."""
    read_end, write_end = os.pipe()
    ident = threading.get_ident()

    def sample():
        wait_until(lambda: sys._current_frames()[ident].f_code.co_filename == path, "the wait has begun", every=0.001)
        for _ in range(_FEWEST_SAMPLES):
            stalls._sample(busy_seconds)
        os.write(write_end, b".")

    sampler = threading.Thread(target=sample)
    sampler.start()
    exec(compile("read(read_end, 1)", path, "exec"), {"read": os.read, "read_end": read_end})
    sampler.join()
    os.close(read_end)
    os.close(write_end)
    return stalls.share()


def test_waiting_in_the_users_code_is_a_stall(stalls):
    assert samples_while_waiting_in(stalls, "/home/user/train.py") == 1.0


@pytest.mark.parametrize("part", ["autograd/graph.py", "distributed/distributed_c10d.py", "nn/parallel/distributed.py"])
def test_waiting_in_a_backward_pass_or_a_collective_is_none(stalls, part):
    assert samples_while_waiting_in(stalls, f"/site-packages/torch/{part}") == 0.0


def test_waiting_elsewhere_in_torch_counts_as_its_callers(stalls):
    assert samples_while_waiting_in(stalls, "/site-packages/torch/utils/data/x.py") == 1.0


def test_a_thread_that_uses_the_processor_is_not_stalled(stalls):
    assert samples_while_waiting_in(stalls, "/home/user/train.py", busy_seconds=0.001) == 0.0


def test_nothing_is_said_before_there_were_enough_samples(stalls):
    stalls._sample(0.0)

    assert stalls.share() is None
