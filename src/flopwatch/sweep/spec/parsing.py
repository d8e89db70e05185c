"""Reads and checks parts of a sweep's settings: `KEY=VALUE` words, amounts, conditions, numbers of processes.

Loads neither pydantic nor torch, because the runner and the worker import it too.
"""

import contextlib
import difflib
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from flopwatch.errors import InputError
from flopwatch.records.settings import SETTINGS
from flopwatch.records.trial import PRIVATE, TrialSpec, canonical_trainer
from flopwatch.text import one_line


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Settings from `KEY=VALUE` words in the syntax of Hydra; values separated by commas become a list.

    >>> parse_overrides(["batch_size=1,2", "options.lr=0.1", "trainer=ghost"])
    {'batch_size': [1, 2], 'options': {'lr': 0.1}, 'trainer': 'ghost'}
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.strip() or not text.strip():
            raise InputError(f"{word!r} is not a setting; write it as batch_size=1,2,4")
        place = found
        *outer, last = names = key.strip().split(".")
        if not all(names):
            raise InputError(f"{word!r} is not a setting: a name is missing beside a dot; write it as options.lr=0.1")
        for name in outer:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise InputError(
                    f"{word!r} sets a part of {name!r}, but another setting sets {name!r} to {place!r}; leave one out"
                )
        parts = [_scalar(part) for part in text.split(",")]
        place[last] = parts if len(parts) > 1 else parts[0]
    return found


_OF_SWEEPS = ("memory", "timeout", "exclude", "repeats", "budget")
FLAGS = (*(name for name, setting in SETTINGS.items() if setting.has_flag), *_OF_SWEEPS)
"""The settings with a flag of their own in `sweep`, `trial` and `fit`."""


def settings_without_flags(words: Sequence[str]) -> dict[str, Any]:
    """The settings of `KEY=VALUE` words; raises InputError for one that has a flag, which is the only way to write it.

    >>> settings_without_flags(["seed=1"])
    {'seed': 1}
    """
    for word in words:
        key, _, value = word.partition("=")
        if key in FLAGS:
            raise InputError(f"write {one_line(word, 100)!r} as --{key.replace('_', '-')} {one_line(value, 100)}")
    return parse_overrides(words)


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date such as 2026-13-45
        return text.strip()
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)  # YAML 1.1 reads 1e-3 as text
    return value if isinstance(value, int | float | bool | str) else text.strip()


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

_MOST_BYTES = 2**60
"""One exbibyte, because flopwatch sets 1.5 times a memory limit as a resource limit, which must fit into 64 bits."""

_LEAST_WITHOUT_UNIT = 1000  # a smaller number without a unit is meant as GiB or MiB


