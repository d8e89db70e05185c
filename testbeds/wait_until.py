import time


def wait_until(condition, what, seconds=60.0, every=0.05):
    """Polls until the condition holds and returns what it returned."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds} s in vain until {what}"
        time.sleep(every)
    return found
