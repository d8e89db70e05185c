"""TensorBoard event files through the `tensorboard` package alone: neither torch nor TensorFlow is loaded."""

import json
import os
import socket
from pathlib import Path
from typing import Any

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.optional import require
from flopwatch.records.run import Notice, Provenance, Record, Row, RunStart, Summary
from flopwatch.sinks.event_frame import frame_event


class TensorBoardSink:
    """Writes one event per logging window, with all its values; notices and provenance go to the Text tab.

    TensorBoard is told to forget the steps that run again after a resume, and all of them after a fresh start in the
    same folder. It keeps numbers as 32-bit floats, so totals are rounded in the 8th digit; the JSON log has them exact.

    The file lies in a folder `flopwatch` of its own, which TensorBoard shows as a run of that name. In a folder that
    the training writes to as well, "forget" would take the training's points too, and TensorBoard, which reads a
    folder file by file and never goes back, would miss what is written to one file while it reads the other.

    Not by TensorBoard's own EventFileWriter: it writes in yet another thread, whose errors surface late and whose CPU
    time nobody would count.

    Args:
        log_dir: Gets the folder `flopwatch`; `tensorboard --logdir` takes it or a folder above it.
        flush_seconds: The file lags behind by so much at most; TensorBoard looks every 30 seconds by default.
    """

    name = "tensorboard"

    def __init__(self, log_dir: Path | str, flush_seconds: float = 30.0, clock: Clock = monotonic_seconds) -> None:
        self.gather_seconds = 0.8 * flush_seconds  # less, so that a burst of rows is flushed once, at its end
        self._log_dir = Path(log_dir) / "flopwatch"
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._flushed_at = clock()
        self._path: Path | None = None
        self._started_at = self._wall_time = 0.0
        self._buffer = bytearray()
        self._last_step = 0
        self._events: Any = None
        self._summaries: Any = None

    def write(self, record: Record) -> None:
        if self._events is None:
            self._load()
        if isinstance(record, RunStart):
            self._start(record)
        elif isinstance(record, Row):
            self._last_step, self._wall_time = record.step, record.unix_time
            self._add(self._events.Event(wall_time=record.unix_time, step=record.step, summary=self._scalars(record)))
        elif isinstance(record, Provenance):
            self._add_text("flopwatch/provenance", record.step, _as_code(record.to_json()))
        elif isinstance(record, Notice):
            step = self._last_step if record.step is None else record.step
            self._add_text("flopwatch/notices", step, f"**{record.level}** {record.code}: {record.message}")
        elif isinstance(record, Summary):
            self._add_text("flopwatch/summary", record.step or self._last_step, _as_code(record.to_json()))
        if not isinstance(record, Row) or self._clock() - self._flushed_at >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Append what is buffered to the file; made anew, with its folder, if somebody deleted it."""
        self._flushed_at = self._clock()
        if self._path is None or not self._buffer:
            return
        # Emptied first: after an error half of it may be in the file, and must not follow again.
        events, self._buffer = self._buffer, bytearray()
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            head = self._events.Event(wall_time=self._started_at, file_version="brain.Event:2")
            events[:0] = frame_event(head.SerializeToString())
        with self._path.open("ab") as file:
            file.write(events)

    def close(self) -> None:
        self.flush()

    def _load(self) -> None:
        self._events = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = require("tensorboard.compat.proto.summary_pb2", "tensorboard")

    def _start(self, start: RunStart) -> None:
        # TensorBoard reads the files of a folder in the order of their names, so the time comes first and in full.
        name = f"events.out.tfevents.{start.unix_time:017.6f}.{socket.gethostname()}.{os.getpid()}.{start.session}"
        self._path = self._log_dir / name
        self._started_at = self._wall_time = start.unix_time
        first_step = 0 if start.resumed_after_step is None else start.resumed_after_step + 1
        # TensorBoard forgets what it knows from this step on, but only at the second such mark of a folder: so every
        # session sets one.
        mark = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(self._events.Event(wall_time=start.unix_time, step=first_step, session_log=mark))
        self._add_text("flopwatch/run", first_step, _as_code(start.to_json()))

    def _scalars(self, row: Row) -> Any:
        value = self._summaries.Summary.Value
        return self._summaries.Summary(value=[value(tag=key, simple_value=row.values[key]) for key in row.values])

    def _add_text(self, tag: str, step: int, markdown: str) -> None:
        summary = self._summaries.Summary()
        value = summary.value.add(tag=tag)
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = 7  # DT_STRING
        value.tensor.string_val.append(markdown.encode())
        self._add(self._events.Event(wall_time=self._wall_time, step=step, summary=summary))

    def _add(self, event: Any) -> None:
        self._buffer += frame_event(event.SerializeToString())


def _as_code(content: dict[str, Any]) -> str:
    lines = json.dumps(content, indent=1, default=str).splitlines()
    return "\n".join(f"    {line}" for line in lines)
