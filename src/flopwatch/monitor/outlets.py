"""Sends the records of a run to its sinks: first the local log, then those of the user."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flopwatch.errors import InputError, MissingDependencyError
from flopwatch.files import is_full_disk
from flopwatch.language import Said, _, choose
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.environment import what_ran
from flopwatch.records.run import Level, Notice, Record, RunStart, Summary
from flopwatch.sinks.jsonl import JsonlSink
from flopwatch.sinks.protocol import Sink
from flopwatch.sinks.thread import SinkThread, build_sinks
from flopwatch.text import first_line

if TYPE_CHECKING:
    from flopwatch.sinks.console import ConsoleSink

_log = logging.getLogger("flopwatch")
CLOSE_SECONDS = 30.0
"""How long the end of a run waits for all sinks together."""
_LOG_SECONDS = 1.0
"""The longest wait for the log, before the other sinks get the summary."""
_FLUSH_SECONDS = 5.0


class Outlets:
    """Sends records to the sinks, with one thread per sink. Records wait until `start` has sent the `RunStart` record.

    Attributes:
        failed_parts: Parts of the monitor that were switched off, each with its first error.
    """

    def __init__(self, sinks: Sequence[Sink], *, is_quiet: bool = False, console: "ConsoleSink | None" = None) -> None:
        self._is_quiet = is_quiet
        self._console = console
        for sink in sinks:
            if hasattr(sink, "tell"):
                sink.tell = partial(self.notify, "warning", f"sink:{sink.name}")
        self._early: list[Record] | None = []
        """Records until the start; None after it."""
        self._has_only_log = False
        self._notices: Counter[str] = Counter()
        self.failed_parts: dict[str, str] = {}
        self._threads = [SinkThread(sink, self._sink_failed) for sink in sinks]

    @property
    def cpu_seconds(self) -> float:
        return sum(thread.cpu_seconds for thread in self._threads)

    def start(self, start: RunStart) -> None:
        early, self._early = self._early or (), None
        for record in (start, *early):
            self.send(record)

    def print_no_rows(self) -> None:
        """Leave the lines of rows to a framework, which prints its own."""
        if self._console is not None:
            self._console.shows_rows = False

    def send(self, record: Record) -> None:
        """Queue a record for every sink; never blocks."""
        early = self._early
        if early is not None:
            early.append(record)
            return
        for thread in self._threads:
            if not thread.put(record) and thread.failed is None and not thread.is_closing:
                slow = Said(
                    "the sink {name} is too slow, so some rows are not sent to it; the local log has all rows",
                    name=thread.name,
                )
                self.notify("warning", f"rows_dropped:{thread.name}", slow, step=getattr(record, "step", None))

    def send_to_log(self, record: Record) -> None:
        """Queue a record for the local log only; the local log is the first sink."""
        if self._early is None and self._threads:
            self._threads[0].put(record)

    def notify(
        self, level: Level, code: str, message: str, *, step: int | None = None, doubted: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Send a notice to the process's `logging` and to every sink, once per code.

        The local log gets every notice with `doubted`, the ranges of steps whose rows it must no longer call exact.
        """
        notice = Notice(step, level, code.partition(":")[0], message, tuple(doubted))
        self._notices[code] += 1
        if self._notices[code] > 1:
            if doubted:
                self.send_to_log(notice)
            return
        if not self._is_quiet or level == "error":
            _log.log(getattr(logging, level.upper()), "flopwatch: %s", _(message))
        self.send(notice)

    def flush_log(self) -> None:
        """Wait until the local log contains all records so far, but at most `_FLUSH_SECONDS`."""
        if self._threads and not self._threads[0].flush(_FLUSH_SECONDS):
            late = Said(
                "the local log could not be written within {seconds:.0f} s, so it lacks the newest records",
                seconds=_FLUSH_SECONDS,
            )
            self.notify("warning", "log_is_behind", late)

    def close(self, of_session: Summary) -> Summary:
        """Close all sinks. The local log is closed last, so that its summary contains failures of other sinks."""
        if not self._threads:
            return self._with_failures(of_session)
        deadline = time.monotonic() + CLOSE_SECONDS
        log, *others = self._threads
        log.flush(_LOG_SECONDS)  # a log that cannot be written fails now, before others are told how the run ended
        for thread in others:
            thread.put(self._with_failures(of_session))
        for thread in others:
            if not thread.close(max(0.1, deadline - time.monotonic())) and thread.failed is None:
                self.failed_parts[thread.name] = Said("the sink did not close in time, so its last records are lost")
        self._has_only_log = True
        summary = self._with_failures(of_session)
        log.put(summary)
        if not log.close(max(1.0, deadline - time.monotonic())):
            sys.stderr.write(_("flopwatch: the last records of the local log could not be written in time\n"))
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
        said = first_line(error)
        self.failed_parts[name] = reason = f"{type(error).__name__}: {said}"
        message = Said("the sink {name} failed and is switched off, the training goes on: {why}", name=name, why=reason)
        if isinstance(error, MissingDependencyError):
            message = Said("the sink {name} is not used: {why}", name=name, why=said)
        if name == JsonlSink.name and isinstance(error, OSError):
            message = Said(
                "the run's log cannot be written ({why}); pass an output_dir that can be written to", why=said
            )
            if is_full_disk(error):
                message = Said(
                    "the disk was full until the end of the run: {file}: {why}", file=error.filename, why=error.strerror
                )
        # All other sinks are closed, so `flopwatch run` would show no notice.
        if self._has_only_log and is_full_disk(error):
            sys.stderr.write(_(f"flopwatch: {message}\n"))
            return
        self.notify("error", f"sink_failed:{name}", message)


def open_outlets(config: MonitorConfig, output_dir: Path, log_path: Path, wanted: Sequence[str | Sink]) -> Outlets:
    """Open the local log and the configured sinks; a sink that cannot be opened is reported and left out."""
    choose(config.language)
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
    has_console = any(getattr(want, "name", want) == "console" for want in wanted)
    console = None
    if not config.quiet and not has_console and sys.stderr is not None:
        from flopwatch.sinks.console import ConsoleSink  # imports rich, which a quiet training does not need

        console = ConsoleSink(sys.stderr, is_plain=True)  # what the training prints to stdout stays as it is
    describe = what_ran if config.log_what_ran else None
    log = JsonlSink(log_path, config.local_log_every, config.local_log_seconds, describe=describe)
    outlets = Outlets([log, *sinks, *([] if console is None else [console])], console=console)
    for name, reason in failures.items():
        outlets.failed_parts.setdefault(name, reason)
        outlets.notify(
            "error", f"sink_failed:{name}", Said("the sink {name} is not used: {why}", name=name, why=reason)
        )
    return outlets
