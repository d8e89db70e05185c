"""The matrix of a sweep: read from YAML and flags, checked, and expanded into trials."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    create_model,
    model_validator,
)

from flopwatch.errors import InputError
from flopwatch.models.presets import image_preset
from flopwatch.records.settings import SETTINGS, Setting
from flopwatch.records.trial import Limits, TrialSpec, canonical_trainer
from flopwatch.spellings import SWEEP
from flopwatch.sweep.spec.names import check_label
from flopwatch.sweep.spec.parsing import (
    Condition,
    check_processes,
    did_you_mean,
    parse_bytes,
    parse_condition,
    parse_seconds,
)
from flopwatch.sweep.trainers.privacy import PrivacySettings, check_privacy_used
from flopwatch.text import cut, first_line

MOST_TRIALS = 100_000  # a matrix with more trials is more likely a typo than a sweep of many months
_MOST_MISTAKES = 2

_Model = TypeVar("_Model", bound=BaseModel)


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return list(value) if isinstance(value, list | tuple) else [value]


def _none_for_word(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in ("null", "none") else value


Several = BeforeValidator(_as_list)
PositiveInt = Annotated[int, Field(ge=1, le=2**63 - 1)]
Ints = Annotated[list[PositiveInt], Several]
Words = Annotated[list[str], Several]


class TrainerEntry(BaseModel):
    """A trainer of the matrix: a built-in trainer, a class `package.module:Class`, or a shell command."""

    model_config = ConfigDict(extra="forbid")

    trainer: str = "command"
    label: str | None = None
    command: str | None = None
    options: dict[str, JsonValue] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"trainer": value} if isinstance(value, str) else value


Seconds = Annotated[float | None, BeforeValidator(parse_seconds)]


def _field(default: Any, text: str) -> Any:
    """A key with its default as YAML says it, and what help and `flopwatch init --sweep` say about it."""
    return Field(default, validate_default=True, description=text)


def _field_of(name: str, *default: Any) -> Any:
    """The key of this field of `TrialSpec`; its default is that of the field, if no other is given."""
    setting = SETTINGS[name]
    found = TrialSpec.__dataclass_fields__[name].default if setting.axis is None else list(setting.axis)
    return _field(default[0] if default else found, setting.text)


def _type_of(setting: Setting, kind: Any) -> Any:
    """What a matrix may have for a field of this type."""
    known = next((each for each in get_args(kind) if each is not type(None)), kind)
    wanted: Any = known
    if known is int:
        wanted = Annotated[int, Field(ge=setting.bounds[0], le=setting.bounds[1])]
    elif setting.pattern:
        wanted = Annotated[str, Field(pattern=setting.pattern)]
    if known is not kind:
        wanted = Annotated[wanted | None, BeforeValidator(_none_for_word)]
    return wanted if setting.axis is None else Annotated[list[wanted], Several]


def _with_settings(declared: type[_Model]) -> type[_Model]:
    """Add the keys of all settings of a trial that the model does not declare itself, in the order of `TrialSpec`."""
    kinds = get_type_hints(TrialSpec)
    fields: dict[str, Any] = {key: (field.annotation, field) for key, field in declared.model_fields.items()}
    of_trials: dict[str, Any] = {
        name: fields.pop(name, None) or (_type_of(setting, kinds[name]), _field_of(name))
        for name, setting in SETTINGS.items()
        if setting.text
    }
    made: Any = create_model(declared.__name__, __config__=declared.model_config, **of_trials, **fields)
    made.__doc__ = declared.__doc__
    return cast(type[_Model], made)


@_with_settings
class Matrix(BaseModel):
    """The settings of a sweep. A setting or option with several values is an axis of the matrix."""

    model_config = ConfigDict(extra="forbid")

    trainer: Annotated[list[TrainerEntry], Several] = _field_of("trainer")
    command: str | None = _field_of("command")
    gpus: Annotated[int, Field(ge=0)] = _field_of("gpus")
    options: dict[str, JsonValue] = _field_of("options", {})
    privacy: PrivacySettings | None = _field_of("privacy", None)
    processes: Ints = _field_of("processes")
    layout: Annotated[list[Literal["ddp", "fsdp"]], Several] = _field_of("layout")
    repeats: PositiveInt = _field(1, "Runs of each trial, with the seeds 0, 1, 2, ...; the report shows mean times.")
    exclude: list[Annotated[Condition, BeforeValidator(parse_condition)]] = _field(
        [],
        'Conditions that leave a trial out, such as ["trainer=ghost seq_len>=1024", {checkpointing: true, trainer: '
        "standard}].",
    )
    memory: Annotated[int | None, BeforeValidator(parse_bytes)] = _field(
        None, "Limit of host memory for each trial, such as 16GiB."
    )
    timeout: Seconds = _field(3600, "End a trial after this time, such as 30m.")
    no_progress: Seconds = _field(
        None, "End a trial that finishes no step for this time; null: 600 seconds, and no limit for a command."
    )
    retries: Annotated[int, Field(ge=0)] = _field(2, "Retries of a trial that was lost or preempted.")
    retry_on: Words = _field([], "Other outcomes to retry: error, crash, timeout, hang.")
    budget: Seconds = _field(None, "Start no new trial after this time, such as 8h or 90m.")


def read_matrix(file: Path | None, settings: Mapping[str, Any]) -> Matrix:
    """Read a matrix from a YAML file; `settings` take precedence. Raises InputError, which names the setting."""
    content = layered(_read_file(file), settings)
    try:
        return Matrix.model_validate(content)
    except ValidationError as error:
        where = f"{file}: " if file else ""
        lines = [_mistake_text(item["type"], item["loc"], item["msg"], item["input"]) for item in error.errors()]
        more = f"; and {len(lines) - _MOST_MISTAKES} more mistakes" if len(lines) > _MOST_MISTAKES else ""
        raise InputError(f"{where}the matrix cannot be used: {'; '.join(lines[:_MOST_MISTAKES])}{more}") from None


def _mistake_text(kind: str, place: tuple[int | str, ...], message: str, value: Any) -> str:
    key = ".".join(map(str, place)) or "matrix"
    if kind == "extra_forbidden":
        model = TrainerEntry if place[0] == "trainer" else PrivacySettings
        known = Matrix.model_fields if len(place) == 1 else model.model_fields
        return f"there is no setting {key!r}{did_you_mean(str(place[-1]), known)}"
    message = message.removeprefix("Value error, ")
    shown = repr(value)
    return f"{key}: {message}" if shown in message else f"{key}: {message}, got {cut(shown, 200)}"


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings: later ones take precedence, and the mappings `options` and `privacy` are merged too.

    >>> layered({"options": {"lr": 0.1}, "steps": 5}, {"options": {"rank": 8}, "steps": 9})
    {'options': {'lr': 0.1, 'rank': 8}, 'steps': 9}
    """
    found: dict[str, Any] = {}
    for layer in layers:
        for word, value in layer.items():
            key = SWEEP.get(word, word)
            below = found.get(key)
            both = isinstance(value, Mapping) and isinstance(below, Mapping)
            found[key] = {**below, **value} if both else value  # type: ignore[dict-item]
    return found


