"""Amounts of memory as people write them."""

import re
from typing import Any

from flopwatch.errors import InputError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

_MOST_BYTES = 2**60
"""An exbibyte. The kernel's limits are signed 64-bit numbers, and we set ours up to half as high again."""


def parse_bytes(text: Any) -> int | None:
    """Bytes, from a number or from text.

    >>> parse_bytes("1.5GiB"), parse_bytes("512M"), parse_bytes(1000)
    (1610612736, 536870912, 1000)
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    if not found or found[2] not in _UNITS or float(found[1]) <= 0:
        raise InputError(f"{text!r} is not an amount of memory; write it as 4GiB, 512MiB or a number of bytes")
    size = int(found[1]) if found[2] == "" and "." not in found[1] else int(float(found[1]) * _UNITS[found[2]])
    if size > _MOST_BYTES:
        raise InputError(f"{text!r} is more memory than any machine has; write it as 4GiB, 512MiB or a number of bytes")
    return size
