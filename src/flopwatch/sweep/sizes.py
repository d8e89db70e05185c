"""Amounts of memory as people write them."""

import re
from typing import Any

from flopwatch.errors import InputError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_bytes(text: Any) -> int | None:
    """Bytes, from a number or from text.

    >>> parse_bytes("1.5GiB"), parse_bytes("512M"), parse_bytes(1000)
    (1610612736, 536870912, 1000)
    """
    if text is None or (isinstance(text, int) and not isinstance(text, bool) and text > 0):
        return text
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    if not found or found[2] not in _UNITS or float(found[1]) <= 0:
        raise InputError(f"{text!r} is not an amount of memory; write it as 4GiB, 512MiB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2]])
