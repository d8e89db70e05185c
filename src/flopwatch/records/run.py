"""The records of a run's log, which the monitor sends to its sinks: frozen, with a JSON form. Standard library only.

A log has one `RunStart` per session, a `Provenance` whenever the origin of the numbers changes, a `Row` per logging
window, a `Notice` for each message to the user, and a `Summary` at the end of a session.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Number: TypeAlias = int | float
Level = Literal["info", "warning", "error"]

FORMAT = 1
"""The format of the log. A log with a newer format is not read."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """A session begins: a first start, or a resume in the same folder.

    Attributes:
        session: A random name; distinguishes the sessions of one log.
        unix_time: When it began.
        output_dir: The run's folder.
        resumed_after_step: The last step of the earlier session that counts; None for a fresh start.
        total_steps: The number of planned steps, if it is known.
        rank: The rank of this process; 0 for a single process.
        world_size: Number of processes of the training.
        config: The monitor's configuration with all defaults.
        environment: Versions, host and device, so that the run can be repeated; under torchrun also job and attempt.
        ledger: The run's totals when the session began, in the local log only. They are known from here even if the
            session dies before its first row.
    """

    session: str
    unix_time: float
    output_dir: str
    resumed_after_step: int | None = None
    total_steps: int | None = None
    rank: int = 0
    world_size: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    ledger: Mapping[str, Any] = field(default_factory=dict)

    type: Literal["run"] = "run"
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the numbers of the following rows come from.

    Attributes:
        step: The first step to which it applies.
        mode: `estimate`, `profiler`, `smart` or `hybrid`.
        method: How FLOPs are found: `trace`, `step`, `estimate`, `flops_fn`; None while they are unknown.
        exact: True if the count of `model(batch)` is exact. Each row says whether its steps ran anything else.
        attention: `full` or `causal`.
        coverage: Share of the matmul-like op calls that had a formula; None if no op was seen.
        law: FLOPs per term and phase as decimal fractions in text, such as {"forward": {"positions": "7168"}};
            empty if shapes are counted one by one.
        peak: The denominator (`Peak.to_json()`); None if it is unknown.
        device_count: Number of devices whose peaks are summed.
        notes: What to know before using the numbers.
    """

    step: int
    mode: str
    method: str | None
    exact: bool
    attention: str
    coverage: float | None = None
    law: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    peak: Mapping[str, Any] | None = None
    device_count: int = 1
    notes: tuple[str, ...] = ()

    type: Literal["provenance"] = "provenance"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Row:
    """One logging window.

    Attributes:
        step: Its last step.
        unix_time: When it was closed.
        values: Metric key (see `flopwatch.records.metrics`) to value. An unknown metric has no key.
        detailed: True if it has more than the basic metrics.
        steps: The window's steps in columns of equal length: `step`, `seconds`, `tokens`, `real_tokens`,
            `trainable_tokens`, `samples`, `model_flops`, `hardware_flops`, `recompute_flops`, `input_wait_seconds`,
            `warm_up`, `loss`. An unknown column is left out, and an unknown cell is None. In the local log only, so
            that every single step can be checked.
        ledger: The run's totals so far, in the local log only. A resume continues from them.
        skip: Names of sinks that do not get this row (`skip_wandb=True`).
        all_ranks: Samples, tokens and FLOPs of the window over all ranks, if there are several; the columns are the
            logging rank's own.
        exact: True if every FLOP of the row's steps was counted op by op on this kind of step, or follows from a law
            inside its verified range, and the steps ran nothing else. False for a lower bound, a single random draw or
            an estimate; None if there are no FLOPs.
        notes: Why it is not exact.
        peak: The denominator of MFU: `flops_per_s` of one device, averaged over the types that the steps ran in, and
            `dtype`, the type of most of the work; None if it is unknown.
    """

    step: int
    unix_time: float
    values: Mapping[str, Number]
    detailed: bool = False
    steps: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ledger: Mapping[str, Any] = field(default_factory=dict)
    skip: tuple[str, ...] = ()
    all_ranks: Mapping[str, int] = field(default_factory=dict)
    exact: bool | None = None
    notes: tuple[str, ...] = ()
    peak: Mapping[str, Any] | None = None

    type: Literal["row"] = "row"

    @property
    def steps_done(self) -> int:
        """Steps done of those planned: the larger count, because numbers may begin at 0 and totals may be lost."""
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
        }


PARTIAL_ROW = "partial_row"


@dataclass(frozen=True, slots=True)
class PartialRow(Row):
    """The steps that no row has yet when a checkpoint is saved: in the local log only, and without values.

    The next row of the session contains these steps again. This record counts only if there is no next row, because
    the run was killed.
    """

    def to_json(self) -> dict[str, Any]:
        return {**Row.to_json(self), "type": PARTIAL_ROW}


@dataclass(frozen=True, slots=True)
class Notice:
    """A message to the user: an alarm, or a part that failed and was switched off.

    Attributes:
        step: The step at which it was given; None before the first step.
        level: `info`, `warning` or `error`.
        code: A short, stable name: `mfu_above_peak`, `coverage_below_1`, `sink_failed`, `rows_dropped`, ...
        message: What happened, with the value, and what to do next.
    """

    step: int | None
    level: Level
    code: str
    message: str

    type: Literal["notice"] = "notice"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a session.

    Attributes:
        step: The last step; None if there was none.
        unix_time: When the session ended.
        values: The totals and the session's rates, under the keys of `flopwatch.records.metrics`.
        notices: How often each notice was given, by code.
        failed_parts: Parts that were switched off, with the reason.
        dropped_rows: Number of rows dropped because a queue was full, by sink.
        ended_by: The exception that ended it, such as `RuntimeError: ...` or `KeyboardInterrupt` (Ctrl-C); None for a
            session that ended normally.
        exact: Whether every row of the session was exact (see `Row.exact`); None if no row had FLOPs.
        notes: Why not, from the rows.
    """

    step: int | None
    unix_time: float
    values: Mapping[str, Number] = field(default_factory=dict)
    notices: Mapping[str, int] = field(default_factory=dict)
    failed_parts: Mapping[str, str] = field(default_factory=dict)
    dropped_rows: Mapping[str, int] = field(default_factory=dict)
    ended_by: str | None = None
    exact: bool | None = None
    notes: tuple[str, ...] = ()

    type: Literal["summary"] = "summary"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Record: TypeAlias = RunStart | Provenance | Row | Notice | Summary
