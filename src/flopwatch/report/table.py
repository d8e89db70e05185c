"""Read a sweep as one flat table: one row per trial, with the same columns in every row."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload

from flopwatch.optional import require_package
from flopwatch.records.privacy import PrivacySpent
from flopwatch.records.trial import MemoryUse, StepCost, StepTimes, TrialResult, TrialSpec
from flopwatch.report.capture import Capture, capture_sweep
from flopwatch.report.cells import MOST_FINITE, make_cell, missing_cell
from flopwatch.report.records import Cell

Kind: TypeAlias = Literal["text", "integer", "number", "flag"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial from which a row is made. `steps`, `memory`, `cost` and `privacy` are empty unless the trial is `ok`."""

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
    """A column of the table.

    Attributes:
        name: Name of the column; it ends with the unit.
        kind: `text`, `integer`, `number` or `flag`.
        meaning: What the column contains, in words.
        read: Returns the value of a trial; None if it is unknown.
        may_be_infinite: True for epsilon, which is infinite without noise. In other columns infinity means unknown.
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


def _attempts(trial: Trial) -> int | None:
    if trial.result is None:
        return None
    return len(trial.result.earlier_attempts) + (trial.result.unix_time is not None)


def _measured(name: str) -> Callable[[Trial], Any]:
    return lambda trial: getattr(trial.result.measured, name) if trial.result else None


def _attention(trial: Trial) -> str | None:
    return trial.cost.attention if trial.cost.method else None


def _bound(trial: Trial) -> bool | None:
    return trial.cost.is_lower_bound if trial.cost.model_flops is not None else None


COLUMNS: tuple[Column, ...] = (
    Column("trial", "text", "name of the trial within its sweep", lambda trial: trial.name),
    Column("trainer", "text", "standard, dpsgd, ghost, fast, module:Class or command", _spec("trainer")),
    Column("label", "text", "name of the trainer in the names of trials", _spec("label")),
    Column("privacy", "text", "differential privacy: private, not private, unknown", _cell("privacy")),
    Column("model", "text", "model: preset, config file or module:function", _spec("model")),
    Column("batch_size", "integer", "samples per step", _spec("batch_size")),
    Column("seq_len", "integer", "positions per sample", _spec("seq_len")),
    Column("dtype", "text", "dtype in which matmuls compute", _spec("dtype")),
    Column("checkpointing", "flag", "whether gradient checkpointing is on", _spec("checkpointing")),
    Column("seed", "integer", "random seed of the weights and the batch", _spec("seed")),
    Column("micro_batch_size", "integer", "samples per forward pass (empty: whole batch)", _spec("micro_batch_size")),
    Column("batch", "text", "function that makes the batch", _spec("batch")),
    Column("nodes", "integer", "number of machines of the trial", _spec("nodes")),
    Column("processes", "integer", "worker processes on each node", _spec("processes")),
    Column("layout", "text", "how processes share the training, such as ddp or fsdp", _spec("layout")),
    Column("device_asked", "text", "device requested in the matrix; auto: the best available", _spec("device")),
    Column("threads", "integer", "requested CPU threads", _spec("threads")),
    Column("gpus", "number", "requested accelerators on each node", _spec("gpus")),
    Column("cpus", "integer", "CPU cores requested from the engine", _spec("cpus")),
    Column("steps", "integer", "requested number of measured steps", _spec("steps")),
    Column("warmup_steps", "integer", "steps before the measured ones", _spec("warmup_steps")),
    Column("memory_limit_bytes", "integer", "limit of the host memory", lambda trial: trial.spec.limits.memory_bytes),
    Column("outcome", "text", "how the trial ended; missing means no result yet", _cell("outcome")),
    Column("reason", "text", "why the trial ended, in one line", _result("reason")),
    Column("phase", "text", "phase in which the trial ended", _result("phase")),
    Column("not_measured", "text", "what could not be measured after the steps of an ok trial, and why", _not_measured),
    Column("attempts", "integer", "how often the trial was started; 0 if it was not run", _attempts),
    Column("start_unix_seconds", "number", "start of the last attempt", _result("unix_time")),
    Column("total_seconds", "number", "time from start to end of the worker process", _result("seconds")),
    Column("parameters", "integer", "number of parameters of the model", _measured("parameters")),
    Column("steps_measured", "integer", "number of timed steps", _part("steps", "count")),
    Column("step_seconds_median", "number", "median step time", _cell("seconds")),
    Column("step_seconds_low", "number", "lower end of the 95 % interval; empty below 6 steps", _cell("low_seconds")),
    Column("step_seconds_high", "number", "upper end of the 95 % interval of the median", _cell("high_seconds")),
    Column("step_seconds_p10", "number", "10th percentile of the step time", _part("steps", "p10")),
    Column("step_seconds_p90", "number", "90th percentile of the step time", _part("steps", "p90")),
    Column("step_seconds_p99", "number", "99th percentile of the step time", _part("steps", "p99")),
    Column("step_seconds_first", "number", "time of the first step, with compilation", _part("steps", "first")),
    Column("unstable", "flag", "whether the 95 % interval is wider than 5 % of the median", _part("steps", "unstable")),
    Column("forward_seconds", "number", "median time of the forward pass", _phase_seconds("forward")),
    Column("backward_seconds", "number", "median time of the backward pass", _phase_seconds("backward")),
    Column("optimizer_seconds", "number", "median time of the optimizer step", _phase_seconds("optimizer")),
    Column("samples_per_s", "number", "batch size divided by the median step time", _cell("samples_per_s")),
    Column("tokens_per_s", "number", "positions divided by the median step time", _cell("tokens_per_s")),
    Column("peak_bytes", "integer", "peak of the memory that decides whether the trial fits", _cell("peak_bytes")),
    Column("device_bytes", "integer", "memory size of the accelerator", _cell("device_bytes")),
    Column("allocated_bytes", "integer", "peak held by tensors on the accelerator", _part("memory", "allocated_bytes")),
    Column("reserved_bytes", "integer", "peak held by the accelerator's allocator", _part("memory", "reserved_bytes")),
    Column("alloc_retries", "integer", "above 0, the trial barely fits into memory", _part("memory", "alloc_retries")),
    Column("host_bytes", "integer", "peak host memory of all processes", _part("memory", "host_bytes")),
    Column(
        "host_method",
        "text",
        "high_water, samples, or rss (counts shared pages per process)",
        _part("memory", "host_method"),
    ),
    Column("baseline_bytes", "integer", "host memory before the model was built", _part("memory", "baseline_bytes")),
    Column("build_peak_bytes", "integer", "peak while the model is built", _phase_bytes("build")),
    Column("forward_peak_bytes", "integer", "peak of the forward pass", _phase_bytes("forward")),
    Column("backward_peak_bytes", "integer", "peak of the backward pass", _phase_bytes("backward")),
    Column("optimizer_peak_bytes", "integer", "peak of the optimizer step", _phase_bytes("optimizer")),
    Column("model_flops", "integer", "FLOPs of a standard training step", _part("cost", "model_flops")),
    Column("hardware_flops", "integer", "FLOPs that this trainer executes per step", _part("cost", "hardware_flops")),
    Column("flops_method", "text", "how FLOPs were counted", _part("cost", "method")),
    Column("flops_attention", "text", "how attention is counted: full or causal", _attention),
    Column("flops_lower_bound", "flag", "whether FLOPs are a lower bound, because some ops have no formula", _bound),
    Column("device_peak_flops_per_s", "number", "peak FLOP/s of which MFU and HFU are shares", _peak("flops_per_s")),
    Column("device_peak_kind", "text", "where the peak comes from", _peak("kind")),
    Column("mfu", "number", "model FLOP/s divided by the peak", _cell("mfu")),
    Column("hfu", "number", "hardware FLOP/s divided by the peak", _cell("hfu")),
    Column("epsilon", "number", "privacy spent; if empty, privacy_note says why", _part("privacy", "epsilon"), True),
    Column("delta", "number", "delta for which epsilon holds", _part("privacy", "delta")),
    Column("noise_multiplier", "number", "noise for which epsilon holds", _part("privacy", "noise_multiplier")),
    Column("sample_rate", "number", "probability that a sample is in a batch", _part("privacy", "sample_rate")),
    Column("privacy_steps", "integer", "steps of the training for which epsilon holds", _part("privacy", "steps")),
    Column("accountant", "text", "privacy accountant: rdp, prv or gdp", _part("privacy", "accountant")),
    Column("privacy_note", "text", "what a reader of epsilon must know", _part("privacy", "note")),
    Column("host", "text", "machine on which the trial ran", _environment("host")),
    Column("device", "text", "device on which the trial ran, such as cuda:0", _environment("device")),
    Column("device_name", "text", "name of the accelerator", _environment("device_name")),
    Column("cpu", "text", "name of the CPU", _environment("cpu")),
    Column("torch", "text", "version of torch", _environment("torch")),
    Column("cuda", "text", "version of CUDA", _environment("cuda")),
    Column("opacus", "text", "version of Opacus", _environment("opacus")),
    Column("python", "text", "version of Python", _environment("python")),
    Column("flopwatch", "text", "version of flopwatch", _environment("flopwatch")),
    Column("git", "text", "git commit of the code; + means with local changes", _environment("git")),
    Column("trace", "text", "path of the Kineto trace within the sweep's folder", _measured("trace")),
    Column("key", "text", "hash of the configuration and the environment", _result("key")),
    Column("shell_command", "text", "shell command that a command trainer runs", _spec("command")),
    Column("command", "text", "shell command that runs this trial again", _result("command")),
)
"""The columns of every table. Columns `options.NAME` and then `extra.NAME` follow, each sorted by name."""


_PANDAS_TYPES: Mapping[Kind, str] = {"text": "object", "integer": "Int64", "number": "float64", "flag": "boolean"}
MOST_INTEGER = 2**63 - 1
"""An integer column with a larger value becomes a column of floats. FLOPs of the largest models can be larger."""


@dataclass(frozen=True, slots=True, eq=False)
class Table(Sequence[dict[str, Any]]):
    """The rows of a sweep as a sequence of dicts, so that `pandas.DataFrame(table)` works.

    Attributes:
        rows: One dict per trial, in the order of the plan, with all columns; unknown values are None.
        kinds: The kind of each column: `text`, `integer`, `number` or `flag`.
        troubles: One sentence for each damaged part of the folder; the rows do not contain that part.
    """

    rows: tuple[dict[str, Any], ...]
    kinds: Mapping[str, Kind] = field(repr=False)
    troubles: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns in order. `flopwatch.report.COLUMNS` explains them."""
        return tuple(self.kinds)

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with typed columns. Integers and flags have nullable types for unknown values.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        pandas = require_package("pandas", "to_pandas()", "; without it, iterate over the table")
        frame = pandas.DataFrame(list(self.rows), columns=list(self.columns), dtype=object)
        return frame.astype({name: _PANDAS_TYPES[kind] for name, kind in self.kinds.items()})

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        return self.rows[place]


