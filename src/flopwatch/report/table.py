"""A sweep as one flat table with a row per trial, also as CSV, Parquet or runs of a tracking service such as MLflow."""

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, overload

from flopwatch.optional import require_package
from flopwatch.records.trial import FAILED, Measured, TrialResult, TrialSpec
from flopwatch.report.capture import Capture, capture_sweep
from flopwatch.report.cells import MOST_FINITE, make_cell
from flopwatch.report.records import Cell
from flopwatch.sinks.protocol import TrialRun
from flopwatch.text import one_line, plain

Kind: TypeAlias = Literal["text", "integer", "number", "flag"]


class Trial(NamedTuple):
    """A trial from which a row is made; `ok` are its measurements if it ran to its end."""

    spec: TrialSpec
    cell: Cell
    result: TrialResult | None = None
    ok: Measured | None = None


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


def _at(path: str, key: str | None = None) -> Callable[[Trial], Any]:
    """Read what a trial has at a path such as `ok.cost.mfu`; None if something on the way is unknown."""
    find = attrgetter(path)

    def read(trial: Trial) -> Any:
        try:
            return find(trial) if key is None else find(trial).get(key)
        except AttributeError:
            return None

    return read


def _not_measured(trial: Trial) -> str | None:
    return "; ".join(f"{phase}: {why}" for phase, why in trial.ok.not_measured.items()) if trial.ok else None


def _attempts(trial: Trial) -> int | None:
    result = trial.result
    return len(result.earlier_attempts) + (result.unix_time is not None) if result else None


def _attention(trial: Trial) -> str | None:
    return trial.ok.cost.attention if trial.ok and trial.ok.cost and trial.ok.cost.method else None


def _bound(trial: Trial) -> bool | None:
    cost = trial.ok and trial.ok.cost
    return cost.is_lower_bound if cost and cost.model_flops is not None else None


