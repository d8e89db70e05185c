"""Read JSON back into a dataclass, field by field, by its annotations. Standard library only: supervisors use it.

Files outlive the program that wrote them: a record may have fields more and fewer, and a disk or a person may have
damaged it. Fields nobody knows are left out, missing ones get their defaults, and a value of the wrong type is told by
name, so that nothing half read goes on into a table.

A class may have a method `why_broken`: what no annotation can say, such as that a batch is at least 1.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Read = Callable[[Any], Any]

MAY_BE_INFINITE = {"may_be_infinite": True}
"""Metadata of a field whose infinity means something; elsewhere a number is finite or not known."""

_LARGEST_INTEGER = 10**30
"""Beyond any count of FLOPs or bytes; far larger ones cannot even be made a float."""

_DEEPEST = 60
"""Levels in what is kept as it is: json reads a thousand, and writing that again fails."""


class BrokenRecordError(ValueError):
    """A value that the record's field cannot have; the message names the field."""


def read_record(kind: type[T], content: Any) -> T:
    """The record.

    Raises:
        BrokenRecordError: A field is missing that has no default, or a value has the wrong type.
    """
    record: T = _record_reader(kind)(content)  # type: ignore[arg-type]
    return record


def clean_value(value: Any) -> Any:
    """Any JSON, if it can be written again.

    Raises:
        BrokenRecordError: It is too deep, or has numbers nobody can calculate with.
    """
    return _anything(value)


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
                    # Half the fields of a record are not known, and a call for each would take as long as the rest.
                    values[name] = None if value is None and may_be_none else read_value(value)
                except BrokenRecordError as error:
                    raise BrokenRecordError(f"{name}{_joint(error)}{error}") from None
        if len(values) < len(readers):
            for name in required:
                if name not in values:
                    raise BrokenRecordError(f"it has no {name!r}")
        record = kind(**values)
        if why_broken is not None and (why := why_broken(record)):
            raise BrokenRecordError(why)
        return record

    return read


def _joint(error: BrokenRecordError) -> str:
    """`spec.steps is ...`, or `spec: it has no ...`."""
    return "." if not str(error).startswith(("is ", "it ", "its ")) else " " if str(error).startswith("is ") else ": "


def _field_reader(annotation: Any, field: "Field[Any]") -> Read:
    """Of a value that is not None."""
    if field.metadata.get("may_be_infinite"):
        return _any_float
    return _known_value(annotation) if type(None) in get_args(annotation) else _reader(annotation)


def _reader(annotation: Any) -> Read:
    simple = {str: _text, bool: _boolean, int: _integer, float: _number, Any: _anything}
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
    raise TypeError(f"no reader for {annotation}")


def _known_value(annotation: Any) -> Read:
    """Of one type or None, which is all that records here have; whoever calls it has seen to None."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if len(kinds) != 1:
        raise TypeError(f"no reader for {kinds}")
    return _finite_or_none if kinds[0] is float else _reader(kinds[0])


def _one_of(words: frozenset[Any]) -> Read:
    def read(value: Any) -> Any:
        if type(value) is not str or value not in words:
            raise _wrong(value, "a word this version of flopwatch knows")
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
        # The whole of it at once: depth is counted from here.
        return lambda value: _anything(value) if type(value) is dict else _raise(_wrong(value, "an object"))

    def read_all(value: Any) -> Any:
        if type(value) is not dict:
            raise _wrong(value, "an object")
        found = {}
        for name, item in value.items():
            if type(item) is float and not isfinite(item):
                continue  # not a number: not known
            try:
                found[_text(name)] = read(item)
            except BrokenRecordError as error:
                raise BrokenRecordError(f"{name[:40]}{_joint(error)}{error}") from None
        return found

    return read_all


def _raise(error: Exception) -> Any:
    raise error


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _wrong(value, "text")
    return value if value.isascii() else _writable(value)


def _writable(value: str) -> str:
    """Half a surrogate pair is allowed in JSON, and in no file or terminal."""
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
        raise BrokenRecordError(f"is a number of {len(hex(value)) - 2} hexadecimal digits")
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


def _anything(value: Any, depth: int = 0) -> Any:
    """As it is, if it can be written again."""
    kind = type(value)
    if kind is str:
        return value if value.isascii() else _writable(value)
    if kind is int:
        return _integer(value)
    if kind is dict or kind is list or kind is tuple:
        if depth > _DEEPEST:
            raise BrokenRecordError(f"is nested more than {_DEEPEST} levels deep")
        if kind is dict:
            return {_text(name): _anything(item, depth + 1) for name, item in value.items()}
        return kind(_anything(item, depth + 1) for item in value)
    return value


def _wrong(value: Any, wanted: str) -> BrokenRecordError:
    told = repr(value[:40] if isinstance(value, str) else value) if _is_short(value) else type(value).__name__
    return BrokenRecordError(f"is {told}, not {wanted}")


def _is_short(value: Any) -> bool:
    return value is None or isinstance(value, str | float | bool) or (isinstance(value, int) and abs(value) < 10**20)