def load(folder: str | PathLike[str]) -> Table:
    """Read a sweep's folder into a table with one row per trial; needs neither torch nor pandas.

    ```python
    from flopwatch import report

    table = report.load("flopwatch-sweep")
    fastest = max(table, key=lambda row: row["tokens_per_s"] or 0)
    frame = table.to_pandas()
    ```

    Only `ok` trials have measured values. Unknown values, NaN and infinity are None.

    Args:
        folder: The folder that `flopwatch sweep` wrote.

    Raises:
        InputError: The folder is not the folder of a sweep.
    """
    return make_table(capture_sweep(Path(folder).expanduser()))


def make_table(capture: Capture) -> Table:
    """Make the table of a sweep. Trials without a result have the outcome `missing`."""
    trials = [_ended(result) for result in capture.results.values()]
    trials += [_missing(name, spec) for name, spec in capture.missing.items()]
    return replace(_table(trials), troubles=capture.troubles)


def result_row(result: TrialResult) -> dict[str, Any]:
    return _table([_ended(result)]).rows[0]


def _ended(result: TrialResult) -> Trial:
    cell, measured = make_cell(result, result.spec.trainer), result.measured
    if cell.outcome != "ok":
        return Trial(result.name, result.spec, cell, result, None, MemoryUse(), StepCost(), None)
    cost = measured.cost or StepCost()
    return Trial(result.name, result.spec, cell, result, measured.steps, measured.memory, cost, measured.privacy)