def _read_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the matrix {file}: {error.strerror}; name a YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or a date such as 2026-13-45
        mark = getattr(error, "problem_mark", None)
        what = first_line(error) if mark is None else f"{getattr(error, 'problem', None)} in line {mark.line + 1}"
        raise InputError(
            f"{file} is not YAML for a matrix ({cut(what, 200)}); correct it, or name a YAML file"
        ) from None
    if content is None:
        raise InputError(f"{file} is empty; write settings into it, such as `trainer: [standard, ghost]`")
    if not isinstance(content, dict):
        raise InputError(
            f"{file} contains a {type(content).__name__}; write it as a mapping such as `trainer: [standard, ghost]`"
        )
    inner = content.get("sweep", content)
    if not isinstance(inner, dict):
        raise InputError(f"`sweep` in {file} is a {type(inner).__name__}; write it as a mapping of settings")
    return inner


def expand(matrix: Matrix) -> list[TrialSpec]:
    """The trials of every combination that `exclude` does not remove, in the order of the axes.

    Raises InputError if no trial is left, there are too many, or settings contradict each other.
    """
    axes = _axes(matrix)
    count = math.prod(map(len, axes.values()))
    if count > MOST_TRIALS:
        raise InputError(f"the matrix has {count:,} trials, more than the limit of {MOST_TRIALS:,}; give fewer values")
    specs = [_spec(matrix, **dict(zip(axes, point, strict=True))) for point in itertools.product(*axes.values())]
    distinct = {repr(spec): spec for spec in specs}.values()  # a value may be given twice
    kept = [spec for spec in distinct if not any(condition.holds_for(spec) for condition in matrix.exclude)]
    if not kept:
        why = "`exclude` removes all trials; exclude fewer" if count else "a setting is an empty list; give it a value"
        raise InputError(f"no trial is left to run: {why}")
    for spec in kept:
        check_processes(spec)
    return kept


