"""Trials as cells: which trials may be compared, the column each belongs to, and the numbers it contributes. Pure."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from flopwatch.records.trial import LABELS, MemoryUse, StepCost, TrialResult, TrialSpec, is_private
from flopwatch.report.records import Cell, Privacy, TrialRow

_MICRO_BATCH = "micro-batch"


_PRIVACY_CLASSES: Mapping[bool | None, Privacy] = {True: "private", False: "not private", None: "unknown"}


def privacy_of(spec: TrialSpec) -> Privacy:
    """The class within which the trainer is compared; unknown for a user's own."""
    return _PRIVACY_CLASSES[is_private(spec.trainer)]


def trainer_name(spec: TrialSpec) -> str:
    """The trainer's name in tables: the short one for built-in trainers, because columns are narrow.

    >>> trainer_name(TrialSpec("ghost", "tiny", 4, 512, label="DPGhostClippingTrainer"))
    'ghost'
    >>> trainer_name(TrialSpec("my.trainers:Lion", "tiny", 4, 512))
    'my.trainers:Lion'
    """
    is_builtin = spec.trainer in LABELS and spec.label in LABELS.values()
    return spec.trainer if is_builtin or not spec.label else spec.label


def group_settings(spec: TrialSpec) -> dict[str, Any]:
    """The settings that trials must share to be compared."""
    return {
        "model": spec.model,
        "dtype": spec.dtype,
        "checkpointing": spec.checkpointing,
        "device": spec.device,
        "gpus": spec.gpus,
        "threads": spec.threads,
        "cpus": spec.cpus,
        "memory_bytes": spec.limits.memory_bytes,
        "nodes": spec.nodes,
        "processes": spec.processes,
    }


def group_key(spec: TrialSpec) -> tuple[Any, ...]:
    return tuple(group_settings(spec).values())


def place_key(spec: TrialSpec) -> tuple[Any, ...]:
    """The same for trials that differ only in their batch size."""
    return (*group_key(spec), trainer_name(spec), spec.seq_len, *sorted(_variant_settings(spec).items()))


