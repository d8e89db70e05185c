"""Sends a run's records to its sinks, gives each notice once, and remembers what failed."""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flopwatch.errors import InputError
from flopwatch.monitor.config import MonitorConfig
from flopwatch.records.run import Level, Notice, Record, RunStart, Summary
from flopwatch.sinks.jsonl import JsonlSink
from flopwatch.sinks.protocol import Sink
from flopwatch.sinks.thread import SinkThread, build_sinks

_log = logging.getLogger("flopwatch")
_LEVELS: Mapping[Level, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
CLOSE_SECONDS = 30.0
"""How long the end of a run waits for slow sinks, all together."""


_FLUSH_SECONDS = 5.0


class Outlets:
    """One thread per sink. Records given before the run has started wait for its `RunStart`.

    Attributes:
        failed_parts: What was switched off, and why.
    """

    def __init__(self, sinks: Sequence[Sink], *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self._threads = [SinkThread(sink, self._sink_failed) for sink in sinks]
        self._early: list[Record] = []
        self._has_started = False
        self._notices: Counter[str] = Counter()
        self.failed_parts: dict[str, str] = {}

    @property
    def cpu_seconds(self) -> float:
        return sum(thread.cpu_seconds for thread in self._threads)

    def start(self, start: RunStart) -> None:
        self._has_started = True
        for record in (start, *self._early):
            self.send(record)
        self._early.clear()

    def send(self, record: Record) -> None:
        """Queue a record for every sink; never blocks."""
        if not self._has_started:
            self._early.append(record)
            return
        for thread in self._threads:
            if not thread.put(record) and thread.failed is None:
                self.tell(
                    "warning",
                    f"rows_dropped:{thread.name}",
                    f"the sink {thread.name} is too slow: rows are dropped for it, the local log has them all",
                    step=getattr(record, "step", None),
                )

    def send_to_log(self, record: Record) -> None:
        """Queue a record for the local log only, which is the first sink."""
        if self._has_started and self._threads:
            self._threads[0].put(record)

    def tell(self, level: Level, code: str, message: str, *, step: int | None = None) -> None:
        """Give a notice once per code, to the log of the process and to every sink."""
        self._notices[code] += 1
        if self._notices[code] > 1:
            return
        if not self._is_quiet or level == "error":
            _log.log(_LEVELS[level], "flopwatch: %s", message)
        self.send(Notice(step, level, code.partition(":")[0], message))

    def flush_log(self) -> None:
        """Wait until the local log holds all records so far, but at most `_FLUSH_SECONDS`."""
        if self._threads and not self._threads[0].flush(_FLUSH_SECONDS):
            self.tell("warning", "log_is_behind", f"the local log could not be written within {_FLUSH_SECONDS:.0f} s")

    def close(self, of_session: Summary) -> Summary:
        """End all sinks. The local log is the first in the list and ends last, so that its summary has all failures."""
        if not self._threads:
            return self._with_failures(of_session)
        deadline = time.monotonic() + CLOSE_SECONDS
        first, *others = self._threads
        for thread in others:
            thread.put(self._with_failures(of_session))
        for thread in others:
            if not thread.close(max(0.1, deadline - time.monotonic())) and thread.failed is None:
                self.failed_parts[thread.name] = "did not end in time; what it still held is lost"
        summary = self._with_failures(of_session)
        first.put(summary)
        if not first.close(max(1.0, deadline - time.monotonic())):
            sys.stderr.write("flopwatch: the local log could not be written to its end\n")
        return summary

    def _with_failures(self, summary: Summary) -> Summary:
        return replace(
            summary,
            unix_time=time.time(),
            notices=dict(self._notices),
            failed_parts=dict(self.failed_parts),
            dropped_rows={thread.name: thread.dropped_rows for thread in self._threads if thread.dropped_rows},
        )

    def _sink_failed(self, name: str, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.failed_parts[name] = reason
        self.tell("error", f"sink_failed:{name}", f"the sink {name} is switched off, training goes on: {reason}")


def open_outlets(config: MonitorConfig, output_dir: Path, log_path: Path, wanted: Sequence[str | Sink]) -> Outlets:
    """The local log and the configured sinks; a sink that cannot be made is reported and left out."""
    sinks: list[Sink] = []
    failures: dict[str, str] = {}
    for want in wanted:
        try:
            made, reasons = build_sinks([want], output_dir, config.sink_options)
        except InputError as error:
            if config.strict:
                raise
            made, reasons = [], {str(want): str(error)}
        if reasons and config.strict:
            raise InputError("; ".join(f"the sink {name} cannot be used: {why}" for name, why in reasons.items()))
        sinks += made
        failures |= reasons
    log = JsonlSink(log_path, flush_steps=config.local_log_every, flush_seconds=config.local_log_seconds)
    outlets = Outlets([log, *sinks])
    for name, reason in failures.items():
        outlets.failed_parts[name] = reason
        outlets.tell("error", f"sink_failed:{name}", f"the sink {name} is not used, training goes on: {reason}")
    return outlets


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def json_ready(value: Any) -> Any:
    """A configuration as plain JSON values."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else repr(value)


# A few steps under torch's profiler, on request: one compressed trace that ui.perfetto.dev opens.
#
# Shapes are recorded, stacks and memory are not: with them a trace of five steps has been seen to take 4 GB.


_MOST_STEPS = 10


class TraceCapture:
    """Profiles a few steps on request, writes one trace file, and is off again.

    Attributes:
        is_on: Whether a trace is wanted or under way; read on every step.
        last_path: The newest trace.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, tell: Callable[..., None]) -> None:
        self._folder = folder
        self._rank, self._world_size = rank, world_size
        self._tell = tell
        self._profiler: Any = None
        self._left = 0
        self.is_on = False
        self.last_path: Path | None = None

    def ask(self, steps: int) -> None:
        self._left = max(1, min(steps, _MOST_STEPS))
        self.is_on = True

    def step_ended(self, step: int) -> None:
        """Start with the next step; stop after the last requested one."""
        if self._profiler is None:
            self._start()
            return
        self._left -= 1
        if self._left <= 0:
            self.stop(step)

    def stop(self, step: int = 0) -> None:
        profiler, self._profiler = self._profiler, None
        self.is_on = False
        if profiler is None:
            return
        profiler.stop()
        path = self._folder / f"step{step}_rank{self._rank}.pt.trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        self.last_path = path
        self._tell("info", f"trace_written:{path.name}", f"trace written to {path}; open it at https://ui.perfetto.dev")

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()
        if not torch.distributed.is_initialized():  # torch adds it itself in a process group
            ranks = {"rank": self._rank, "world_size": self._world_size}
            self._profiler.add_metadata_json("distributedInfo", json.dumps(ranks))
