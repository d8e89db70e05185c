"""A comparison as JSON: everything, unrounded, one pair to a line."""

import json
from dataclasses import fields, is_dataclass
from typing import Any

from flopwatch.sweep_comparison.records import SweepComparison

FORMAT = 1


def comparison_json(comparison: SweepComparison) -> str:
    content = {"format": FORMAT, **_fields(comparison)}
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {_written(value)}" for name, value in content.items()) + "\n}"


def _written(value: Any) -> str:
    if isinstance(value, tuple) and value:
        return "[\n  " + ",\n  ".join(map(_strict, value)) + "\n ]"
    return _strict(value)


def _strict(value: Any) -> str:
    return json.dumps(value, default=_fields, allow_nan=False)


def _fields(record: Any) -> dict[str, Any]:
    if not is_dataclass(record):
        raise TypeError(f"{type(record).__name__} has no JSON form")
    return {field.name: getattr(record, field.name) for field in fields(record)}
