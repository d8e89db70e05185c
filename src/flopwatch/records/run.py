"""The records of a run's log, which the monitor sends to its sinks. Standard library only.

A session is one process lifetime of a run. A log has one `RunStart` per session, a `Provenance` whenever the source of
the FLOP counts or of the peak changes, a `Row` per logging window (`log_every` steps), a `Notice` for each message to
the user, and a `Summary` at the end of a session.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from flopwatch.decode import LARGEST, Stored, are_amounts, is_amount, valid_if
from flopwatch.language import parts_of

Number: TypeAlias = int | float
Level = Literal["info", "warning", "error"]

FORMAT = 1
"""The format of the log. A log with a newer format is not read."""

# A line of a damaged log may be valid JSON and still have a text where a number should be. Rows are checked one by one
# while a long log is read, so these checks look at types only, and at the size of numbers that are added up.

_TIMES = ("seconds", "input_wait_seconds")


def _is_ledger(value: Any) -> bool:
    if type(value) is not dict:
        return False
    steps, start = value.get("steps", 0), value.get("first_start_unix_time")
    are_sums = all(are_amounts(value.get(part, {})) for part in ("totals", "seconds", "timed_flops"))
    return are_sums and type(steps) is int and is_amount(steps) and (start is None or is_amount(start))


def _are_columns(value: Any) -> bool:
    if type(value) is not dict:
        return False
    numbers = value.get("step", ())
    length = len(numbers) if type(numbers) is list else -1
    return not value or all(_is_column(name, column, length) for name, column in value.items())


def _is_column(name: str, column: Any, length: int) -> bool:
    if type(column) is not list or len(column) != length:
        return False
    kinds = set(map(type, column))
    if not kinds <= ({int} if name == "step" else {int, float, bool, type(None)}):
        return False
    known = [cell for cell in column if cell is not None] if type(None) in kinds else column
    if float not in kinds:  # `min` and `max` are ten times as quick as a loop, but not right if there is a NaN
        return not known or bool(min(known) > -LARGEST and max(known) < LARGEST)
    if name in _TIMES:
        return all(map(is_amount, known))
    # The values of a metric may be NaN or infinite.
    return int not in kinds or all(type(cell) is float or -LARGEST < cell < LARGEST for cell in known)


_TIME = valid_if(is_amount)
_COUNT = valid_if(lambda value: type(value) is int and 0 < value < LARGEST)
_LEDGER = valid_if(_is_ledger)
_PEAK = valid_if(lambda value: type(value) is dict and is_amount(value.get("flops_per_s")) and value["flops_per_s"] > 0)
_LEVEL = valid_if(lambda value: type(value) is str)  # a later version may have more levels
_ENVIRONMENT = valid_if(lambda value: type(value) is dict and type(value.get("process", {})) is dict)


@dataclass(frozen=True, slots=True)
class RunStart(Stored):
    """The start of a session: the first start of a run, or a resume in the same folder.

    Attributes:
        session: A random name that distinguishes the sessions of one log.
        resumed_after_step: The step of the checkpoint from which the session resumes; None for a fresh start.
        total_steps: The number of planned steps, if it is known.
        config: The monitor's configuration with all defaults.
        environment: Versions, host and device; under torchrun also the job and the number of the attempt.
        ledger: The run's totals when the session began, in the local log only, so that they are not lost if the
            session is killed before its first row.
        what_ran: Script, arguments, folder, git commit, user, ids of the job and versions of packages, in the local
            log only; empty with the setting `log_what_ran: false`.
    """

    session: str
    unix_time: float = field(metadata=_TIME)
    output_dir: str
    resumed_after_step: int | None = None
    total_steps: int | None = None
    rank: int = 0
    world_size: int = field(default=1, metadata=_COUNT)
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict, metadata=_ENVIRONMENT)
    ledger: Mapping[str, Any] = field(default_factory=dict, metadata=_LEDGER)
    what_ran: Mapping[str, Any] = field(default_factory=dict)

    type: Literal["run"] = "run"
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Provenance(Stored):
    """How the FLOPs and the peak of the following rows were found.

    Attributes:
        step: The first step to which this record applies.
        mode: `estimate`, `profiler`, `smart` or `hybrid`. Without hardware counters, `hybrid` becomes another mode, and
            a note says so; the mode that was asked for is in `RunStart.config`.
        method: How FLOPs are found: `trace`, `step`, `estimate`, `flops_fn`; None while they are unknown.
        exact: True if every op of the counted steps has a formula. `Row.exact` says whether a step's FLOPs are exact.
        attention: `full` or `causal`.
        coverage: Share of the matmul-like op calls that had a formula; None if no op was traced.
        peak: The peak that MFU is relative to (`Peak.to_json()`); None if it is unknown.
        device_count: Number of devices whose peaks are summed.
        achievable_flops_per_s: The rate of the fastest matrix product measured on this device, if it is known.
        notes: Fallbacks that were used, and facts that could not be determined.
        dtypes: Compute types of the counted products whose peaks are needed, the one with the most FLOPs first.
    """

    step: int
    mode: str
    method: str | None
    exact: bool
    attention: str
    coverage: float | None = None
    peak: Mapping[str, Any] | None = field(default=None, metadata=_PEAK)
    device_count: int = field(default=1, metadata=_COUNT)
    notes: tuple[str, ...] = ()
    achievable_flops_per_s: float | None = None
    dtypes: tuple[str, ...] = ()

    type: Literal["provenance"] = "provenance"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), **parts_of(*self.notes)}


@dataclass(frozen=True, slots=True)
class Row:
    """The metrics of one logging window.

    Attributes:
        step: The last step of the window; `unix_time` is when the window ended.
        values: Metric key (see `flopwatch.records.metrics`) to value. An unknown metric has no key.
        detailed: True if `values` has more than the basic metrics.
        steps: One column per quantity, with one value per step of the window: `step`, `seconds`, `tokens`,
            `real_tokens`, `trainable_tokens`, `samples`, `model_flops`, `hardware_flops`, `recompute_flops`,
            `input_wait_seconds`, `warm_up`, `loss`. An unknown column is left out, and an unknown value is None. Only
            the local log has these columns.
        ledger: The run's totals so far, in the local log only. A resumed session continues from them.
        skip: Names of sinks that do not get this row (`skip_wandb=True`).
        all_ranks: Samples, tokens and FLOPs of the window, summed over all ranks; empty for a single rank. The columns
            in `steps` are those of the logging rank.
        exact: True if the FLOPs of every step in the window are exact. False if they are a lower bound, an estimate, or
            depend on a random draw; None if the window has no FLOPs. docs/exactness.md has the full definition.
        peak: The peak that MFU is relative to: `flops_per_s` of one device, averaged over the compute types of the
            steps, and `dtype`, the type with the most FLOPs. None if it is unknown.
        counters_source: Where the metrics of the group `counters` come from, such as `nvml-gpm`; several joined by `,`
            if it changed within the window. None without such metrics.
    """

    step: int
    unix_time: float = field(metadata=_TIME)
    values: Mapping[str, Number]
    detailed: bool = False
    steps: Mapping[str, Sequence[Any]] = field(default_factory=dict, metadata=valid_if(_are_columns))
    ledger: Mapping[str, Any] = field(default_factory=dict, metadata=_LEDGER)
    skip: tuple[str, ...] = ()
    all_ranks: Mapping[str, int] = field(default_factory=dict)
    exact: bool | None = None
    notes: tuple[str, ...] = ()
    peak: Mapping[str, Any] | None = field(default=None, metadata=_PEAK)
    counters_source: str | None = None

    type: Literal["row"] = "row"

    @property
    def steps_done(self) -> int:
        """The number of steps done: the larger of the last step number and the recorded total.

        Either can be too low: numbers may begin at 0, and the total may be missing from a damaged log.
        """
        return max(self.step, int(self.ledger.get("steps", 0)))

    def to_json(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "step": self.step,
            "unix_time": self.unix_time,
            "detailed": self.detailed,
            "values": dict(self.values),
            "steps": {name: list(column) for name, column in self.steps.items()},
            "ledger": dict(self.ledger),
            **({"all_ranks": dict(self.all_ranks)} if self.all_ranks else {}),
            **({} if self.exact is None else {"exact": self.exact, "peak": self.peak}),
            **({"notes": list(self.notes)} if self.notes else {}),
            **parts_of(*self.notes),
            **({} if self.counters_source is None else {"counters_source": self.counters_source}),
        }


PARTIAL_ROW = "partial_row"


@dataclass(frozen=True, slots=True)
class PartialRow(Row):
    """The steps since the last row, written to the local log when a checkpoint is saved; `values` is empty.

    The session's next row contains these steps again. If the run was killed before that row, a resumed session takes
    the totals from this record.
    """

    def to_json(self) -> dict[str, Any]:
        return {**Row.to_json(self), "type": PARTIAL_ROW}


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to the user, such as a warning about a value, or about a sink that failed and was switched off.

    Attributes:
        step: The step at which the message was given; None before the first step.
        code: A short, stable name: `mfu_above_peak`, `coverage_below_1`, `sink_failed`, `rows_dropped`, ...
        message: What happened, with the value, and what to do next.
        doubted: First and last step of each range whose rows are not exact, although they were written as exact.
    """

    step: int | None
    level: Level = field(metadata=_LEVEL)
    code: str
    message: str
    doubted: tuple[tuple[int, int], ...] = ()

    type: Literal["notice"] = "notice"

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "doubted" or value}
        return fields | parts_of(self.message)


