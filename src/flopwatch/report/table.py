"""A sweep as one flat table with a row per trial, also as CSV."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

from flopwatch.records.settings import REPORTED
from flopwatch.records.trial import Measured, TrialResult, TrialSpec
from flopwatch.report.capture import Capture, capture_sweep
from flopwatch.report.cells import MOST_FINITE, make_cell
from flopwatch.report.records import TrialCell
from flopwatch.text import plain

Kind: TypeAlias = Literal["text", "integer", "number", "flag"]


class Trial(NamedTuple):
    """A trial from which a row is made; `ok` are its measurements if it ran to its end."""

    spec: TrialSpec
    cell: TrialCell
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


def _at(path: str) -> Callable[[Trial], Any]:
    """Read what a trial has at a path such as `ok.cost.mfu` or `ok.cost.peak:kind`; None if something is unknown."""
    attributes, _, key = path.partition(":")
    find = attrgetter(attributes)

    def read(trial: Trial) -> Any:
        try:
            return find(trial).get(key) if key else find(trial)
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


_KINDS: Mapping[type, Kind] = {bool: "flag", int: "integer", float: "number"}


def _columns_of_settings() -> Iterator[tuple[str, Kind, str, str]]:
    types = get_type_hints(TrialSpec)
    for name, setting in REPORTED.items():
        if setting.column:
            kind: Kind = next(
                (_KINDS[each] for each in (types[name], *get_args(types[name])) if each in _KINDS), "text"
            )
            yield setting.column_name or name, kind, f"spec.{name}", setting.column


_TRAINER, _LABEL, *_SETTINGS = _columns_of_settings()
_TABLE: tuple[tuple[str, Kind, str | Callable[[Trial], Any], str], ...] = (
    ("trial", "text", "cell.trial", "name of the trial within its sweep"),
    _TRAINER,
    _LABEL,
    ("privacy", "text", "cell.privacy", "differential privacy: private, not private, unknown"),
    *_SETTINGS,
    ("memory_limit_bytes", "integer", "spec.limits.memory_bytes", "limit of the host memory"),
    ("outcome", "text", "cell.outcome", "how the trial ended; missing means no result yet"),
    ("reason", "text", "result.reason", "why the trial ended, in one line"),
    ("phase", "text", "result.phase", "phase in which the trial ended"),
    ("not_measured", "text", _not_measured, "what could not be measured after the steps of an ok trial, and why"),
    ("attempts", "integer", _attempts, "how often the trial was started; 0 if it was not run"),
    ("start_unix_seconds", "number", "result.unix_time", "start of the last attempt"),
    ("total_seconds", "number", "result.seconds", "time from start to end of the worker process"),
    ("parameters", "integer", "result.measured.parameters", "number of parameters of the model"),
    ("steps_measured", "integer", "ok.steps.count", "number of timed steps"),
    ("step_seconds_median", "number", "cell.seconds", "median step time"),
    ("step_seconds_low", "number", "cell.low_seconds", "lower end of the 95 % interval; empty below 6 steps"),
    ("step_seconds_high", "number", "cell.high_seconds", "upper end of the 95 % interval of the median"),
    ("step_seconds_p10", "number", "ok.steps.p10", "10th percentile of the step time"),
    ("step_seconds_p90", "number", "ok.steps.p90", "90th percentile of the step time"),
    ("step_seconds_p99", "number", "ok.steps.p99", "99th percentile of the step time"),
    ("step_seconds_first", "number", "ok.steps.first", "time of the first step, with compilation"),
    ("unstable", "flag", "ok.steps.unstable", "whether the 95 % interval is wider than 5 % of the median"),
    ("forward_seconds", "number", "ok.phase_seconds:forward", "median time of the forward pass"),
    ("backward_seconds", "number", "ok.phase_seconds:backward", "median time of the backward pass"),
    ("optimizer_seconds", "number", "ok.phase_seconds:optimizer", "median time of the optimizer step"),
    ("samples_per_s", "number", "cell.samples_per_s", "batch size divided by the median step time"),
    ("tokens_per_s", "number", "cell.tokens_per_s", "positions divided by the median step time"),
    ("peak_bytes", "integer", "cell.peak_bytes", "peak of the memory that decides whether the trial fits"),
    ("device_bytes", "integer", "cell.device_bytes", "memory size of the accelerator"),
    ("allocated_bytes", "integer", "ok.memory.allocated_bytes", "peak held by tensors on the accelerator"),
    ("reserved_bytes", "integer", "ok.memory.reserved_bytes", "peak held by the accelerator's allocator"),
    ("alloc_retries", "integer", "ok.memory.alloc_retries", "above 0, the trial barely fits into memory"),
    ("host_bytes", "integer", "ok.memory.host_bytes", "peak host memory of all processes"),
    ("host_method", "text", "ok.memory.host_method", "high_water, samples, or rss (counts shared pages per process)"),
    ("baseline_bytes", "integer", "ok.memory.baseline_bytes", "host memory before the model was built"),
    ("build_peak_bytes", "integer", "ok.memory.by_phase:build", "peak while the model is built"),
    ("forward_peak_bytes", "integer", "ok.memory.by_phase:forward", "peak of the forward pass"),
    ("backward_peak_bytes", "integer", "ok.memory.by_phase:backward", "peak of the backward pass"),
    ("optimizer_peak_bytes", "integer", "ok.memory.by_phase:optimizer", "peak of the optimizer step"),
    ("model_flops", "integer", "ok.cost.model_flops", "FLOPs of a standard training step"),
    ("hardware_flops", "integer", "ok.cost.hardware_flops", "FLOPs that this trainer executes per step"),
    ("flops_method", "text", "ok.cost.method", "how FLOPs were counted"),
    ("flops_attention", "text", _attention, "how attention is counted: full or causal"),
    ("flops_lower_bound", "flag", _bound, "whether FLOPs are a lower bound, because some ops have no formula"),
    ("device_peak_flops_per_s", "number", "ok.cost.peak:flops_per_s", "peak FLOP/s of which MFU and HFU are shares"),
    ("device_peak_kind", "text", "ok.cost.peak:kind", "where the peak comes from"),
    ("mfu", "number", "cell.mfu", "model FLOP/s divided by the peak"),
    ("hfu", "number", "cell.hfu", "hardware FLOP/s divided by the peak"),
    ("epsilon", "number", "ok.privacy.epsilon", "privacy spent; if empty, privacy_note says why"),
    ("delta", "number", "ok.privacy.delta", "delta for which epsilon holds"),
    ("noise_multiplier", "number", "ok.privacy.noise_multiplier", "noise for which epsilon holds"),
    ("sample_rate", "number", "ok.privacy.sample_rate", "probability that a sample is in a batch"),
    ("privacy_steps", "integer", "ok.privacy.steps", "steps of the training for which epsilon holds"),
    ("accountant", "text", "ok.privacy.accountant", "privacy accountant: rdp, prv or gdp"),
    ("privacy_note", "text", "ok.privacy.note", "what a reader of epsilon must know"),
    ("host", "text", "result.environment:host", "machine on which the trial ran"),
    ("device", "text", "result.environment:device", "device on which the trial ran, such as cuda:0"),
    ("device_name", "text", "result.environment:device_name", "name of the accelerator"),
    ("cpu", "text", "result.environment:cpu", "name of the CPU"),
    ("torch", "text", "result.environment:torch", "version of torch"),
    ("cuda", "text", "result.environment:cuda", "version of CUDA"),
    ("opacus", "text", "result.environment:opacus", "version of Opacus"),
    ("python", "text", "result.environment:python", "version of Python"),
    ("flopwatch", "text", "result.environment:flopwatch", "version of flopwatch"),
    ("git", "text", "result.environment:git", "git commit of the code; + means with local changes"),
    ("trace", "text", "result.measured.trace", "path of the Kineto trace within the sweep's folder"),
    ("key", "text", "result.key", "hash of the configuration and the environment"),
    ("shell_command", "text", "spec.command", "shell command that a command trainer runs"),
    ("command", "text", "result.command", "shell command that runs this trial again"),
)
COLUMNS = tuple(
    Column(name, kind, meaning, _at(read) if isinstance(read, str) else read, may_be_infinite=name == "epsilon")
    for name, kind, read, meaning in _TABLE
)
"""The columns of every table. Columns `options.NAME` and then `extra.NAME` follow, each sorted by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Table(Sequence[dict[str, Any]]):
    """The rows of a sweep as a sequence of dicts, so that `pandas.DataFrame(table)` works.

    Attributes:
        rows: One dict per trial, in the order of the plan, with all columns; unknown values are None.
        columns: The names of the columns in order. `flopwatch.report.COLUMNS` explains them.
        troubles: One sentence for each damaged part of the folder; the rows do not contain that part.
    """

    rows: tuple[dict[str, Any], ...]
    columns: tuple[str, ...] = field(repr=False)
    troubles: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        return self.rows[place]


