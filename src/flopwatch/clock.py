"""The clock for durations. Code takes it as an argument, so that tests can pass a fake one."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""A function that returns seconds that never decrease, such as `time.perf_counter`."""

monotonic_seconds: Clock = time.perf_counter
