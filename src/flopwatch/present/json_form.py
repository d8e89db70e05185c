"""Write what a report contains as JSON, for other programs: numbers are not rounded. Standard library only."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

FORMAT = 1


def to_json(content: Any) -> str:
    """Write a dataclass or a mapping, with each item of a tuple on its own line."""
    named = content if isinstance(content, Mapping) else record_fields(content)
    lines = []
    for name, value in {"format": FORMAT, **named}.items():
        # Do not use `indent`: it disables the C encoder of json, and 10,000 trials would take three times as long.
        is_long = isinstance(value, tuple) and value
        written = "[\n  " + ",\n  ".join(map(strict_json, value)) + "\n ]" if is_long else strict_json(value)
        lines.append(f" {json.dumps(name)}: {written}")
    return "{\n" + ",\n".join(lines) + "\n}"


def record_fields(record: Any) -> dict[str, Any]:
    if not is_dataclass(record):
        raise TypeError(f"an object of type {type(record).__name__} cannot be written as JSON")
    return {field.name: getattr(record, field.name) for field in fields(record)}


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON for other programs. NaN and infinity of a damaged log, which are not JSON, become null."""
    try:
        return json.dumps(value, default=record_fields, allow_nan=False, indent=indent)
    except ValueError:  # This is rare, so numbers are not checked beforehand.
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_dataclass(value):
        return _finite(record_fields(value))
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
