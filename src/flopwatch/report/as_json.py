"""The report as JSON: everything of the summary, unrounded, with one row per trial."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from flopwatch.report.records import SweepSummary

FORMAT = 1


def report_json(summary: SweepSummary) -> str:
    """Strict JSON, one trial or group to a line: what is not finite is null."""
    content = {"format": FORMAT, **_fields(summary)}
    content["trials"] = content.pop("rows")
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {_written(value)}" for name, value in content.items()) + "\n}"


def _written(value: Any) -> str:
    # Not by `indent`: that leaves json's fast encoder, and 10,000 trials would take three times as long.
    if isinstance(value, tuple) and value:
        return "[\n  " + ",\n  ".join(map(_strict, value)) + "\n ]"
    return _strict(value)


def _strict(value: Any) -> str:
    try:
        return json.dumps(value, default=_fields, allow_nan=False)
    except ValueError:  # rare, and walking through all values takes longer than writing them
        return json.dumps(_finite(value), allow_nan=False)


def _fields(record: Any) -> dict[str, Any]:
    if not is_dataclass(record):
        raise TypeError(f"{type(record).__name__} has no JSON form")
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if is_dataclass(value):
        return _finite(_fields(value))
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
