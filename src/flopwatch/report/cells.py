"""Decide which trials of a sweep can be compared, name their columns in tables, and collect their measurements."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from flopwatch.records.repeats import has_interval
from flopwatch.records.trial import LABELS, Measured, StepCost, TrialResult, TrialSpec, is_private
from flopwatch.report.records import Cell, PrivacyClass, TrialRow

_MICRO_BATCH = "micro-batch"
_PRIVACY_CLASSES: Mapping[bool | None, PrivacyClass] = {True: "private", False: "not private", None: "unknown"}


def privacy_of(spec: TrialSpec, *results: TrialResult | None) -> PrivacyClass:
    """Return whether the trainer is differentially private: `unknown` for a trainer of the user that does not say so.

    A trainer of the user is private if it declared that in one of its `results`.
    """
    known = is_private(spec.trainer)
    if known is None and any(result and result.measured.declared_privacy for result in results):
        known = True
    return _PRIVACY_CLASSES[known]


def trainer_name(spec: TrialSpec) -> str:
    """Return the trainer's name for tables. Built-in trainers have a short name there, because columns are narrow.

    >>> trainer_name(TrialSpec("ghost", "tiny", 4, 512, label="DPGhostClippingTrainer"))
    'ghost'
    >>> trainer_name(TrialSpec("my.trainers:Lion", "tiny", 4, 512))
    'my.trainers:Lion'
    """
    is_builtin = spec.trainer in LABELS and spec.label in LABELS.values()
    return spec.trainer if is_builtin or not spec.label else spec.label


_GROUP = ("model", "dtype", "checkpointing", "device", "gpus", "threads", "cpus", "memory_bytes", "nodes", "processes")
_RESOURCES = _GROUP[4:]


def group_settings(spec: TrialSpec) -> dict[str, Any]:
    """Return the settings that must be equal in two trials for a comparison to make sense."""
    return {name: getattr(spec.limits if name == "memory_bytes" else spec, name) for name in _GROUP}


def group_key(spec: TrialSpec) -> tuple[Any, ...]:
    return tuple(group_settings(spec).values())


def place_key(spec: TrialSpec) -> tuple[Any, ...]:
    """Return a key that is equal for two trials if they differ only in their batch size."""
    return (*group_key(spec), trainer_name(spec), spec.seq_len, *sorted(_variant_settings(spec).items()))


def column_names(specs: Mapping[str, TrialSpec]) -> dict[str, str]:
    """Return the column name of each trial: its trainer, and the options or seeds that vary for this trainer."""
    variants: dict[tuple[Any, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for name, spec in specs.items():
        variants[(*group_key(spec), trainer_name(spec))][name] = _variant_settings(spec)
    columns = {}
    for key, members in variants.items():
        names = dict.fromkeys(name for settings in members.values() for name in settings)
        # Always name the micro-batch size, because it changes memory and time even if it is the same in all trials.
        varying = [n for n in names if n == _MICRO_BATCH or len({found.get(n) for found in members.values()}) > 1]
        for name, settings in members.items():
            more = " ".join(f"{setting}={settings[setting]}" for setting in varying if setting in settings)
            columns[name] = f"{key[-1]} {more}".rstrip()
    return columns


def trainer_order(names: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Sort column names, given (column, trainer) pairs: built-in trainers first, trainers of the user last."""
    rank = {trainer: place for place, trainer in enumerate(LABELS)}
    found = {column: (rank.get(trainer, len(rank)), column) for column, trainer in names}
    return tuple(sorted(found, key=lambda column: found[column]))


def takes_setting(spec: TrialSpec, name: str) -> bool:
    """Whether the trial depends on a setting such as `model`. A shell command does only if its text contains it.

    >>> takes_setting(TrialSpec("command", "tiny", 4, 512, command="train.sh {batch_size}"), "model")
    False
    """
    return spec.command is None or f"{{{name}}}" in spec.command


def group_title(settings: Mapping[str, Any], varying: Iterable[str]) -> str:
    """Return the heading of a group. Resources such as `gpus` are named only if they vary between groups.

    A setting that is an empty text does not matter for the group and is left out.

    >>> group_title({"model": "small", "dtype": "bf16", "checkpointing": True, "device": "cuda"}, ["dtype"])
    'small, bf16, cuda, checkpointing'
    """
    parts = [str(settings[name]) for name in ("model", "dtype", "device") if settings.get(name) not in ("", "auto")]
    if settings["checkpointing"]:
        parts.append("checkpointing")
    elif "checkpointing" in varying:
        parts.append("no checkpointing")
    parts += [f"{name} {settings[name]}" for name in _RESOURCES if name in varying]
    return ", ".join(parts) or "shell command"


