"""Reads and writes JSON files and texts; what is read may be damaged or malicious. Standard library only.

Every supervisor process of a trial imports this module at its start, so it imports little itself.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from flopwatch.errors import FlopwatchError

_LARGEST_JSON = 1 << 30
_LARGEST_LINE = 1 << 28
"""Limits in bytes of a file and of a line. flopwatch writes far less, and reading more could exhaust the memory."""

_OPEN_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Windows has only the last one, Unix only the others."""


class UnreadableError(FlopwatchError):
    """The path exists, but it is not a file that can be read; the message says why."""


@contextlib.contextmanager
def opened_regular(file: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading, following links. Never blocks, whereas opening a FIFO with `open` would.

    Raises FileNotFoundError, or UnreadableError if the path is not a regular file or reading is not permitted.
    """
    try:
        handle = os.open(file, os.O_RDONLY | _OPEN_FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(file)) from None
    except (OSError, ValueError) as error:  # os.open raises ValueError for a path with a NUL character
        raise UnreadableError(getattr(error, "strerror", None) or str(error)) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise UnreadableError("the path is a folder" if stat.S_ISDIR(mode) else "the path is not a regular file")
    with os.fdopen(handle, "rb") as stream:
        try:
            yield stream
        except OSError as error:
            raise UnreadableError(error.strerror or str(error)) from None


def load_json(file: Path) -> Any:
    """The content of a JSON file; raises FileNotFoundError, or UnreadableError if it cannot be read or is not JSON."""
    with opened_regular(file) as stream:
        if os.fstat(stream.fileno()).st_size > _LARGEST_JSON:
            raise UnreadableError(f"the file is larger than {_LARGEST_JSON >> 20} MiB")
        content = stream.read()
    if not content.strip(b"\0 \t\r\n"):
        raise UnreadableError("the file is empty")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"the file is not valid JSON: {str(error)[:100]}") from None


def read_json(file: Path) -> Any:
    """The content of a JSON file; None if it does not exist or is not JSON (another process may be writing it)."""
    try:
        return load_json(file)
    except (FileNotFoundError, UnreadableError):
        return None


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file cannot be read or holds something else."""
    content = read_json(file)
    return content if isinstance(content, dict) else {}


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file, without damaged lines; nothing if the file cannot be read."""
    try:
        for _, content in numbered_lines(file):
            if isinstance(content, dict):
                yield content
    except (FileNotFoundError, UnreadableError):
        return


def numbered_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """The line number and content of every non-empty line of a JSON Lines file; the content is None if it is not JSON.

    Raises FileNotFoundError or UnreadableError.
    """
    with opened_regular(file) as stream:
        number, is_rest = 0, False
        while line := stream.readline(_LARGEST_LINE):
            is_whole = not is_rest and (line.endswith(b"\n") or len(line) < _LARGEST_LINE)
            number += not is_rest
            if not is_rest and line.strip():
                yield number, line_content(line) if is_whole else None
            is_rest = not line.endswith(b"\n")


def line_content(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class LineFollower:
    """Reads the lines that were appended to a file since the last poll. The file need not exist yet.

    Each poll opens the file again, because on NFS an open file handle becomes stale when the file is replaced.

    Attributes:
        offset: Where the next poll begins to read.
        size_bytes: The size of the file at the last poll.
        times_replaced: How often the file was replaced or truncated. The poll that notices it reads the new file from
            its start, and lines of earlier polls are no longer valid.
    """

    def __init__(self, file: Path, offset: int = 0) -> None:
        self.file, self.offset = file, offset
        self.size_bytes = self.times_replaced = 0
        self._inode: int | None = None

    def poll(self) -> Iterator[bytes]:
        """Return the new lines that are not empty. A line that is still being written is left to the next poll."""
        try:
            now = self.file.stat()
        except OSError:
            return iter(())
        if now.st_size < self.offset or self._inode not in (None, now.st_ino):
            self.times_replaced += 1
            self.offset = 0
        self._inode, self.size_bytes = now.st_ino, now.st_size
        return self._new_lines() if now.st_size > self.offset else iter(())

    def _new_lines(self) -> Iterator[bytes]:
        # The file may have been deleted or replaced since `poll` looked at it. The next poll handles that.
        with contextlib.suppress(FileNotFoundError, UnreadableError), opened_regular(self.file) as stream:
            stream.seek(self.offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                if line.strip():
                    yield line


def tail(file: Path, size: int = 6000) -> str:
    """The whole lines in the last `size` bytes of a text file, or the end of a longer line; empty if unreadable.

    NUL bytes are left out and do not count, as in a terminal. A program that prints bytes writes many in a row.
    """
    try:
        with opened_regular(file) as stream:
            stream.seek(0, os.SEEK_END)
            start = max(0, stream.tell() - 16 * size)
            stream.seek(start)
            printed = stream.read().replace(b"\0", b"")
    except (FileNotFoundError, UnreadableError):
        return ""
    text = printed[-size:].decode(errors="replace")
    whole_lines = text.partition("\n")[2]
    is_all = start == 0 and len(printed) <= size
    return text if is_all else whole_lines if whole_lines.strip() else f"… {text}"


def is_full_disk(error: BaseException) -> bool:
    """Whether the exception says that there is no space, or that the user's quota is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_json(file: Path, content: Any) -> None:
    """Write JSON to a temporary file and rename it, so that a reader never sees half a file.

    There is no fsync, because 10,000 of them take minutes. At worst, a trial must run again after a power failure.
    """
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1)
        os.replace(beside, file)
    except OSError:  # such as a full disk, where the half of a file would take the last space
        beside.unlink(missing_ok=True)
        raise


def append_line(file: Path, content: Mapping[str, Any]) -> None:
    """Append a line of JSON in one write. If the disk is full after half the line, the half is removed again."""
    handle = open_for_lines(file)
    try:
        write_line(handle, content)
    except OSError as error:
        error.filename = str(file)
        raise
    finally:
        os.close(handle)


def open_for_lines(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)


def write_line(handle: int, content: Mapping[str, Any]) -> None:
    """As `append_line`, to a file that `open_for_lines` opened."""
    line = (json.dumps(content) + "\n").encode()
    before = os.fstat(handle).st_size
    if os.write(handle, line) < len(line):
        os.ftruncate(handle, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
