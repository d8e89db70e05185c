"""The only file that reads time; everything else is handed a clock."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that never go back, as `time.perf_counter`."""

monotonic_seconds: Clock = time.perf_counter