def _variant_settings(spec: TrialSpec) -> dict[str, str]:
    settings = {
        "seed": spec.seed,
        "steps": spec.steps,
        "warmup": spec.warmup_steps,
        "command": spec.command,
        _MICRO_BATCH: spec.micro_batch_size,
        "trainer": spec.trainer if spec.label else None,
        "layout": spec.layout,
    }
    known = {name: value for name, value in settings.items() if value is not None}
    return {str(name): str(value) for name, value in {**known, **spec.options}.items()}


MOST_FINITE = sys.float_info.max
"""The largest float. JSON may contain larger integers, which Python cannot convert to float."""


def make_cell(name: str, spec: TrialSpec, result: TrialResult | None, column: str) -> Cell:
    """Collect the measurements of a trial; none if it is not `ok`, because it may have ended before its memory peak."""
    outcome = str(result.outcome) if result else "missing"
    place = (name, column, privacy_of(spec, result), spec.batch_size, spec.seq_len, outcome)
    measured = result.measured if result else Measured()
    if result is None or outcome != "ok":
        return Cell(*place, device_bytes=measured.memory.device_bytes)
    steps, cost, memory = measured.steps, measured.cost or StepCost(), measured.memory
    interval = steps if has_interval(measured) else None
    host, start, is_on_cpu = memory.host_bytes, memory.baseline_bytes, memory.reserved_bytes is None
    # A peak of host memory says nothing about a trial that ran on an accelerator.
    knows_peak = not is_on_cpu or str(result.environment.get("device", "cpu")).startswith("cpu")
    return Cell(
        *place,
        seconds=positive(steps and steps.median),
        low_seconds=positive(interval and interval.low),
        high_seconds=positive(interval and interval.high),
        is_unstable=bool(steps and steps.unstable),
        peak_bytes=positive(memory.peak_bytes) if knows_peak else None,
        above_start_bytes=positive(host - start) if is_on_cpu and host and start is not None else None,
        device_bytes=positive(memory.device_bytes),
        alloc_retries=memory.alloc_retries,
        bytes_by_phase={name: value for name, value in memory.by_phase.items() if positive(value)},
        samples_per_s=positive(measured.samples_per_s),
        tokens_per_s=positive(measured.tokens_per_s),
        mfu=positive(cost.mfu),
        hfu=positive(cost.hfu),
        hardware_flops=positive(cost.hardware_flops),
        is_lower_bound=cost.is_lower_bound,
        why_no_epsilon=_why_no_epsilon(result),
    )


def _why_no_epsilon(result: TrialResult) -> str:
    """Why a private trial has no epsilon, or could have none if the sweep asked for it."""
    measured = result.measured
    declared, spent = measured.declared_privacy, measured.privacy
    if privacy_of(result.spec, result) != "private" or (spent and positive(spent.epsilon)):
        return ""
    if spent:
        why = spent.note
    elif result.spec.privacy:
        why = measured.not_measured.get("privacy", "it was not computed")
    elif declared and declared.noise_multiplier == 0:
        why = "epsilon is infinite, because the noise multiplier is 0"
    else:
        return declared.why_unknown() if declared else ""
    return why if why.startswith("epsilon is ") else f"epsilon is unknown: {why}"


def make_row(cell: Cell, spec: TrialSpec, group: int, result: TrialResult | None) -> TrialRow:
    of_cell = ("trainer", "outcome", "is_unstable", "tokens_per_s", "samples_per_s", "peak_bytes", "mfu", "hfu")
    return TrialRow(
        **{name: getattr(cell, name) for name in of_cell},
        **{name: getattr(spec, name) for name in ("checkpointing", "batch_size", "seq_len")},
        model=spec.model if takes_setting(spec, "model") else "",
        dtype=spec.dtype if takes_setting(spec, "dtype") else "",
        name=cell.trial,
        group=group,
        reason=result.reason if result else "planned, but has no result yet",
        total_seconds=positive(result.seconds) if result else None,
        step_seconds=cell.seconds,
        command=result.command if result else "",
        trace=result.measured.trace if result else None,
        epsilon=positive(result.measured.privacy.epsilon) if result and result.measured.privacy else None,
    )


def positive(value: Any) -> Any:
    """Return the value if it is a finite number above 0, as every valid measurement is; otherwise None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value <= MOST_FINITE else None
