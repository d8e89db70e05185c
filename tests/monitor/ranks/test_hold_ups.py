"""A thread that stands still is told from one that computes and from one that waits for other ranks."""

import threading
import time

import pytest

from flopwatch.monitor.ranks.busy_time import _FEWEST_LOOKS, HoldUps, OwnTime


@pytest.fixture
def hold_ups():
    looking = HoldUps(OwnTime())
    yield looking
    looking.stop()


def looks_while(hold_ups, action, busy_seconds=0.0):
    """What looks from another thread find while this one does something for a moment."""
    begun = threading.Event()

    def look():
        begun.wait()
        time.sleep(0.05)  # until the action has begun
        for _ in range(_FEWEST_LOOKS):
            hold_ups._look(busy_seconds)

    looker = threading.Thread(target=look)
    looker.start()
    begun.set()
    action()
    looker.join()
    return hold_ups.share()


def wait_in(path):
    """As code of that file would."""
    code = compile("import time\ntime.sleep(0.5)\n", path, "exec")
    return lambda: exec(code, {})


def test_a_sleep_in_the_users_code_is_a_hold_up(hold_ups):
    assert looks_while(hold_ups, lambda: time.sleep(0.5)) == 1.0


@pytest.mark.parametrize("part", ["autograd/graph.py", "distributed/distributed_c10d.py", "nn/parallel/distributed.py"])
def test_waiting_in_a_backward_pass_or_a_collective_is_none(hold_ups, part):
    assert looks_while(hold_ups, wait_in(f"/site-packages/torch/{part}")) == 0.0


def test_waiting_elsewhere_in_torch_counts_as_its_callers(hold_ups):
    assert looks_while(hold_ups, wait_in("/site-packages/torch/utils/data/x.py")) == 1.0


def test_a_thread_that_uses_the_processor_is_not_held_up(hold_ups):
    assert looks_while(hold_ups, lambda: time.sleep(0.5), busy_seconds=0.001) == 0.0


def test_nothing_is_said_before_there_were_enough_looks(hold_ups):
    hold_ups._look(0.0)

    assert hold_ups.share() is None