_OUTERMOST = ("entry", "model", "dtype", "checkpointing", "seed", "place", "seq_len", "batch_size")
"""The first axes of the order of trials; further ones follow as in `TrialSpec`, and `options` last."""


def _axes(matrix: Matrix) -> dict[str, Sequence[Any]]:
    named = matrix.trainer if matrix.command is None or "trainer" in matrix.model_fields_set else []
    of_command = [] if matrix.command is None else [TrainerEntry(command=matrix.command)]
    entries = [(entry, *_resolved(entry)) for entry in [*named, *of_command]]
    check_privacy_used(matrix.privacy, [trainer for _, trainer, _ in entries])
    joined = ("trainer", "processes", "layout")
    axes: dict[str, Sequence[Any]] = {
        name: getattr(matrix, name)
        for name, setting in SETTINGS.items()
        if setting.axis is not None and name not in joined
    }
    axes["entry"] = [
        (entry.model_copy(update={"options": own}), *names) for entry, *names in entries for own in _each(entry.options)
    ]
    places = itertools.product(matrix.processes, matrix.layout or ["ddp"])
    axes["place"] = list(dict.fromkeys((number, layout if number > 1 else None) for number, layout in places))
    axes["options"] = _each(matrix.options)
    if matrix.repeats > 1:
        if "seed" in matrix.model_fields_set:
            raise InputError("`repeats` and `seed` both say how often each trial runs; leave one out")
        axes["seed"] = range(matrix.repeats)
    return {name: axes[name] for name in dict.fromkeys((*_OUTERMOST, *axes))}


def _each(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every combination of the values in lists.

    >>> _each({"lr": [0.1, 0.2], "rank": 8})
    [{'lr': 0.1, 'rank': 8}, {'lr': 0.2, 'rank': 8}]
    """
    lists = [value if isinstance(value, list) else [value] for value in options.values()]
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*lists)]


def _resolved(entry: TrainerEntry) -> tuple[str, str]:
    """The trainer's canonical name, and its label, with which the names of its trials begin."""
    if entry.command is not None:
        if entry.trainer != "command":
            raise InputError(f"the trainer {entry.trainer!r} has both a name and a command; leave one out")
        if not entry.command.strip():
            raise InputError("the command of a trainer is empty; write what to run, such as 'python train.py'")
        return "command", check_label(entry.label or "Command")
    if entry.trainer == "command":
        raise InputError("a trainer without a name needs a command: {label: mine, command: 'python train.py ...'}")
    trainer, label = canonical_trainer(entry.trainer)
    return trainer, check_label(entry.label) if entry.label else label


def _spec(
    matrix: Matrix,
    *,
    entry: tuple[TrainerEntry, str, str],
    place: tuple[int, str | None],
    options: Mapping[str, Any],
    **settings: Any,
) -> TrialSpec:
    (own, trainer, label), (processes, layout) = entry, place
    images = image_preset(settings["model"])
    if images is not None:  # an image model has one input size, so several sequence lengths give the same trial
        settings["seq_len"] = images.image_size
    chosen = {**options, **own.options}
    # A command reports no progress, so `no_progress` has no default for commands.
    silence = matrix.no_progress or (None if trainer == "command" else Limits().no_progress_seconds)
    same = {name: getattr(matrix, name) for name, each in SETTINGS.items() if each.text and each.axis is None}
    own_code = {
        "trainer": trainer,
        "label": label,
        "command": own.command,
        "options": chosen,
        "limits": Limits(matrix.timeout, silence, matrix.memory),
        "processes": processes,
        "layout": None if trainer == "command" else layout,  # a command starts its own processes
        "privacy": matrix.privacy.as_spec(trainer, settings["batch_size"], chosen) if matrix.privacy else {},
    }
    return TrialSpec(**{**same, **settings, **own_code})