COLUMNS: tuple[Column, ...] = (
    Column("trial", "text", "name of the trial within its sweep", _at("cell.trial")),
    Column("trainer", "text", "standard, dpsgd, ghost, fast, module:Class or command", _at("spec.trainer")),
    Column("label", "text", "name of the trainer in the names of trials", _at("spec.label")),
    Column("privacy", "text", "differential privacy: private, not private, unknown", _at("cell.privacy")),
    Column("model", "text", "model: preset, config file or module:function", _at("spec.model")),
    Column("batch_size", "integer", "samples per step", _at("spec.batch_size")),
    Column("seq_len", "integer", "positions per sample", _at("spec.seq_len")),
    Column("dtype", "text", "dtype in which matmuls compute", _at("spec.dtype")),
    Column("checkpointing", "flag", "whether gradient checkpointing is on", _at("spec.checkpointing")),
    Column("seed", "integer", "random seed of the weights and the batch", _at("spec.seed")),
    Column(
        "micro_batch_size", "integer", "samples per forward pass (empty: whole batch)", _at("spec.micro_batch_size")
    ),
    Column("batch", "text", "function that makes the batch", _at("spec.batch")),
    Column("nodes", "integer", "number of machines of the trial", _at("spec.nodes")),
    Column("processes", "integer", "worker processes on each node", _at("spec.processes")),
    Column("layout", "text", "how processes share the training, such as ddp or fsdp", _at("spec.layout")),
    Column("device_asked", "text", "device requested in the matrix; auto: the best available", _at("spec.device")),
    Column("threads", "integer", "requested CPU threads", _at("spec.threads")),
    Column("gpus", "number", "requested accelerators on each node", _at("spec.gpus")),
    Column("cpus", "integer", "CPU cores requested from the engine", _at("spec.cpus")),
    Column("steps", "integer", "requested number of measured steps", _at("spec.steps")),
    Column("warmup_steps", "integer", "steps before the measured ones", _at("spec.warmup_steps")),
    Column("memory_limit_bytes", "integer", "limit of the host memory", _at("spec.limits.memory_bytes")),
    Column("outcome", "text", "how the trial ended; missing means no result yet", _at("cell.outcome")),
    Column("reason", "text", "why the trial ended, in one line", _at("result.reason")),
    Column("phase", "text", "phase in which the trial ended", _at("result.phase")),
    Column("not_measured", "text", "what could not be measured after the steps of an ok trial, and why", _not_measured),
    Column("attempts", "integer", "how often the trial was started; 0 if it was not run", _attempts),
    Column("start_unix_seconds", "number", "start of the last attempt", _at("result.unix_time")),
    Column("total_seconds", "number", "time from start to end of the worker process", _at("result.seconds")),
    Column("parameters", "integer", "number of parameters of the model", _at("result.measured.parameters")),
    Column("steps_measured", "integer", "number of timed steps", _at("ok.steps.count")),
    Column("step_seconds_median", "number", "median step time", _at("cell.seconds")),
    Column(
        "step_seconds_low", "number", "lower end of the 95 % interval; empty below 6 steps", _at("cell.low_seconds")
    ),
    Column("step_seconds_high", "number", "upper end of the 95 % interval of the median", _at("cell.high_seconds")),
    Column("step_seconds_p10", "number", "10th percentile of the step time", _at("ok.steps.p10")),
    Column("step_seconds_p90", "number", "90th percentile of the step time", _at("ok.steps.p90")),
    Column("step_seconds_p99", "number", "99th percentile of the step time", _at("ok.steps.p99")),
    Column("step_seconds_first", "number", "time of the first step, with compilation", _at("ok.steps.first")),
    Column("unstable", "flag", "whether the 95 % interval is wider than 5 % of the median", _at("ok.steps.unstable")),
    Column("forward_seconds", "number", "median time of the forward pass", _at("ok.phase_seconds", "forward")),
    Column("backward_seconds", "number", "median time of the backward pass", _at("ok.phase_seconds", "backward")),
    Column("optimizer_seconds", "number", "median time of the optimizer step", _at("ok.phase_seconds", "optimizer")),
    Column("samples_per_s", "number", "batch size divided by the median step time", _at("cell.samples_per_s")),
    Column("tokens_per_s", "number", "positions divided by the median step time", _at("cell.tokens_per_s")),
    Column("peak_bytes", "integer", "peak of the memory that decides whether the trial fits", _at("cell.peak_bytes")),
    Column("device_bytes", "integer", "memory size of the accelerator", _at("cell.device_bytes")),
    Column("allocated_bytes", "integer", "peak held by tensors on the accelerator", _at("ok.memory.allocated_bytes")),
    Column("reserved_bytes", "integer", "peak held by the accelerator's allocator", _at("ok.memory.reserved_bytes")),
    Column("alloc_retries", "integer", "above 0, the trial barely fits into memory", _at("ok.memory.alloc_retries")),
    Column("host_bytes", "integer", "peak host memory of all processes", _at("ok.memory.host_bytes")),
    Column(
        "host_method",
        "text",
        "high_water, samples, or rss (counts shared pages per process)",
        _at("ok.memory.host_method"),
    ),
    Column("baseline_bytes", "integer", "host memory before the model was built", _at("ok.memory.baseline_bytes")),
    Column("build_peak_bytes", "integer", "peak while the model is built", _at("ok.memory.by_phase", "build")),
    Column("forward_peak_bytes", "integer", "peak of the forward pass", _at("ok.memory.by_phase", "forward")),
    Column("backward_peak_bytes", "integer", "peak of the backward pass", _at("ok.memory.by_phase", "backward")),
    Column("optimizer_peak_bytes", "integer", "peak of the optimizer step", _at("ok.memory.by_phase", "optimizer")),
    Column("model_flops", "integer", "FLOPs of a standard training step", _at("ok.cost.model_flops")),
    Column("hardware_flops", "integer", "FLOPs that this trainer executes per step", _at("ok.cost.hardware_flops")),
    Column("flops_method", "text", "how FLOPs were counted", _at("ok.cost.method")),
    Column("flops_attention", "text", "how attention is counted: full or causal", _attention),
    Column("flops_lower_bound", "flag", "whether FLOPs are a lower bound, because some ops have no formula", _bound),
    Column(
        "device_peak_flops_per_s",
        "number",
        "peak FLOP/s of which MFU and HFU are shares",
        _at("ok.cost.peak", "flops_per_s"),
    ),
    Column("device_peak_kind", "text", "where the peak comes from", _at("ok.cost.peak", "kind")),
    Column("mfu", "number", "model FLOP/s divided by the peak", _at("cell.mfu")),
    Column("hfu", "number", "hardware FLOP/s divided by the peak", _at("cell.hfu")),
    Column("epsilon", "number", "privacy spent; if empty, privacy_note says why", _at("ok.privacy.epsilon"), True),
    Column("delta", "number", "delta for which epsilon holds", _at("ok.privacy.delta")),
    Column("noise_multiplier", "number", "noise for which epsilon holds", _at("ok.privacy.noise_multiplier")),
    Column("sample_rate", "number", "probability that a sample is in a batch", _at("ok.privacy.sample_rate")),
    Column("privacy_steps", "integer", "steps of the training for which epsilon holds", _at("ok.privacy.steps")),
    Column("accountant", "text", "privacy accountant: rdp, prv or gdp", _at("ok.privacy.accountant")),
    Column("privacy_note", "text", "what a reader of epsilon must know", _at("ok.privacy.note")),
    Column("host", "text", "machine on which the trial ran", _at("result.environment", "host")),
    Column("device", "text", "device on which the trial ran, such as cuda:0", _at("result.environment", "device")),
    Column("device_name", "text", "name of the accelerator", _at("result.environment", "device_name")),
    Column("cpu", "text", "name of the CPU", _at("result.environment", "cpu")),
    Column("torch", "text", "version of torch", _at("result.environment", "torch")),
    Column("cuda", "text", "version of CUDA", _at("result.environment", "cuda")),
    Column("opacus", "text", "version of Opacus", _at("result.environment", "opacus")),
    Column("python", "text", "version of Python", _at("result.environment", "python")),
    Column("flopwatch", "text", "version of flopwatch", _at("result.environment", "flopwatch")),
    Column("git", "text", "git commit of the code; + means with local changes", _at("result.environment", "git")),
    Column("trace", "text", "path of the Kineto trace within the sweep's folder", _at("result.measured.trace")),
    Column("key", "text", "hash of the configuration and the environment", _at("result.key")),
    Column("shell_command", "text", "shell command that a command trainer runs", _at("spec.command")),
    Column("command", "text", "shell command that runs this trial again", _at("result.command")),
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
    return _table([_trial(*trial) for trial in capture.trials()], capture.troubles)


def result_row(result: TrialResult) -> dict[str, Any]:
    return _table([_trial(result.name, result.spec, result)]).rows[0]


def _trial(name: str, spec: TrialSpec, result: TrialResult | None) -> Trial:
    ok = result.measured if result and result.outcome == "ok" else None
    return Trial(spec, make_cell(name, spec, result, spec.trainer), result, ok)


def _table(trials: Sequence[Trial], troubles: tuple[str, ...] = ()) -> Table:
    kinds: dict[str, Kind] = {column.name: column.kind for column in COLUMNS}
    rows = [{column.name: _column_value(column, trial) for column in COLUMNS} for trial in trials]
    for prefix, path in (("options", "spec.options"), ("extra", "result.measured.extra")):
        added = [
            {f"{prefix}.{whole_text(str(name))}": _plain_value(value) for name, value in (named or {}).items()}
            for named in map(_at(path), trials)
        ]
        for name in sorted({name for values in added for name in values}):
            kinds[name] = _kind_of(values.get(name) for values in added)
            for row, values in zip(rows, added, strict=True):
                row[name] = values.get(name)
    for name, kind in kinds.items():
        if kind == "integer" and any(abs(row[name] or 0) > MOST_INTEGER for row in rows):
            kinds[name] = "number"
    return Table(tuple(rows), kinds, troubles)


def _column_value(column: Column, trial: Trial) -> Any:
    value = column.read(trial)
    return inf if column.may_be_infinite and value == inf else _value(value, column.kind)


def _plain_value(value: Any) -> Any:
    """Convert a value for a table cell: numbers, flags and text stay, everything else becomes JSON text."""
    if value is None or isinstance(value, bool):
        return value
    return _value(value, "number" if isinstance(value, int | float) else "text")


def _kind_of(values: Iterable[Any]) -> Kind:
    types = {type(value) for value in values if value is not None}
    if types == {int, float}:
        return "number"
    kinds: Mapping[type, Kind] = {bool: "flag", int: "integer", float: "number"}
    return kinds.get(types.pop(), "text") if len(types) == 1 else "text"


def _value(value: Any, kind: Kind) -> Any:
    """Return the value if it suits the kind of the column, or else None. A damaged file may contain anything."""
    if value is None or kind == "flag":
        return value if isinstance(value, bool) else None
    if kind == "text":
        text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        return whole_text(text) or None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_FINITE:
        return None
    return value if kind == "number" else int(value) if value == int(value) else None


def whole_text(text: str) -> str:
    r"""Escape lone surrogates in text, because UTF-8 cannot encode them.

    >>> whole_text("half \ud83d")
    'half \\ud83d'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# A formula may also start after a semicolon, tab or newline, because some spreadsheets begin a new cell there.
_BEGINS_A_FORMULA = re.compile(r"(?:^|(?<=[;\t\n]))(?=\s*[=+\-@＝＋－＠])")


def table_csv(table: Table) -> str:
    """Write the table as CSV with a header. Flags are `true` or `false`, and unknown values are empty.

    Text that a spreadsheet would run as a formula gets an apostrophe in front, because text such as an
    exception's message may come from anywhere (CSV injection, see OWASP). Control characters are removed.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([_harmless(name) for name in table.columns])
    for row in table.rows:
        known = ("" if value is None else value for value in row.values())
        writer.writerow([_harmless(value) if isinstance(value, str) else _text(value) for value in known])
    return stream.getvalue()


def table_parquet(table: Table) -> bytes:
    """Write the table as Parquet with typed columns. Unlike in CSV, text is not changed.

    Raises:
        MissingDependencyError: pyarrow is not installed.
    """
    pyarrow = require_package("pyarrow", "Parquet", "; CSV needs nothing")
    parquet = require_package("pyarrow.parquet", "Parquet", "; CSV needs nothing")
    types = {"text": pyarrow.string(), "integer": pyarrow.int64(), "number": pyarrow.float64(), "flag": pyarrow.bool_()}
    columns = {
        name: pyarrow.array([_typed(row[name], kind) for row in table.rows], types[kind])
        for name, kind in table.kinds.items()
    }
    written = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), written)
    return written.getvalue()


