"""Results of a sweep as they are written, while it runs."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flopwatch.record_reading import BrokenRecordError
from flopwatch.sweep_reading import RESULTS, NewerFormatError, result_from
from flopwatch.trial_records import TrialResult

_PAUSE_SECONDS = 0.5


def follow_results(folder: Path, offset: int, is_over: Callable[[], bool]) -> Iterator[TrialResult]:
    """Each result that is appended after `offset`, until the sweep is over and all are read.

    A line that is no result is left out: the report tells of it.
    """
    rest = b""
    while True:
        was_over = is_over()  # asked first: what is written before the end is read after it
        content, offset = _appended(folder / RESULTS, offset)
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            if (result := _result(line)) is not None:
                yield result
        if was_over and not content:
            return
        if not content:
            time.sleep(_PAUSE_SECONDS)


def _appended(file: Path, offset: int) -> tuple[bytes, int]:
    try:
        with file.open("rb") as stream:
            if stream.seek(0, os.SEEK_END) < offset:
                offset = 0  # written anew, as by a person who mends it; what is read twice does no harm
            stream.seek(offset)
            content = stream.read()
    except OSError:  # not written yet, or a shared file system that stutters
        return b"", offset
    return content, offset + len(content)


def _result(line: bytes) -> TrialResult | None:
    try:
        return result_from(json.loads(line))
    except (ValueError, RecursionError, NewerFormatError, BrokenRecordError):
        return None