@dataclass(frozen=True, slots=True)
class Summary(Stored):
    """The last record of a session: its totals and how it ended.

    Attributes:
        step: The last step; None if there was none.
        values: The totals and the session's rates, under the keys of `flopwatch.records.metrics`.
        notices: How often each notice was given, by code.
        failed_parts: Parts of the monitor that failed and were switched off, with the reason.
        dropped_rows: Number of rows dropped because a queue was full, or the disk of the local log, by sink.
        ended_by: The exception that ended the session, such as `RuntimeError: ...`, or `exit status 3`; else None.
        exact: Whether every row of the session was exact (see `Row.exact`); None if no row had FLOPs.
    """

    step: int | None
    unix_time: float = field(metadata=_TIME)
    values: Mapping[str, Number] = field(default_factory=dict)
    notices: Mapping[str, int] = field(default_factory=dict)
    failed_parts: Mapping[str, str] = field(default_factory=dict)
    dropped_rows: Mapping[str, int] = field(default_factory=dict)
    ended_by: str | None = None
    exact: bool | None = None
    notes: tuple[str, ...] = ()

    type: Literal["summary"] = "summary"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), **parts_of(self.ended_by, *self.notes, *self.failed_parts.values())}


Record: TypeAlias = RunStart | Provenance | Row | Notice | Summary


def is_doubted(steps: Sequence[int], ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether one of the steps is in one of the ranges, whose first and last steps belong to them."""
    return any(first <= step <= last for first, last in ranges for step in steps)


def marked(row: Row, notice: Notice) -> Row:
    """Return the row; as not exact, with the notice's message as the reason, if it has a step that the notice doubts.

    >>> marked(Row(9, 0.0, {}, exact=True), Notice(20, "warning", "rows_in_doubt", "a count differs", ((5, 10),))).notes
    ('a count differs',)
    """
    if row.exact is None or not is_doubted(row.steps.get("step") or (row.step,), notice.doubted):
        return row
    values = {**row.values, **({"perf/exact": 0} if "perf/exact" in row.values else {})}
    return replace(row, exact=False, values=values, notes=tuple(dict.fromkeys([*row.notes, notice.message])))
