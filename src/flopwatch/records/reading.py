"""Reads JSON files, records and texts that may be damaged or malicious. Standard library only.

A file may have been written by another version of flopwatch, with more or fewer fields, and may have been damaged
since. Every supervisor process of a trial imports this module at its start, so it imports little itself.
"""

import contextlib
import json
import os
import re
import stat
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

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

    Raises:
        FileNotFoundError: The file does not exist.
        UnreadableError: The path is not a regular file, or reading is not permitted.
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
    """The content of a JSON file.

    Raises:
        FileNotFoundError: The file does not exist.
        UnreadableError: The file cannot be read, or is not JSON.
    """
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

    Raises:
        FileNotFoundError: The file does not exist.
        UnreadableError: The file cannot be read.
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
    """The whole lines in the last `size` bytes of a text file, or the end of a longer line; empty if unreadable."""
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


# Records: JSON is read into a dataclass field by field, according to the type annotations. Unknown fields are left out,
# missing fields get their defaults, and a value of the wrong type raises an error that names the field. A class may
# have a method `why_broken` for conditions that annotations cannot express, such as that a batch has at least 1 sample.

T = TypeVar("T")
Read = Callable[[Any], Any]

MAY_BE_INFINITE = {"may_be_infinite": True}
"""Field metadata: infinity is a valid value. In all other fields, infinity and NaN stand for an unknown value."""

_LARGEST_INTEGER = 10**30
"""Larger integers are rejected: no count of FLOPs or bytes is so large, and huge ones cannot be converted to float."""

_DEEPEST = 60
"""Limit for levels of nesting. The json module reads about 1,000 levels, but fails when it writes that many."""


class BrokenRecordError(FlopwatchError, ValueError):
    """A field of a record in a file is missing, or has a value of the wrong type; the message names the field."""

    def __init__(self, problem: str, field: str = "") -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self._problem, self._field = problem, field

    def inside(self, name: str) -> "BrokenRecordError":
        """The same error with `name` before the field's name, because the broken record is the value of `name`."""
        return BrokenRecordError(self._problem, f"{name}.{self._field}" if self._field else name)


def read_record(kind: type[T], content: Any) -> T:
    """Build a record of this class from JSON.

    Raises:
        BrokenRecordError: A field without a default is missing, or a value has the wrong type.
    """
    record: T = _record_reader(kind)(content)  # type: ignore[arg-type]
    return record


@cache
def _record_reader(kind: Any) -> Read:
    hints = get_type_hints(kind)
    readers = [
        (field.name, _field_reader(hints[field.name], field), type(None) in get_args(hints[field.name]))
        for field in fields(kind)
    ]
    required = [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]
    why_broken: Callable[[Any], str | None] | None = getattr(kind, "why_broken", None)

    def read(content: Any) -> Any:
        if type(content) is not dict:
            raise _wrong(content, "an object")
        values = {}
        for name, read_value, may_be_none in readers:
            if name in content:
                value = content[name]
                try:
                    # The check for None is here because calling a function for each None would double the reading time.
                    values[name] = None if value is None and may_be_none else read_value(value)
                except BrokenRecordError as error:
                    raise error.inside(name) from None
        if len(values) < len(readers):
            for name in required:
                if name not in values:
                    raise BrokenRecordError(f"the field {name!r} is missing")
        record = kind(**values)
        if why_broken is not None and (why := why_broken(record)):
            raise BrokenRecordError(why)
        return record

    return read


def _field_reader(annotation: Any, field: "Field[Any]") -> Read:
    """Return the function that reads a value of this field. That function is never called with None."""
    if field.metadata.get("may_be_infinite"):
        return _any_float
    return _known_value(annotation) if type(None) in get_args(annotation) else _reader(annotation)


