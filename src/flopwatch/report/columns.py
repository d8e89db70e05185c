"""Which trials may be compared, and how their trainers are called. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from flopwatch.report.records import Privacy
from flopwatch.trial_records import TrialSpec

_PRIVACY: Mapping[str, Privacy] = {
    "standard": "not private",
    "dpsgd": "private",
    "ghost": "private",
    "fast": "private",
}
_ORDER = tuple(_PRIVACY)
_MICRO_BATCH = "micro-batch"
# Labels that say no more than the trainer's short name, which fits a narrow column.
_LONG_NAMES = frozenset(("StandardTrainer", "DPSGDTrainer", "DPGhostClippingTrainer", "DPFastGradientClippingTrainer"))


def privacy_of(spec: TrialSpec) -> Privacy:
    return _PRIVACY.get(spec.trainer, "unknown")


def trainer_name(spec: TrialSpec) -> str:
    """As it stands in tables.

    >>> trainer_name(TrialSpec("ghost", "tiny", 4, 512, label="DPGhostClippingTrainer"))
    'ghost'
    >>> trainer_name(TrialSpec("my.trainers:Lion", "tiny", 4, 512))
    'my.trainers:Lion'
    """
    is_long = spec.trainer in _PRIVACY and spec.label in _LONG_NAMES
    return spec.trainer if is_long or not spec.label else spec.label


def group_settings(spec: TrialSpec) -> dict[str, Any]:
    """What trials must have in common to be compared."""
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
    """Trials that differ in nothing but their batch size."""
    return (*group_key(spec), trainer_name(spec), spec.seq_len, *sorted(_variant_settings(spec).items()))


def column_names(specs: Mapping[str, TrialSpec]) -> dict[str, str]:
    """Trial to column: the trainer, and what else differs between its trials, such as an option or the seed."""
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
    """(column, trainer) in the order columns stand: `standard` first, users' own last."""
    rank = {trainer: place for place, trainer in enumerate(_ORDER)}
    found = {column: (rank.get(trainer, len(rank)), column) for column, trainer in names}
    return tuple(sorted(found, key=lambda column: found[column]))


def group_title(settings: Mapping[str, Any], varying: Iterable[str]) -> str:
    """In words; what is the same for all groups and says nothing is left out.

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
    # Micro-batches are told even where all trials have them: memory and time are not those of the batch at once.
    return [name for name in names if name == _MICRO_BATCH or len({settings.get(name) for settings in members}) > 1]
