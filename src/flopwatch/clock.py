"""The clock that all others get as an argument, so that tests can pass their own."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds that never go back, as `time.perf_counter` does."""

monotonic_seconds: Clock = time.perf_counter
