"""Requests traces of torch's profiler, and divides the time of their steps by use, per rank.

A trace has an interval for each kernel on an accelerator, or for each op on the CPU. `events.py` reads it, `device.py`
joins kernels with their launches, `uses.py` knows kernels and ops by their names, and `split.py` divides the time.
`files.py` has the traces of a run and the requests for them, `slow_rank.py` compares those of all ranks.
"""

from flopwatch.runs.traces.split import TraceSplit, read_trace

__all__ = ["TraceSplit", "read_trace"]
