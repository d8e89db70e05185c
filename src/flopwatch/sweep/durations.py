"""Spans of time as people write them."""

import re
from typing import Any

from flopwatch.errors import InputError

_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = r"([0-9]+(?:\.[0-9]+)?)\s*(d|h|min|m|s|)\s*"


def parse_seconds(text: Any) -> float | None:
    """Seconds, from a number or from text.

    >>> parse_seconds("8h"), parse_seconds("1h30m"), parse_seconds("90m"), parse_seconds(3600)
    (28800.0, 5400.0, 5400.0, 3600.0)
    """
    if text is None:
        return None
    written = str(text).strip().lower()
    parts = re.findall(_DURATION, written)
    is_whole = re.fullmatch(f"(?:{_DURATION})+", written) and (len(parts) == 1 or all(unit for _, unit in parts))
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts) if is_whole else 0.0
    if isinstance(text, bool) or seconds <= 0:
        raise InputError(f"{text!r} is not a span of time; write it as 8h, 90m, 1h30m or a number of seconds")
    return seconds
