"""Read files that anybody may have damaged: regular ones only, never waiting. Standard library only."""

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_LARGEST_JSON = 1 << 30
_LARGEST_LINE = 1 << 28
"""A log is bounded and a result holds its tail; what is larger is garbage, and would fill the memory."""


class UnreadableError(Exception):
    """Something lies where a file should be, and it cannot be read; the message says why."""


@contextlib.contextmanager
def opened_regular(file: Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading. Never waits, as opening a FIFO would; follows links.

    Raises:
        FileNotFoundError: There is nothing.
        UnreadableError: There is something else, or it may not be read.
    """
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(file)) from None
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise UnreadableError(getattr(error, "strerror", None) or str(error)) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise UnreadableError("it is a folder" if stat.S_ISDIR(mode) else "it is no regular file")
    with os.fdopen(handle, "rb") as stream:
        try:
            yield stream
        except OSError as error:
            raise UnreadableError(error.strerror or str(error)) from None


def load_json(file: Path) -> Any:
    """The content.

    Raises:
        FileNotFoundError: There is nothing.
        UnreadableError: There is something that is no JSON.
    """
    with opened_regular(file) as stream:
        if os.fstat(stream.fileno()).st_size > _LARGEST_JSON:
            raise UnreadableError(f"it is larger than {_LARGEST_JSON >> 20} MiB")
        content = stream.read()
    if not content.strip(b"\0 \t\r\n"):
        raise UnreadableError("it is empty")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"it is no JSON: {str(error)[:100]}") from None


def read_json(file: Path) -> Any:
    """The content; None when there is no such file, or when it is no JSON (somebody else's half-written one)."""
    try:
        return load_json(file)
    except (FileNotFoundError, UnreadableError):
        return None


def read_object(file: Path) -> dict[str, Any]:
    """The same of a file that holds an object; empty when it does not."""
    content = read_json(file)
    return content if isinstance(content, dict) else {}


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines that are whole; a torn one is left out."""
    try:
        for _, content in numbered_lines(file):
            if isinstance(content, dict):
                yield content
    except (FileNotFoundError, UnreadableError):
        return


def numbered_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Every line's number and content, None for one that is no JSON; empty lines are none.

    Raises:
        FileNotFoundError: There is nothing.
        UnreadableError: There is something that cannot be read.
    """
    with opened_regular(file) as stream:
        number, is_rest = 0, False
        while line := stream.readline(_LARGEST_LINE):
            is_whole = not is_rest and (line.endswith(b"\n") or len(line) < _LARGEST_LINE)
            number += not is_rest
            if not is_rest and line.strip():
                yield number, _line_content(line) if is_whole else None
            is_rest = not line.endswith(b"\n")


def _line_content(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def tail(file: Path, size: int = 6000) -> str:
    """The last lines of a text file, of a line longer than that its end; empty when there is none."""
    try:
        with opened_regular(file) as stream:
            stream.seek(0, os.SEEK_END)
            start = max(0, stream.tell() - size)
            stream.seek(start)
            text = stream.read().decode(errors="replace")
    except (FileNotFoundError, UnreadableError):
        return ""
    whole_lines = text.partition("\n")[2]
    return text if start == 0 else whole_lines if whole_lines.strip() else f"… {text}"