def _missing(name: str, spec: TrialSpec) -> Trial:
    return Trial(name, spec, missing_cell(name, spec, spec.trainer), None, None, MemoryUse(), StepCost(), None)


def _table(trials: Sequence[Trial]) -> Table:
    fixed = [[_column_value(column, trial) for column in COLUMNS] for trial in trials]
    options = [_named("options", trial.spec.options) for trial in trials]
    extras = [_named("extra", trial.result.measured.extra if trial.result else {}) for trial in trials]
    names = [column.name for column in COLUMNS]
    kinds: dict[str, Kind] = {column.name: column.kind for column in COLUMNS}
    for more in (options, extras):
        for name in sorted({name for row in more for name in row}):
            kinds[name] = _kind_of(row.get(name) for row in more)
    added = [name for name in kinds if name not in set(names)]
    rows = [
        dict(zip(names, values, strict=True)) | {name: {**option, **extra}.get(name) for name in added}
        for values, option, extra in zip(fixed, options, extras, strict=True)
    ]
    for name, kind in kinds.items():
        if kind == "integer" and any(abs(row[name] or 0) > MOST_INTEGER for row in rows):
            kinds[name] = "number"
    return Table(tuple(rows), kinds)


def _column_value(column: Column, trial: Trial) -> Any:
    value = column.read(trial)
    return inf if column.may_be_infinite and value == inf else _value(value, column.kind)


def _named(prefix: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        return {}
    return {f"{prefix}.{whole_text(str(name))}": _plain_value(value) for name, value in values.items()}


def _plain_value(value: Any) -> Any:
    """Convert a value for a table cell: numbers, flags and text stay, everything else becomes JSON text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _value(value, "number")
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return whole_text(text)


def _kind_of(values: Iterable[Any]) -> Kind:
    types = {type(value) for value in values if value is not None}
    if types == {bool}:
        return "flag"
    if types == {int}:
        return "integer"
    return "number" if types and types <= {int, float} else "text"


def _value(value: Any, kind: Kind) -> Any:
    """Return the value if it suits the kind of the column, or else None. A damaged file may contain anything."""
    if value is None or (kind == "flag" and not isinstance(value, bool)):
        return None
    if kind == "flag":
        return value
    if kind == "text":
        text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        return whole_text(text) or None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_FINITE:
        return None
    if kind == "integer":
        return int(value) if value == int(value) else None
    return value


def whole_text(text: str) -> str:
    r"""Escape lone surrogates in text, because UTF-8 cannot encode them.

    >>> whole_text("half \ud83d")
    'half \\ud83d'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
