"""A sweep as one flat table: a row per trial, plain values, the same columns in every row."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any, overload

from flopwatch.optional import require_package
from flopwatch.report.capture import Capture, capture_sweep
from flopwatch.report.cells import MOST_FINITE, make_cell, missing_cell
from flopwatch.report.table_columns import COLUMNS, Column, Kind, Trial
from flopwatch.trial_records import MemoryUse, StepCost, TrialResult, TrialSpec

_PANDAS_TYPES: Mapping[Kind, str] = {"text": "object", "integer": "Int64", "number": "float64", "flag": "boolean"}
MOST_INTEGER = 2**63 - 1
"""FLOPs of a step of the largest models are above it; a column with such a number is one of floats."""


@dataclass(frozen=True, slots=True, eq=False)
class Table(Sequence[dict[str, Any]]):
    """The rows of a sweep. It is a sequence of plain dicts, so `pandas.DataFrame(table)` works as it is.

    Attributes:
        rows: One dict per trial, in the order trials were asked for, each with every column; None is not known.
        kinds: Column to `text`, `integer`, `number` or `flag`.
        troubles: What of the folder is damaged and therefore not in the rows, a sentence each.
    """

    rows: tuple[dict[str, Any], ...]
    kinds: Mapping[str, Kind] = field(repr=False)
    troubles: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Their names in order; `flopwatch.report.COLUMNS` says what each is."""
        return tuple(self.kinds)

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with typed columns: `Int64` and `boolean` keep what is not known apart.

        Raises:
            MissingDependencyError: pandas is not installed.
        """
        pandas = require_package("pandas", "to_pandas()", "; the rows themselves need nothing")
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

    Measured numbers are those of `ok` trials only, as in the report. What is not known, and what is no finite number,
    is None.

    Args:
        folder: Where `flopwatch sweep` wrote.

    Raises:
        InputError: This is not the folder of a sweep.
    """
    return make_table(capture_sweep(Path(folder).expanduser()))


def make_table(capture: Capture) -> Table:
    """The rows of what was read; trials without a result have the outcome `missing`."""
    trials = [_ended(result) for result in capture.results.values()]
    trials += [_missing(name, spec) for name, spec in capture.missing.items()]
    return replace(_table(trials), troubles=capture.troubles)


def result_row(result: TrialResult) -> dict[str, Any]:
    """The row of one trial alone."""
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
    """A number, a flag or text; lists and dicts as JSON."""
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
    """The value if it is of the column's kind; a damaged file may hold anything."""
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
    r"""With half characters spelled out: neither a file in UTF-8 nor pandas can hold them.

    >>> whole_text("half \ud83d")
    'half \\ud83d'
    """
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
