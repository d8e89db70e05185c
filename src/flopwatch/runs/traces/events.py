"""Reads the events of a profiler trace one at a time, so that a trace of gigabytes needs little memory.

The format is the JSON object that torch's profiler (Kineto) writes: some entries that describe the trace, and the list
`traceEvents`. The file may be compressed with gzip. Numbers with a point are read as `Decimal`: some traces have the
microseconds since 1970, of which a float would lose the nanoseconds.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, cast

from flopwatch.errors import InputError
from flopwatch.files import UnreadableError, opened_regular

_CHUNK_BYTES = 1 << 20
_LONGEST_VALUE = 1 << 24
"""Characters of one event. Without a limit, damage in the middle of a file would be read into memory up to its end."""
_GZIP_START = b"\x1f\x8b"
_BLANKS = re.compile(r"[ \t\r\n]*")
_EVENTS = "traceEvents"
_LONGEST_NAME = 4096
_MOST_MICROSECONDS = 2**63 // 1000
"""Beyond this, nanoseconds do not fit in 8 bytes; a trace with such a time is damaged."""


def read_events(path: Path, take: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Give each event of a trace to `take`, in the file's order. Returns the other entries of the file."""
    try:
        with opened_regular(path) as file:
            return _read_trace(_Text(_chunks(file)), take)
    except FileNotFoundError:
        raise InputError(f"the trace {str(path)!r} does not exist: pass a file in the folder traces of a run") from None
    except UnreadableError as error:
        raise InputError(f"the trace {str(path)!r} cannot be read: {error}; pass a .json or .json.gz file") from None
    except (EOFError, ValueError, zlib.error) as error:
        raise InputError(
            f"{str(path)!r} is not a whole trace of torch's profiler: {error}; pass a .pt.trace.json or "
            ".pt.trace.json.gz file that torch.profiler or flopwatch wrote, or take another: flopwatch trace RUN_DIR"
        ) from None


def _chunks(file: BinaryIO) -> Iterator[str]:
    start = file.read(len(_GZIP_START))
    file.seek(0)
    content = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if start == _GZIP_START else file
    # Kineto copies names of kernels and annotations into the file as they are, so some bytes may not be UTF-8.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while chunk := content.read(_CHUNK_BYTES):
        yield decoder.decode(chunk)


class _Text:
    """A window on the text of a file: what is behind `position` is dropped when more is read."""

    def __init__(self, chunks: Iterator[str]) -> None:
        self._chunks = chunks
        self._text, self._position = "", 0
        self._decode = json.JSONDecoder(strict=False, parse_float=Decimal).raw_decode

    def _read_more(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        self._text, self._position = self._text[self._position :] + chunk, 0
        return True

    def next_character(self) -> str:
        """The next character that is not blank, without moving behind it; empty at the end of the file."""
        while True:
            blanks = _BLANKS.match(self._text, self._position)
            self._position = blanks.end() if blanks else self._position
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._read_more():
                return ""

    def skip(self, characters: str) -> str:
        """Move behind the next character that is not blank, which must be one of these."""
        found = self.next_character()
        if not found or found not in characters:
            raise ValueError(f"there is {found!r} where {' or '.join(characters)} should be" if found else "it is cut")
        self._position += 1
        return found

    def value(self) -> Any:
        self.next_character()
        while True:
            try:
                value, end = self._decode(self._text, self._position)
            except (ValueError, RecursionError, ArithmeticError) as error:
                if len(self._text) - self._position > _LONGEST_VALUE or not self._read_more():
                    raise ValueError(f"an entry is not valid JSON: {str(error)[:80]}") from None
                continue
            # A number at the end of the text may go on in the next chunk.
            if end == len(self._text) and self._read_more():
                continue
            self._position = end
            return value


def _read_trace(text: _Text, take: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    if text.next_character() != "{":
        raise ValueError("it does not begin with {")
    text.skip("{")
    about: dict[str, Any] = {}
    has_events = False
    while text.next_character() != "}":
        key = text.value()
        text.skip(":")
        if key == _EVENTS and text.next_character() == "[":
            _read_list(text, take)
            has_events = True
        else:
            about[str(key)] = text.value()
        if text.next_character() != "}":
            text.skip(",")
    if not has_events:
        raise ValueError(f"it has no list {_EVENTS}")
    return about


def _read_list(text: _Text, take: Callable[[dict[str, Any]], None]) -> None:
    text.skip("[")
    is_over = text.next_character() == "]" and text.skip("]") == "]"
    while not is_over:
        event = text.value()
        if not isinstance(event, dict):
            raise ValueError(f"its events are of type {type(event).__name__}, not objects")
        take(event)
        is_over = text.skip(",]") == "]"


def name_of(event: Mapping[str, Any]) -> str:
    """The name of an event. Of a name of megabytes only the start, or the search for patterns in it would not end."""
    return str(event.get("name", ""))[:_LONGEST_NAME]


def number_of(event: Mapping[str, Any], key: str) -> int | None:
    """A number above zero among the arguments of an event; None without one."""
    about = event.get("args")
    number = about.get(key) if isinstance(about, dict) else None
    return number if isinstance(number, int) and 0 < number < 2**63 - 1 else None


def interval_of(event: Mapping[str, Any]) -> tuple[int, int] | None:
    """Start and end of an event in nanoseconds; None if it has none, or none that is possible.

    >>> interval_of({"ph": "X", "ts": Decimal("1712195495519689.047"), "dur": Decimal("63.813")})
    (1712195495519689047, 1712195495519752860)
    """
    start, length = event.get("ts"), event.get("dur")
    if event.get("ph") != "X" or not isinstance(start, int | Decimal) or not isinstance(length, int | Decimal):
        return None
    if not (-_MOST_MICROSECONDS < start < _MOST_MICROSECONDS and 0 <= length < _MOST_MICROSECONDS):
        return None
    begin = round(start * 1000)
    end = begin + round(length * 1000)
    return (begin, end) if end < 2**63 else None