def _typed(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    return float(value) if kind == "number" else _text(value) if kind == "text" else value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


def _harmless(text: str) -> str:
    return _BEGINS_A_FORMULA.sub("'", plain(text))


_RESULTS = COLUMNS[[column.name for column in COLUMNS].index("outcome") :]
_FACTS = {column.name for column in _RESULTS if column.kind == "text"}
_FIGURES = {column.name for column in _RESULTS if column.kind != "text"}


def trial_runs(capture: Capture) -> Iterator[TrialRun]:
    for result in capture.results.values():
        yield trial_run(result, capture.folder.resolve().name, capture.created)


def trial_run(result: TrialResult, sweep: str, created: float | None) -> TrialRun:
    """Convert the result of a trial to a run of a tracking service.

    Args:
        result: The result.
        sweep: Name of the sweep.
        created: Unix time at which the sweep was planned. The ID of the run depends on this time, which
            differs between sweeps with the same trials and stays the same if a sweep is resumed or its folder moved.
    """
    row = result_row(result)
    sweep_id = _hashed(sweep if created is None else repr(created))
    end = None if row["start_unix_seconds"] is None else row["start_unix_seconds"] + (row["total_seconds"] or 0)
    return TrialRun(
        id=_hashed(sweep_id, result.key or result.name),
        name=one_line(result.name),
        sweep=one_line(sweep),
        sweep_id=sweep_id,
        config=_clean(result.spec.to_json()),
        figures={name: value for name, value in row.items() if name in _FIGURES or name.startswith("extra.")},
        facts={name: value for name, value in row.items() if name in _FACTS and value is not None},
        state="killed" if result.outcome == "cancelled" else "failed" if result.outcome in FAILED else "finished",
        start_unix_seconds=row["start_unix_seconds"],
        end_unix_seconds=end,
    )


def _hashed(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "backslashreplace")).hexdigest()[:20]


def _clean(value: Any) -> Any:
    """Make a value acceptable to every service: escape lone surrogates, and replace NaN and infinity by None."""
    if isinstance(value, Mapping):
        return {whole_text(str(name)): _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, str):
        return whole_text(value)
    return None if isinstance(value, int | float) and not abs(value) <= MOST_FINITE else value
