"""Tells whether the fields of a record in a run's log have the types that the record's class declares.

A line of a damaged log may be valid JSON and still have a text where a number should be. Such a line counts as one that
cannot be read, because nothing else in it can be trusted either. Rows are checked one by one while a long log is read,
so the checks look at types only, and at the size of numbers that are added up.
"""

from collections.abc import Callable, Mapping
from typing import Any

_LARGEST = 1e30
"""No count of FLOPs and no time is so large, and larger integers cannot be converted to float."""
_NUMBERS = frozenset({int, float, bool})
_CELLS = frozenset({int, float, bool, type(None)})
_COUNTS = frozenset({int})
_TIMES = ("seconds", "input_wait_seconds")


def broken_field(content: Mapping[str, Any]) -> str | None:
    """The name of the first field of a record that has a value of the wrong type; None if all are right.

    >>> broken_field({"step": 4, "unix_time": 1.5, "values": {"training/loss": "high"}})
    'values'
    """
    for name, value in content.items():
        is_right = _CHECKS.get(name)
        if is_right is not None and not is_right(value):
            return name
    return None


def _is_amount(value: Any) -> bool:
    """Whether a value is a finite number that can be added up."""
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _is_count(value: Any) -> bool:
    return type(value) is int and -_LARGEST < value < _LARGEST


def _is_text(value: Any) -> bool:
    return type(value) is str


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _mapping_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is dict and all(map(check, value.values()))


def _texts(value: Any) -> bool:
    return type(value) in (list, tuple) and all(map(_is_text, value))


def _are_ranges(value: Any) -> bool:
    return type(value) is list and all(
        type(each) is list and len(each) == 2 and all(map(_is_count, each)) for each in value
    )


def _is_value(value: Any) -> bool:
    """Whether a value is one of a metric, which may be NaN or infinite."""
    return type(value) is float or (type(value) in _NUMBERS and -_LARGEST < value < _LARGEST)


def _is_ledger(value: Any) -> bool:
    if type(value) is not dict:
        return False
    return (
        _is_count(value.get("steps", 0))
        and _or_none(_is_amount)(value.get("first_start_unix_time"))
        and all(_mapping_of(_is_amount)(value.get(part, {})) for part in ("totals", "seconds", "timed_flops"))
    )


def _is_column(name: str, column: Any, length: int) -> bool:
    if type(column) is not list or len(column) != length:
        return False
    kinds = set(map(type, column))
    if not kinds <= (_COUNTS if name == "step" else _CELLS):
        return False
    known = [cell for cell in column if cell is not None] if type(None) in kinds else column
    if not known or (float in kinds and int not in kinds and name not in _TIMES):
        return True  # the values of a metric may be NaN or infinite
    if float not in kinds:  # `min` and `max` are ten times as quick as a loop, but not right if there is a NaN
        return bool(min(known) > -_LARGEST and max(known) < _LARGEST)
    return all(map(_is_amount if name in _TIMES else _is_value, known))


def _are_columns(value: Any) -> bool:
    if type(value) is not dict:
        return False
    numbers = value.get("step", ())
    length = len(numbers) if type(numbers) is list else -1
    return not value or all(_is_column(name, column, length) for name, column in value.items())


def _is_peak(value: Any) -> bool:
    return type(value) is dict and _is_amount(value.get("flops_per_s")) and value["flops_per_s"] > 0


def _is_environment(value: Any) -> bool:
    return type(value) is dict and type(value.get("process", {})) is dict


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "step": _or_none(_is_count),
    "unix_time": _is_amount,
    "values": _mapping_of(_is_value),
    "steps": _are_columns,
    "ledger": _is_ledger,
    "all_ranks": _mapping_of(_is_amount),
    "exact": _or_none(lambda value: type(value) is bool),
    "notes": _texts,
    "dtypes": _texts,
    "peak": _or_none(_is_peak),
    "session": _is_text,
    "output_dir": _is_text,
    "resumed_after_step": _or_none(_is_count),
    "total_steps": _or_none(_is_count),
    "rank": _is_count,
    "world_size": lambda value: _is_count(value) and value > 0,
    "config": _mapping_of(lambda value: True),
    "environment": _is_environment,
    "what_ran": _mapping_of(lambda value: True),
    "mode": _is_text,
    "method": _or_none(_is_text),
    "attention": _is_text,
    "coverage": _or_none(_is_amount),
    "device_count": lambda value: _is_count(value) and value > 0,
    "achievable_flops_per_s": _or_none(_is_amount),
    "level": _is_text,
    "code": _is_text,
    "message": _is_text,
    "doubted": _are_ranges,
    "notices": _mapping_of(_is_amount),
    "failed_parts": _mapping_of(_is_text),
    "dropped_rows": _mapping_of(_is_amount),
    "ended_by": _or_none(_is_text),
}
