"""Settings as Hydra's users write them: `batch_size=1,2,4 trainer=standard,ghost options.lr=0.1`."""

import contextlib
from collections.abc import Sequence
from typing import Any

import yaml

from flopwatch.errors import InputError


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """A mapping for the matrix; a comma makes an axis.

    >>> parse_overrides(["batch_size=1,2", "options.lr=0.1", "trainer=ghost"])
    {'batch_size': [1, 2], 'options': {'lr': 0.1}, 'trainer': 'ghost'}
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise InputError(f"{word!r} is no setting; write it as batch_size=1,2,4")
        place = found
        *outer, last = names = key.strip().split(".")
        if not all(names):
            raise InputError(f"{word!r} is no setting: a name is missing beside a dot; write it as options.lr=0.1")
        for name in outer:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise InputError(
                    f"{word!r} sets a part of {name!r}, which another setting makes {place!r}; leave one out"
                )
        if isinstance(place.get(last), dict):
            raise InputError(f"{word!r} sets the whole of {key.strip()!r}, other settings parts of it; leave one out")
        place[last] = _value(text)
    return found


def _value(text: str) -> Any:
    parts = [_scalar(part) for part in text.split(",")]
    return parts if len(parts) > 1 else parts[0]


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date such as 2026-13-45
        return text.strip()
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML 1.1 takes 1e-3 for a word
    return value if isinstance(value, int | float | bool | str) else text.strip()
