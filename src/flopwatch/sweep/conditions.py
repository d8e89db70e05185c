"""Conditions on a trial, such as `trainer=ghost seq_len>=1024`: all of its parts must hold."""

import operator
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from flopwatch.errors import InputError
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


class Condition(BaseModel):
    """Parts as (field, comparison, value)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parts: tuple[tuple[str, str, str], ...]

    def holds_for(self, spec: TrialSpec) -> bool:
        return all(_holds(spec, *part) for part in self.parts)


def parse_condition(text: Any) -> Any:
    """
    >>> condition = Condition(**parse_condition("trainer=ghost seq_len>=1024"))
    >>> condition.holds_for(TrialSpec("ghost", "tiny", 4, 2048))
    True
    """
    if isinstance(text, dict) and "parts" not in text:
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
    return {"parts": tuple(parts)}


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
        return _COMPARE[comparison](value in (spec.trainer, spec.label), True)
    return _COMPARE[comparison](str(actual), value)


ConditionText = Annotated[Condition, BeforeValidator(parse_condition)]
