"""Writes TensorBoard event files with the `tensorboard` package, without loading torch or TensorFlow."""

import io
import json
import os
import socket
from functools import cached_property
from pathlib import Path
from typing import Any

from flopwatch.library_internals import EventFormat
from flopwatch.records.run import Notice, Provenance, Record, Row, RunStart, Summary


class TensorBoardSink:
    """Writes one event per logging window, with all its values; notices and provenance go to the Text tab.

    After a resume, an event in the file makes TensorBoard discard the steps that are run again. After a fresh start in
    the same folder it discards all steps. TensorBoard stores 32-bit floats, so totals are rounded in the 8th digit; the
    JSON log has them exactly.

    The file has its own folder `flopwatch`, which TensorBoard shows as a run of that name. If the file were beside
    the training's own event files, TensorBoard would discard points of the training too. It would also miss later
    events of the training, because it reads the files of a folder one by one and never returns to an earlier one.

    TensorBoard's EventFileWriter is not used, because it writes in another thread: its errors appear late, and its CPU
    time would not be part of the monitoring cost that flopwatch reports.

    Args:
        log_dir: The parent of the folder `flopwatch`; pass it to `tensorboard --logdir`.
        flush_seconds: The maximum time until a row is in the file; TensorBoard reads every 30 s by default.
    """

    name = "tensorboard"

    def __init__(self, log_dir: Path | str, flush_seconds: float = 30.0) -> None:
        self.gather_seconds = flush_seconds
        self._log_dir = Path(log_dir) / "flopwatch"
        self._path: Path | None = None
        self._buffer = bytearray()
        self._last_step = 0
        self._wall_time = 0.0

    def write(self, record: Record) -> None:
        if isinstance(record, RunStart):
            self._start(record)
        elif isinstance(record, Row):
            self._last_step, self._wall_time = record.step, record.unix_time
            value = self._tensorboard.Summary.Value
            scalars = [value(tag=key, simple_value=figure) for key, figure in record.values.items()]
            self._add(step=record.step, summary=self._tensorboard.Summary(value=scalars))
            return
        elif isinstance(record, Provenance):
            self._add_text("flopwatch/provenance", record.step, _as_code(record.to_json()))
        elif isinstance(record, Notice):
            step = self._last_step if record.step is None else record.step
            self._add_text("flopwatch/notices", step, f"**{record.level}** {record.code}: {record.message}")
        elif isinstance(record, Summary):
            self._add_text("flopwatch/summary", record.step or self._last_step, _as_code(record.to_json()))
        self.flush()

    def flush(self) -> None:
        """Append the buffered events to the file. A file or folder that was deleted is created again."""
        if self._path is None or not self._buffer:
            return
        # The buffer is emptied before writing, because after an error a part of it may already be in the file.
        events, self._buffer = self._buffer, bytearray()
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            events[:0] = self._framed(file_version="brain.Event:2")
        with self._path.open("ab") as file:
            file.write(events)

    close = flush

    @cached_property
    def _tensorboard(self) -> EventFormat:
        return EventFormat()

    def _start(self, start: RunStart) -> None:
        # TensorBoard reads files in the order of their names, so the name begins with a time of constant width.
        name = f"events.out.tfevents.{start.unix_time:017.6f}.{socket.gethostname()}.{os.getpid()}.{start.session}"
        self._path, self._wall_time = self._log_dir / name, start.unix_time
        first_step = 0 if start.resumed_after_step is None else start.resumed_after_step + 1
        # At a START event TensorBoard discards the points that it has read for this step and later ones. It ignores the
        # first START in a folder, so the first session writes one too: then the START of the second one has an effect.
        session_log = self._tensorboard.SessionLog
        self._add(step=first_step, session_log=session_log(status=session_log.START))
        self._add_text("flopwatch/run", first_step, _as_code(start.to_json()))

    def _add_text(self, tag: str, step: int, markdown: str) -> None:
        summary = self._tensorboard.Summary()
        value = summary.value.add(tag=tag)
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = 7  # DT_STRING
        value.tensor.string_val.append(markdown.encode())
        self._add(step=step, summary=summary)

    def _add(self, **event: Any) -> None:
        self._buffer += self._framed(**event)

    def _framed(self, **event: Any) -> bytes:
        """The bytes of an event in the file, with its length and checksums."""
        frame, made = io.BytesIO(), self._tensorboard.Event(wall_time=self._wall_time, **event)
        self._tensorboard.RecordWriter(frame).write(made.SerializeToString())
        return frame.getvalue()


def _as_code(content: dict[str, Any]) -> str:
    lines = json.dumps(content, indent=1, default=str).splitlines()
    return "\n".join(f"    {line}" for line in lines)
