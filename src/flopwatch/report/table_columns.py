"""The columns of the flat table of trials: name, kind, unit and meaning, in the order they stand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from flopwatch.report.columns import privacy_of
from flopwatch.report.records import Cell
from flopwatch.trial_records import MemoryUse, PrivacySpent, StepCost, StepTimes, TrialResult, TrialSpec

Kind: TypeAlias = Literal["text", "integer", "number", "flag"]


@dataclass(frozen=True, slots=True)
class Trial:
    """What a row is made of. `steps`, `memory`, `cost` and `privacy` are empty unless the trial is `ok`."""

    name: str
    spec: TrialSpec
    cell: Cell
    result: TrialResult | None
    steps: StepTimes | None
    memory: MemoryUse
    cost: StepCost
    privacy: PrivacySpent | None


@dataclass(frozen=True, slots=True)
class Column:
    """Attributes:
    name: With its unit.
    kind: `text`, `integer`, `number` or `flag`.
    meaning: In words.
    read: The value of a trial; None where it is not known.
    may_be_infinite: Epsilon without noise is; other infinite numbers are none.
    """

    name: str
    kind: Kind
    meaning: str
    read: Callable[[Trial], Any]
    may_be_infinite: bool = False


def _spec(name: str) -> Callable[[Trial], Any]:
    return lambda trial: getattr(trial.spec, name)


def _cell(name: str) -> Callable[[Trial], Any]:
    return lambda trial: getattr(trial.cell, name)


def _result(name: str) -> Callable[[Trial], Any]:
    return lambda trial: getattr(trial.result, name, None)


def _part(part: str, name: str) -> Callable[[Trial], Any]:
    """Of `steps`, `memory`, `cost` or `privacy`, which may be None."""
    return lambda trial: getattr(getattr(trial, part), name, None)


def _environment(name: str) -> Callable[[Trial], Any]:
    return lambda trial: trial.result.environment.get(name) if trial.result else None


def _peak(name: str) -> Callable[[Trial], Any]:
    return lambda trial: trial.cost.peak.get(name) if isinstance(trial.cost.peak, Mapping) else None


def _phase_seconds(name: str) -> Callable[[Trial], Any]:
    return lambda trial: trial.result.measured.phase_seconds.get(name) if _is_ok(trial) and trial.result else None


def _phase_bytes(name: str) -> Callable[[Trial], Any]:
    return lambda trial: trial.memory.by_phase.get(name)


def _is_ok(trial: Trial) -> bool:
    return trial.cell.outcome == "ok"


def _not_measured(trial: Trial) -> str | None:
    if trial.result is None or not _is_ok(trial):
        return None
    return "; ".join(f"{phase}: {why}" for phase, why in trial.result.measured.not_measured.items())


def _host_method(trial: Trial) -> str | None:
    """Sweeps that have resident memory only are from before the others."""
    memory = trial.memory
    return memory.host_method or ("rss" if memory.host_bytes is None and memory.rss_bytes is not None else None)


def _attempts(trial: Trial) -> int | None:
    if trial.result is None:
        return None
    return len(trial.result.earlier_attempts) + (trial.result.unix_time is not None)


def _parameters(trial: Trial) -> Any:
    return trial.result.measured.parameters if trial.result else None


def _bound(trial: Trial) -> bool | None:
    return trial.cost.is_lower_bound if trial.cost.model_flops is not None else None


def _trace(trial: Trial) -> Any:
    return trial.result.measured.trace if trial.result else None


COLUMNS: tuple[Column, ...] = (
    Column("trial", "text", "name within its sweep", lambda trial: trial.name),
    Column("trainer", "text", "standard, dpsgd, ghost, fast, module:Class or command", _spec("trainer")),
    Column("label", "text", "how the trainer is called in names", _spec("label")),
    Column("privacy", "text", "private, not private, or unknown", lambda trial: privacy_of(trial.spec)),
    Column("model", "text", "preset, config file or module:function", _spec("model")),
    Column("batch_size", "integer", "samples of a step", _spec("batch_size")),
    Column("seq_len", "integer", "positions of a sample", _spec("seq_len")),
    Column("dtype", "text", "what matmuls compute in", _spec("dtype")),
    Column("checkpointing", "flag", "with gradient checkpointing", _spec("checkpointing")),
    Column("seed", "integer", "of weights and batch", _spec("seed")),
    Column(
        "micro_batch_size", "integer", "samples in memory at once; empty: the whole batch", _spec("micro_batch_size")
    ),
    Column("batch", "text", "function that makes the batch", _spec("batch")),
    Column("nodes", "integer", "machines of the trial", _spec("nodes")),
    Column("processes", "integer", "worker processes on each node", _spec("processes")),
    Column("layout", "text", "how processes share the training", _spec("layout")),
    Column("device_asked", "text", "as in the matrix; auto is what was there", _spec("device")),
    Column("threads", "integer", "CPU threads asked for", _spec("threads")),
    Column("gpus", "number", "accelerators asked for on each node", _spec("gpus")),
    Column("cpus", "integer", "cores asked of the engine", _spec("cpus")),
    Column("steps", "integer", "measured steps asked for", _spec("steps")),
    Column("warmup_steps", "integer", "steps before them", _spec("warmup_steps")),
    Column("memory_limit_bytes", "integer", "host memory allowed", lambda trial: trial.spec.limits.memory_bytes),
    Column("outcome", "text", "how it ended; missing: no result yet", _cell("outcome")),
    Column("reason", "text", "one line for a person", _result("reason")),
    Column("phase", "text", "where it was at its end", _result("phase")),
    Column("not_measured", "text", "what of an ok trial could not be measured after its steps, and why", _not_measured),
    Column("attempts", "integer", "how often it was started; 0 when it was not run", _attempts),
    Column("start_unix_seconds", "number", "when the last attempt began", _result("unix_time")),
    Column("total_seconds", "number", "from start to end of its worker", _result("seconds")),
    Column("parameters", "integer", "of the model", _parameters),
    Column("steps_measured", "integer", "steps that were timed", _part("steps", "count")),
    Column("step_seconds_median", "number", "of a step", _cell("seconds")),
    Column("step_seconds_low", "number", "95 % interval of the median; empty below 6 steps", _cell("low_seconds")),
    Column("step_seconds_high", "number", "its upper end", _cell("high_seconds")),
    Column("step_seconds_p10", "number", "tenth percentile", _part("steps", "p10")),
    Column("step_seconds_p90", "number", "ninetieth percentile", _part("steps", "p90")),
    Column("step_seconds_p99", "number", "99th percentile", _part("steps", "p99")),
    Column("step_seconds_first", "number", "the first step of all, with compilation", _part("steps", "first")),
    Column("unstable", "flag", "the interval is wider than 5 % of the median", _part("steps", "unstable")),
    Column("forward_seconds", "number", "median of the forward pass", _phase_seconds("forward")),
    Column("backward_seconds", "number", "median of the backward pass", _phase_seconds("backward")),
    Column("optimizer_seconds", "number", "median of the update", _phase_seconds("optimizer")),
    Column("samples_per_s", "number", "batch size over the median", _cell("samples_per_s")),
    Column("tokens_per_s", "number", "positions over the median", _cell("tokens_per_s")),
    Column("peak_bytes", "integer", "the memory that decides whether it fits", _cell("peak_bytes")),
    Column("device_bytes", "integer", "memory the accelerator has", _cell("device_bytes")),
    Column("allocated_bytes", "integer", "most held by tensors on the accelerator", _part("memory", "allocated_bytes")),
    Column("reserved_bytes", "integer", "most held by its allocator", _part("memory", "reserved_bytes")),
    Column("alloc_retries", "integer", "above 0 it barely fits", _part("memory", "alloc_retries")),
    Column("host_bytes", "integer", "most host memory of its process tree", _part("memory", "host_peak_bytes")),
    Column("host_method", "text", "high_water, samples, or rss: shared pages count for each process", _host_method),
    Column("baseline_bytes", "integer", "host memory before the model was built", _part("memory", "baseline_bytes")),
    Column("build_peak_bytes", "integer", "peak while the model is built", _phase_bytes("build")),
    Column("forward_peak_bytes", "integer", "peak of the forward pass", _phase_bytes("forward")),
    Column("backward_peak_bytes", "integer", "peak of the backward pass", _phase_bytes("backward")),
    Column("optimizer_peak_bytes", "integer", "peak of the update", _phase_bytes("optimizer")),
    Column("model_flops", "integer", "of the standard step", _part("cost", "model_flops")),
    Column("hardware_flops", "integer", "of the step this trainer executes", _part("cost", "hardware_flops")),
    Column("flops_method", "text", "how they were found", _part("cost", "method")),
    Column(
        "flops_attention", "text", "full or causal", lambda trial: trial.cost.attention if trial.cost.method else None
    ),
    Column("flops_lower_bound", "flag", "some ops had no formula", _bound),
    Column("device_peak_flops_per_s", "number", "what MFU and HFU are shares of", _peak("flops_per_s")),
    Column("device_peak_kind", "text", "where that figure is from", _peak("kind")),
    Column("mfu", "number", "model FLOPs over the peak, as a fraction", _cell("mfu")),
    Column("hfu", "number", "hardware FLOPs over the peak, as a fraction", _cell("hfu")),
    Column(
        "epsilon", "number", "privacy spent; where none holds, privacy_note says why", _part("privacy", "epsilon"), True
    ),
    Column("delta", "number", "for which", _part("privacy", "delta")),
    Column("noise_multiplier", "number", "epsilon is for it", _part("privacy", "noise_multiplier")),
    Column("sample_rate", "number", "chance of a sample to be in a batch", _part("privacy", "sample_rate")),
    Column("privacy_steps", "integer", "steps of the training, not of the trial", _part("privacy", "steps")),
    Column("accountant", "text", "rdp, prv or gdp", _part("privacy", "accountant")),
    Column("privacy_note", "text", "what a reader of epsilon must know", _part("privacy", "note")),
    Column("host", "text", "machine it ran on", _environment("host")),
    Column("device", "text", "such as cuda:0", _environment("device")),
    Column("device_name", "text", "of the accelerator", _environment("device_name")),
    Column("cpu", "text", "of the host", _environment("cpu")),
    Column("torch", "text", "version", _environment("torch")),
    Column("cuda", "text", "version", _environment("cuda")),
    Column("opacus", "text", "version", _environment("opacus")),
    Column("python", "text", "version", _environment("python")),
    Column("flopwatch", "text", "version", _environment("flopwatch")),
    Column("git", "text", "commit it ran in; + with changes", _environment("git")),
    Column("trace", "text", "its Kineto trace, within the sweep's folder", _trace),
    Column("key", "text", "hash of its configuration and of what it ran on", _result("key")),
    Column("shell_command", "text", "what a command trainer runs", _spec("command")),
    Column("command", "text", "runs just this trial again", _result("command")),
)
"""Then follow `options.NAME` and `extra.NAME`, each sorted by name."""