def load(folder: str | PathLike[str]) -> Table:
    """Read a sweep's folder into a table with one row per trial; needs neither torch nor pandas.

    ```python
    from flopwatch import report

    table = report.load("flopwatch-sweep")
    fastest = max(table, key=lambda row: row["tokens_per_s"] or 0)
    frame = pandas.DataFrame(table)  # with pandas imported
    ```

    Only `ok` trials have measured values. Unknown values, NaN and infinity are None.

    Args:
        folder: The folder that `flopwatch sweep` wrote.

    Raises:
        InputError: The folder is not the folder of a sweep.
    """
    return make_table(capture_sweep(Path(folder).expanduser()))


def make_table(capture: Capture) -> Table:
    trials = []
    for name, spec, result in capture.trials():
        ok = result.measured if result and result.outcome == "ok" else None
        trials.append(Trial(spec, make_cell(name, spec, result, spec.trainer), result, ok))
    columns = [column.name for column in COLUMNS]
    rows = [{one.name: _value(one.read(trial), one.kind, one.may_be_infinite) for one in COLUMNS} for trial in trials]
    for prefix, read in (("options", _at("spec.options")), ("extra", _at("result.measured.extra"))):
        added = [
            {whole_text(f"{prefix}.{name}"): _value(own, _KINDS.get(type(own), "text")) for name, own in named.items()}
            for named in (read(trial) or {} for trial in trials)
        ]
        for name in sorted({name for values in added for name in values}):
            columns.append(name)
            for row, values in zip(rows, added, strict=True):
                row[name] = values.get(name)
    return Table(tuple(rows), tuple(columns), capture.troubles)


def _value(value: Any, kind: Kind, may_be_infinite: bool = False) -> Any:
    """Return the value if it suits the kind of the column, or else None. A damaged file may contain anything."""
    if may_be_infinite and value == inf:
        return inf
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
    for row in (table.columns, *(row.values() for row in table.rows)):
        writer.writerow([_BEGINS_A_FORMULA.sub("'", plain(one)) if isinstance(one, str) else _text(one) for one in row])
    return stream.getvalue()


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    return value if isinstance(value, str) else repr(value)