def column_names(specs: Mapping[str, TrialSpec]) -> dict[str, str]:
    """The column of each trial: its trainer, and the options or seeds in which trials of this trainer differ."""
    variants: dict[tuple[Any, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for name, spec in specs.items():
        variants[(*group_key(spec), trainer_name(spec))][name] = _variant_settings(spec)
    columns = {}
    for key, members in variants.items():
        varying = _varying(members.values())
        for name, settings in members.items():
            more = " ".join(f"{setting}={settings[setting]}" for setting in varying if setting in settings)
            columns[name] = f"{key[-1]} {more}".rstrip()
    return columns


def trainer_order(names: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Columns in order, given (column, trainer) pairs: built-in trainers first, users' own last."""
    rank = {trainer: place for place, trainer in enumerate(LABELS)}
    found = {column: (rank.get(trainer, len(rank)), column) for column, trainer in names}
    return tuple(sorted(found, key=lambda column: found[column]))


def group_title(settings: Mapping[str, Any], varying: Iterable[str]) -> str:
    """The heading of a group. Resources are named only if they differ between groups.

    >>> group_title({"model": "small", "dtype": "bf16", "checkpointing": True, "device": "cuda"}, ["dtype"])
    'small, bf16, cuda, checkpointing'
    """
    parts = [str(settings[name]) for name in ("model", "dtype", "device") if settings.get(name) not in ("", "auto")]
    if settings["checkpointing"]:
        parts.append("checkpointing")
    elif "checkpointing" in varying:
        parts.append("no checkpointing")
    resources = ("gpus", "threads", "cpus", "memory_bytes", "nodes", "processes")
    parts += [f"{name} {settings[name]}" for name in resources if name in varying]
    return ", ".join(parts)


def _variant_settings(spec: TrialSpec) -> dict[str, str]:
    settings = {"seed": str(spec.seed), "steps": str(spec.steps), "warmup": str(spec.warmup_steps)}
    if spec.command is not None:
        settings["command"] = spec.command
    if spec.micro_batch_size is not None:
        settings[_MICRO_BATCH] = str(spec.micro_batch_size)
    if spec.label:
        settings["trainer"] = spec.trainer
    if spec.layout is not None:
        settings["layout"] = spec.layout
    return settings | {str(name): str(value) for name, value in spec.options.items()}


def _varying(members: Iterable[Mapping[str, str]]) -> list[str]:
    members = list(members)
    names = dict.fromkeys(name for settings in members for name in settings)
    # Micro-batches are always named: memory and time are not those of a whole batch at once.
    return [name for name in names if name == _MICRO_BATCH or len({settings.get(name) for settings in members}) > 1]


FEWEST_STEPS = 6
"""With fewer measured steps a 95 % interval does not exist: even from the least to the most of 5 steps it is 94 %."""

MOST_FINITE = sys.float_info.max
"""JSON may hold larger integers, which Python cannot divide into a float."""


def make_cell(result: TrialResult, column: str) -> Cell:
    """The cell of a trial that has ended. Only `ok` trials have numbers: one cut short may not have met its peak."""
    spec, measured = result.spec, result.measured
    place = (result.name, column, privacy_of(spec), spec.batch_size, spec.seq_len, str(result.outcome))
    if result.outcome != "ok":
        return Cell(*place, device_bytes=measured.memory.device_bytes)
    steps, cost, memory = measured.steps, measured.cost or StepCost(), measured.memory
    interval = steps if steps and steps.count >= FEWEST_STEPS else None
    return Cell(
        *place,
        seconds=positive(steps and steps.median),
        low_seconds=positive(interval and interval.low),
        high_seconds=positive(interval and interval.high),
        is_unstable=bool(steps and steps.unstable),
        peak_bytes=positive(memory.peak_bytes) if _knows_peak(result) else None,
        above_start_bytes=_above_start(memory),
        device_bytes=positive(memory.device_bytes),
        alloc_retries=memory.alloc_retries,
        bytes_by_phase={name: value for name, value in memory.by_phase.items() if positive(value)},
        samples_per_s=positive(measured.samples_per_s),
        tokens_per_s=positive(measured.tokens_per_s),
        mfu=positive(cost.mfu),
        hfu=positive(cost.hfu),
        hardware_flops=positive(cost.hardware_flops),
        is_lower_bound=cost.is_lower_bound,
    )


def missing_cell(name: str, spec: TrialSpec, column: str) -> Cell:
    return Cell(name, column, privacy_of(spec), spec.batch_size, spec.seq_len, "missing")


def make_row(cell: Cell, spec: TrialSpec, group: int, result: TrialResult | None) -> TrialRow:
    return TrialRow(
        name=cell.trial,
        group=group,
        trainer=cell.trainer,
        model=spec.model,
        dtype=spec.dtype,
        checkpointing=spec.checkpointing,
        batch_size=spec.batch_size,
        seq_len=spec.seq_len,
        outcome=cell.outcome,
        reason=result.reason if result else "planned, but has no result yet",
        total_seconds=positive(result.seconds) if result else None,
        step_seconds=cell.seconds,
        is_unstable=cell.is_unstable,
        tokens_per_s=cell.tokens_per_s,
        samples_per_s=cell.samples_per_s,
        peak_bytes=cell.peak_bytes,
        mfu=cell.mfu,
        hfu=cell.hfu,
        command=result.command if result else "",
        trace=result.measured.trace if result else None,
        epsilon=positive(result.measured.privacy.epsilon) if result and result.measured.privacy else None,
    )


def positive(value: Any) -> Any:
    """The value if it is a finite number above 0, as every measurement is, else None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value <= MOST_FINITE else None


def _knows_peak(result: TrialResult) -> bool:
    """Whether the peak is that of the device the trial ran on: host memory does not limit a trial on an accelerator."""
    on_cpu = str(result.environment.get("device", "cpu")).startswith("cpu")
    return on_cpu or result.measured.memory.reserved_bytes is not None


def _above_start(memory: MemoryUse) -> int | None:
    host = memory.host_peak_bytes
    if memory.reserved_bytes is not None or host is None or memory.baseline_bytes is None:
        return None
    above: int | None = positive(host - memory.baseline_bytes)
    return above
