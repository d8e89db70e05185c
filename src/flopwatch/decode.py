"""Reads JSON into a dataclass field by field, according to the type annotations. Standard library only.

A file may have been written by another version of flopwatch, with more or fewer fields, and may have been damaged
since. Unknown fields are left out, missing fields get their defaults, and a value of the wrong type raises an error
that names the field. A class may have a method `why_broken` for conditions that annotations cannot express, such as
that a batch has at least 1 sample.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from flopwatch.errors import FlopwatchError
from flopwatch.language import with_parts

T = TypeVar("T")
Read = Callable[[Any], Any]

LARGEST = 10**30
"""Larger integers are rejected: no count of FLOPs or bytes is so large, and huge ones cannot be converted to float."""


def valid_if(check: Callable[[Any], bool]) -> Mapping[str, Callable[[Any], bool]]:
    """Field metadata: a value other than None is taken as it is if `check` holds, whatever the annotation says."""
    return {"check": check}


def is_amount(value: Any) -> bool:
    """Whether a value is a finite number that can be added up."""
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def are_amounts(value: Any) -> bool:
    return type(value) is dict and all(map(is_amount, value.values()))


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


class Stored:
    """The base of dataclasses with a JSON form, which `read_record` reads back."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]


def read_record(kind: type[T], content: Any) -> T:
    """Build a record of this class from JSON; raises BrokenRecordError if a field is missing or wrong."""
    record: T = _record_reader(kind)(content)  # type: ignore[arg-type]
    return record


def read_or_none(kind: type[T], content: Any) -> T | None:
    """As `read_record`; None if the content is broken."""
    try:
        return read_record(kind, content)
    except BrokenRecordError:
        return None


@cache
def _record_reader(kind: Any) -> Read:
    hints = get_type_hints(kind)
    readers = [
        (field.name, _field_reader(hints[field.name], field), type(None) in get_args(hints[field.name]))
        for field in fields(kind)
    ]
    texts = [name for name, hint in hints.items() if hint in (str, str | None, tuple[str, ...], Mapping[str, str])]
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
        record = kind(**{**values, **_said(values, texts, content)})
        if why_broken is not None and (why := why_broken(record)):
            raise BrokenRecordError(why)
        return record

    return read


def _said(values: Mapping[str, Any], texts: Sequence[str], content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The texts of a record that flopwatch has said, with the parts that are stored beside them."""
    said = clean_value(content.get("said"))
    return {name: with_parts(values[name], said) for name in texts if name in values} if said else {}


def _field_reader(annotation: Any, field: "Field[Any]") -> Read:
    """Return the function that reads a value of this field. That function is never called with None."""
    if "check" in field.metadata:
        return _checked(field.metadata["check"])
    return _known_value(annotation) if type(None) in get_args(annotation) else _reader(annotation)


def _checked(check: Callable[[Any], bool]) -> Read:
    def read(value: Any) -> Any:
        if not check(value):
            raise BrokenRecordError("the value has the wrong type, or is out of range")
        return value

    return read


def _reader(annotation: Any) -> Read:
    simple = {str: _text, bool: _boolean, int: _integer, float: _number, int | float: _metric, Any: clean_value}
    if annotation in simple:
        return simple[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _one_of(frozenset(arguments))
    if origin in (Union, types.UnionType):
        read_known = _known_value(annotation)
        return lambda value: None if value is None else read_known(value)
    if origin is tuple:
        return _sequence(_reader(arguments[0]), None if arguments[-1] is ... else len(arguments))
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


def _sequence(read: Read, length: int | None) -> Read:
    def read_all(value: Any) -> Any:
        if type(value) is not list and type(value) is not tuple:
            raise _wrong(value, "a list")
        if length is not None and len(value) != length:
            raise BrokenRecordError(f"expected {length} values, found {len(value)}")
        return tuple(map(read, value))

    return read_all


def _mapping(annotation: Any) -> Read:
    read = _reader(annotation)
    may_be_unknown = read is not _metric

    def read_all(value: Any) -> Any:
        if type(value) is not dict:
            raise _wrong(value, "an object")
        if annotation is Any:
            # `clean_value` gets the whole mapping, because it counts levels of nesting from the value that it gets.
            return clean_value(value)
        found = {}
        for name, item in value.items():
            if may_be_unknown and type(item) is float and not isfinite(item):
                continue  # NaN and infinity stand for an unknown value
            try:
                found[_text(name)] = read(item)
            except BrokenRecordError as error:
                raise error.inside(name[:40]) from None
        return found

    return read_all


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
    if not -LARGEST <= value <= LARGEST:
        raise BrokenRecordError(f"the number is too large: it has {len(hex(value)) - 2} hexadecimal digits")
    return value


def _number(value: Any) -> float:
    if type(value) is float and isfinite(value):
        return value
    if type(value) is not int:
        raise _wrong(value, "a number")
    return _integer(value)


def _metric(value: Any) -> int | float:
    """Read a value of the type `int | float`: one of a metric, such as a loss, which may be NaN or infinite."""
    return value if type(value) is float or type(value) is bool else _number(value)


def _finite_or_none(value: Any) -> float | None:
    return None if type(value) is float and not isfinite(value) else _number(value)


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
    is_short = value is None or isinstance(value, str | float | bool)
    is_short = is_short or (isinstance(value, int) and abs(value) < 10**20)
    shown = repr(value[:40] if isinstance(value, str) else value) if is_short else type(value).__name__
    return BrokenRecordError(f"expected {wanted}, found {shown}")
