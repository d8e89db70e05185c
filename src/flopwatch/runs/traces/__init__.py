"""Requests traces of torch's profiler, and divides the time of their steps by use, per rank.

A trace has an interval for each kernel on an accelerator, or for each op on the CPU. `events.py` reads it, `steps.py`
finds its steps, `device.py` joins kernels with their launches, `uses.py` knows kernels and ops by their names, and
`split.py` divides the time. `files.py` has the traces of a run, `requests.py` asks a training for one.
"""

from flopwatch.runs.traces.files import (
    TRACES,
    newest_files,
    newest_traces,
    splits_of,
    trace_name,
    traces_of,
    traces_of_log,
    usable_traces,
)
from flopwatch.runs.traces.requests import MOST_STEPS, TraceRequests, write_request
from flopwatch.runs.traces.split import OUTSIDE, OWN_ENTRY, TraceSplit, read_trace

__all__ = [
    "MOST_STEPS",
    "OUTSIDE",
    "OWN_ENTRY",
    "TRACES",
    "TraceRequests",
    "TraceSplit",
    "newest_files",
    "newest_traces",
    "read_trace",
    "splits_of",
    "trace_name",
    "traces_of",
    "traces_of_log",
    "usable_traces",
    "write_request",
]