def parse_bytes(text: Any) -> int | None:
    """The number of bytes that a number or a text stands for; None for None.

    >>> parse_bytes("1.5GiB"), parse_bytes("512M"), parse_bytes(1000)
    (1610612736, 536870912, 1000)
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", str(text).lower())
    if not found or found[2] not in _UNITS or float(found[1]) <= 0:
        raise InputError(f"{text!r} is not an amount of memory; write it as 4GiB, 512MiB or a number of bytes")
    if not found[2] and float(found[1]) < _LEAST_WITHOUT_UNIT:
        raise InputError(f"{text!r} without a unit is {text} bytes; write it as {found[1]}GiB or {found[1]}MiB")
    size = int(found[1]) if found[2] == "" and "." not in found[1] else int(float(found[1]) * _UNITS[found[2]])
    if size > _MOST_BYTES:
        raise InputError(f"{text!r} is more memory than any machine has; write it as 4GiB, 512MiB or a number of bytes")
    return size


_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = r"([0-9]+(?:\.[0-9]+)?)\s*(d|h|min|m|s|)\s*"


def parse_seconds(text: Any) -> float | None:
    """The number of seconds that a number or a text stands for; None for None.

    >>> parse_seconds("8h"), parse_seconds("1h30m"), parse_seconds("90m"), parse_seconds(3600)
    (28800.0, 5400.0, 5400.0, 3600.0)
    """
    if text is None:
        return None
    written = str(text).strip().lower()
    parts = re.findall(_DURATION, written)
    is_whole = re.fullmatch(f"(?:{_DURATION})+", written) and (len(parts) == 1 or all(unit for _, unit in parts))
    if not is_whole:
        raise InputError(f"{text!r} is not a duration; write it as 8h, 90m, 1h30m or a number of seconds")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds == 0:
        raise InputError(
            f"a duration of {text!r} leaves no time to run anything; write 8h, 90m, 1h30m, or leave it out"
        )
    return seconds


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: a known name that is similar, or else all known names.

    >>> did_you_mean("batchsize", ["batch_size", "steps"])
    "; did you mean 'batch_size'?"
    >>> did_you_mean("speed", ["lr", "steps"])
    '; there are lr, steps'
    """
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(one_line(name, 100).lower(), names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    if len(names) > _MOST_NAMES:
        return "; see `flopwatch sweep --help` and docs/sweep.md"
    return f"; there are {', '.join(names)}" if names else ""


_MOST_NAMES = 20

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_PART = re.compile(r"\s*([A-Za-z_.]+)\s*(<=|>=|!=|<|>|==?)\s*(\S+)\s*")


@dataclass(frozen=True)
class Condition:
    """A condition such as `trainer=ghost seq_len>=1024`. All its comparisons (`parts`) must hold."""

    parts: tuple[tuple[str, str, str], ...]

    def holds_for(self, spec: TrialSpec) -> bool:
        return all(_holds(spec, *part) for part in self.parts)


def parse_condition(text: Any) -> Any:
    """Read a condition from text or a mapping. Other values are returned unchanged, and pydantic then reports them.

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
            raise InputError(f"{piece!r} in {text!r} is not a condition; write `batch_size>8` or `trainer=ghost`")
        name = found[1]
        if name not in SETTINGS and not name.startswith("options."):
            raise InputError(
                f"a condition cannot name {name!r}; a trial has {', '.join(sorted(SETTINGS))} and options.NAME"
            )
        parts.append((name, found[2].replace("==", "="), found[3]))
    if not parts:
        raise InputError("an empty condition in `exclude` would remove all trials; delete it, or write `batch_size>8`")
    return Condition(tuple(parts))


def _holds(spec: TrialSpec, name: str, comparison: str, value: str) -> bool:
    compare = _COMPARE[comparison]
    actual = spec.options.get(name.removeprefix("options.")) if name.startswith("options.") else getattr(spec, name)
    if isinstance(actual, bool) or actual is None:
        return compare(str(actual).lower(), value.lower()) if comparison in ("=", "!=") else False
    if isinstance(actual, int | float):
        try:
            return compare(actual, float(value))
        except ValueError:
            raise InputError(f"`exclude` compares {name}, a number, with {value!r}; give a number instead") from None
    if name == "trainer":
        is_named = value in (spec.trainer, spec.label) or _canonical(value) == spec.trainer
        return compare(is_named, True)
    return compare(str(actual), value)


def _canonical(trainer: str) -> str | None:
    with contextlib.suppress(InputError):
        return canonical_trainer(trainer)[0]
    return None


def needs_one_process(spec: TrialSpec) -> str | None:
    """Why the trainer cannot run in the trial's number of processes; None if it can."""
    if spec.processes == 1 or spec.trainer not in PRIVATE:
        return None
    return (
        f"the trainer {spec.trainer} can run in one process only, and the trial has {spec.processes}; do not "
        "set `processes` for this trainer"
    )


def check_processes(spec: TrialSpec) -> None:
    if spec.runs_torchrun and spec.batch_size % spec.processes:
        raise InputError(
            f"{spec.processes} processes cannot share a batch of {spec.batch_size} samples, which is the batch of "
            f"the whole trial; use multiples of {spec.processes}, or leave this trial out with "
            f"`exclude: batch_size={spec.batch_size} processes={spec.processes}`"
        )
