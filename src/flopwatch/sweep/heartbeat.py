"""What a worker is doing, in a small file: written by its main thread only, so that a stuck one falls silent."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from flopwatch.file_reading import read_json
from flopwatch.record_reading import BrokenRecordError, read_record

FILE = "heartbeat.json"
_SIZE = 96


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a trial is; two equal ones mean that nothing happened in between."""

    phase: str = "start"
    step: int | None = None

    @property
    def text(self) -> str:
        return self.phase if self.step is None else f"{self.phase} step {self.step}"


class Heartbeat:
    """Writes progress. One write of fixed size into the same file: a few microseconds, and never half a line."""

    def __init__(self, trial_dir: Path, file: str = FILE) -> None:
        self._handle = os.open(trial_dir / file, os.O_WRONLY | os.O_CREAT, 0o644)  # open as long as the worker lives

    def beat(self, phase: str, step: int | None = None) -> None:
        content = json.dumps({"phase": phase, "step": step}).encode()
        os.pwrite(self._handle, content.ljust(_SIZE), 0)


def read_progress(trial_dir: Path, file: str = FILE) -> Progress:
    try:
        return read_record(Progress, read_json(trial_dir / file))
    except BrokenRecordError:
        return Progress()