def _reader(annotation: Any) -> Read:
    simple = {str: _text, bool: _boolean, int: _integer, float: _number, Any: clean_value}
    if annotation in simple:
        return simple[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _one_of(frozenset(arguments))
    if origin in (Union, types.UnionType):
        read_known = _known_value(annotation)
        return lambda value: None if value is None else read_known(value)
    if origin is tuple:
        return _sequence(_reader(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(arguments[1])
    if is_dataclass(annotation):
        return _record_reader(annotation)  # type: ignore[arg-type]
    raise TypeError(f"a record cannot have a field of type {annotation}")


def _known_value(annotation: Any) -> Read:
    """For the annotation `X | None`, return the function that reads an X. Records have no other unions."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if len(kinds) != 1:
        raise TypeError(f"a record cannot have a field with a union of {kinds}")
    return _finite_or_none if kinds[0] is float else _reader(kinds[0])


def _one_of(words: frozenset[Any]) -> Read:
    def read(value: Any) -> Any:
        if type(value) is not str or value not in words:
            raise _wrong(value, f"one of {', '.join(sorted(words))}")
        return value

    return read


def _sequence(read: Read) -> Read:
    def read_all(value: Any) -> Any:
        if type(value) is not list and type(value) is not tuple:
            raise _wrong(value, "a list")
        return tuple(map(read, value))

    return read_all


def _mapping(annotation: Any) -> Read:
    read = _reader(annotation)
    if annotation is Any:
        # `clean_value` gets the whole mapping, because it counts levels of nesting from the value that it gets.
        return lambda value: clean_value(value) if type(value) is dict else _raise(_wrong(value, "an object"))

    def read_all(value: Any) -> Any:
        if type(value) is not dict:
            raise _wrong(value, "an object")
        found = {}
        for name, item in value.items():
            if type(item) is float and not isfinite(item):
                continue  # NaN and infinity stand for an unknown value
            try:
                found[_text(name)] = read(item)
            except BrokenRecordError as error:
                raise error.inside(name[:40]) from None
        return found

    return read_all


def _raise(error: Exception) -> Any:
    raise error


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _wrong(value, "text")
    return value if value.isascii() else _writable(value)


def _writable(value: str) -> str:
    """Replace lone surrogates, because JSON allows them but UTF-8 files and terminals do not."""
    return value.encode(errors="replace").decode()


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise _wrong(value, "true or false")
    return value


def _integer(value: Any) -> int:
    if type(value) is float and isfinite(value) and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise _wrong(value, "a whole number")
    if not -_LARGEST_INTEGER <= value <= _LARGEST_INTEGER:
        raise BrokenRecordError(f"the number is too large: it has {len(hex(value)) - 2} hexadecimal digits")
    return value


def _number(value: Any) -> float:
    if type(value) is float and isfinite(value):
        return value
    if type(value) is not int:
        raise _wrong(value, "a number")
    return _integer(value)


def _finite_or_none(value: Any) -> float | None:
    return None if type(value) is float and not isfinite(value) else _number(value)


def _any_float(value: Any) -> float:
    return value if type(value) is float else _number(value)


def clean_value(value: Any, depth: int = 0) -> Any:
    """Return a JSON value without lone surrogates. Raises BrokenRecordError if no file could hold the value."""
    kind = type(value)
    if kind is str:
        return value if value.isascii() else _writable(value)
    if kind is int:
        return _integer(value)
    if kind is dict or kind is list or kind is tuple:
        if depth > _DEEPEST:
            raise BrokenRecordError(f"the value is nested more than {_DEEPEST} levels deep")
        if kind is dict:
            return {_text(name): clean_value(item, depth + 1) for name, item in value.items()}
        return kind(clean_value(item, depth + 1) for item in value)
    return value


def _wrong(value: Any, wanted: str) -> BrokenRecordError:
    shown = repr(value[:40] if isinstance(value, str) else value) if _is_short(value) else type(value).__name__
    return BrokenRecordError(f"expected {wanted}, found {shown}")


def _is_short(value: Any) -> bool:
    return value is None or isinstance(value, str | float | bool) or (isinstance(value, int) and abs(value) < 10**20)


# Texts: messages, names and log lines from trials, schedulers and files pass through these functions before they are
# shown or stored. The texts are printed with rich as `Text`, never as markup, because they may contain square brackets.

_ESCAPE_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# Characters that are escaped: C0 and C1 control codes except tab and newline, direction marks (they reorder the text
# around them), line separators, zero-width characters except the joiners that emoji need, and surrogates.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2064\u2066-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)


def plain(text: str) -> str:
    r"""The text as a terminal would show it, with invisible characters escaped.

    >>> plain("\x1b[31mred\x1b[0m, 10 %\r20 %\x07, \u202eevil")
    '20 %\\x07, \\u202eevil'
    """
    text = _ESCAPE_SEQUENCES.sub("", text).replace("\r\n", "\n")
    if "\r" in text:  # a progress bar overwrites its line, so only the last state is kept
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _HARMFUL.sub(_spelled_out, text)


def one_line(text: str, most: int | None = None) -> str:
    """The result of `plain` on one line, cut to `most` characters."""
    # Cut before escaping, because a text may be 50 MB long, and again after it, because escaping adds characters.
    line = " ".join(plain(text if most is None else text[: 4 * most]).split())
    return line if most is None or (len(line) <= most and len(text) <= 4 * most) else f"{line[:most].rstrip()}…"


def first_line(said: object, most: int | None = None) -> str:
    r"""The first line of a text or an exception's message, cut to `most` characters.

    If an exception has no message, the result is the name of its class.

    >>> first_line(ValueError("no such axis\n  File ...")), first_line(KeyError()), first_line("")
    ('no such axis', 'KeyError', '')
    """
    nothing = type(said).__name__ if isinstance(said, BaseException) else ""
    try:
        text = str(said)
    except Exception:  # the __str__ of a user's exception may raise
        text = ""
    return (text.strip().splitlines() or [nothing])[0][:most]


def cut(text: str, most: int = 4000) -> str:
    """The text; if it has more than `most` characters, its beginning and end with a note in between.

    >>> cut("a" * 50, 20)
    'aaaaaaaaaa … (50 characters in all, cut to 20) … aaaaaaaaaa'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … ({len(text):,} characters in all, cut to {2 * half:,}) … {text[-half:]}"


def listed(names: Sequence[str], at_most: int = 5) -> str:
    """The first names, separated by commas, and how many more there are.

    >>> listed(["a", "b", "c"], 2), listed(["a", "b"])
    ('a, b and 1 more', 'a, b')
    """
    more = f" and {len(names) - at_most:,} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more


def _spelled_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
