"""Conditions on a trial, such as `trainer=ghost seq_len>=1024`: all of its parts must hold."""

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from flopwatch.errors import InputError
from flopwatch.models.presets import IMAGE_PRESETS, PRESETS
from flopwatch.sweep.spelling import did_you_mean
from flopwatch.sweep.trainers.names import LABELS, canonical_trainer
from flopwatch.trial_records import TrialSpec

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_PART = re.compile(r"\s*([A-Za-z_.]+)\s*(<=|>=|!=|<|>|==?)\s*(\S+)\s*")
_FIELDS = {field.name for field in fields(TrialSpec)}


@dataclass(frozen=True)
class Condition:
    """Parts as (field, comparison, value)."""

    parts: tuple[tuple[str, str, str], ...]

    def holds_for(self, spec: TrialSpec) -> bool:
        return all(_holds(spec, *part) for part in self.parts)


def parse_condition(text: Any) -> Any:
    """Read a condition from text or from a mapping; anything else is returned unchanged for pydantic to refuse.

    >>> parse_condition("trainer=ghost seq_len>=1024").holds_for(TrialSpec("ghost", "tiny", 4, 2048))
    True
    """
    if isinstance(text, dict):
        text = " ".join(f"{key}{value if str(value)[:1] in '<>!' else f'={value}'}" for key, value in text.items())
    if not isinstance(text, str):
        return text
    parts = []
    for piece in re.sub(r"\s*(<=|>=|!=|==|<|>|=)\s*", r"\1", text).replace(",", " ").split():
        found = _PART.fullmatch(piece)
        if not found:
            raise InputError(f"{piece!r} in {text!r} is no condition; write `batch_size>8` or `trainer=ghost`")
        name = found[1]
        if name not in _FIELDS and not name.startswith("options."):
            raise InputError(f"a trial has no {name!r} to compare; it has {', '.join(sorted(_FIELDS))}, options.NAME")
        parts.append((name, found[2].replace("==", "="), found[3]))
    if not parts:
        raise InputError("an empty condition in `exclude` would leave out everything; write `batch_size>8`, or none")
    return Condition(tuple(parts))


def _holds(spec: TrialSpec, name: str, comparison: str, value: str) -> bool:
    actual = spec.options.get(name.removeprefix("options.")) if name.startswith("options.") else getattr(spec, name)
    if isinstance(actual, bool) or actual is None:
        return _COMPARE[comparison](str(actual).lower(), value.lower()) if comparison in ("=", "!=") else False
    if isinstance(actual, int | float):
        try:
            return _COMPARE[comparison](actual, float(value))
        except ValueError:
            raise InputError(f"{name} is a number, so it cannot be compared with {value!r}") from None
    if name == "trainer":
        is_named = value in (spec.trainer, spec.label) or _canonical(value) == spec.trainer
        return _COMPARE[comparison](is_named, True)
    return _COMPARE[comparison](str(actual), value)


def check_conditions(conditions: Sequence[Condition], specs: Sequence[TrialSpec]) -> None:
    """Raise InputError for one that names what no trial has: it would leave out nothing without a word."""
    for name, _, value in (part for condition in conditions for part in condition.parts):
        if name.startswith("options."):
            known = {f"options.{option}" for spec in specs for option in spec.options}
            if name not in known:
                raise InputError(f"`exclude` names {name!r}, which no trial has{did_you_mean(name, sorted(known))}")
        elif name in _NAMES:
            known = {str(getattr(spec, field)) for spec in specs for field in _NAMES[name]}
            near = get_close_matches(value, known | set(_KNOWN[name]), n=1)
            is_known = value in known or value in _KNOWN[name] or (name == "trainer" and _canonical(value))
            if not is_known and (near or name == "trainer"):
                told = did_you_mean(value, sorted(known | set(_KNOWN[name])))
                raise InputError(f"`exclude` names the {name} {value!r}, which no trial has{told}")


def _canonical(trainer: str) -> str | None:
    try:
        return canonical_trainer(trainer)[0]
    except InputError:
        return None


_NAMES = {"trainer": ("trainer", "label"), "model": ("model",), "dtype": ("dtype",), "device": ("device",)}
_KNOWN = {
    "trainer": tuple(LABELS),
    "model": (*PRESETS, *IMAGE_PRESETS),
    "dtype": ("fp32", "bf16", "fp16"),
    "device": ("cpu", "cuda"),
}
