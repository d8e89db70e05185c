"""What a run tells its sinks: frozen records, each with a JSON form. Never loads torch.

A run's log is a list of them: one `RunStart` per session, a `Provenance` whenever the origin of the numbers changes,
a `Row` per logging window, a `Notice` when something must be said, a `Summary` at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Number: TypeAlias = int | float
Level = Literal["info", "warning", "error"]

FORMAT = 1
"""Of the log; a reader refuses a newer one."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """A session begins: a first start, or a resume in the same folder.

    Attributes:
        session: A random name; distinguishes the sessions of one log.
        unix_time: When it began.
        output_dir: The run's folder.
        resumed_after_step: The last step of the earlier session that counts; None for a fresh start.
        total_steps: How many steps are planned, where known.
        rank: Of this process; 0 for a single one.
        world_size: Processes of the training.
        config: The monitor's configuration as it was understood.
        environment: Versions, host, device: what a reader needs to repeat the run. Under torchrun also which job and
            which attempt.
        ledger: The run's totals when the session began, for the local log: what was lost up to here is known even if
            the session dies before its first row.
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
        step: The first step it holds for.
        mode: `estimate`, `profiler`, `smart` or `hybrid`.
        method: How FLOPs are found: `trace`, `step`, `estimate`, `flops_fn`; None while they are not known.
        exact: True when the count of `model(batch)` is exact. Whether the steps ran nothing else, each row says.
        attention: `full` or `causal`.
        coverage: Share of the matmul-like op calls that had a formula; None where no op was seen.
        law: FLOPs per term and phase as decimal fractions in text, such as {"forward": {"positions": "7168"}};
            empty when shapes are counted one by one.
        peak: The denominator (`Peak.to_json()`), or None when nobody knows it.
        device_count: Devices whose peaks are summed.
        notes: What a reader must know.
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
        values: Metric key (see `flopwatch.records.metrics`) to value. What is not known has no key.
        detailed: True when it carries more than the basic metrics.
        steps: The window's steps in columns of equal length: `step`, `seconds`, `tokens`, `real_tokens`,
            `trainable_tokens`, `samples`, `model_flops`, `hardware_flops`, `recompute_flops`, `input_wait_seconds`,
            `warm_up`, `loss`; a column nobody knows is left out, an unknown cell is None. For the local log, so that
            any single step can be audited.
        ledger: The run's totals so far, for the local log: a resume continues from them.
        skip: Names of sinks that are not to get this row (`skip_wandb=True`).
        all_ranks: Samples, tokens and FLOPs of the window over all ranks, where there are several: the columns are the
            logging rank's own.
        exact: True when every FLOP of the row's steps was counted op by op on this very kind of step, or follows from
            a law inside the range it was verified on, and nothing that the steps ran was left out. False when they
            are a lower bound, one draw or an estimate; None when there are none.
        notes: Why it is not exact.
        peak: What MFU was divided by: `flops_per_s` of one device, over the types that the steps ran in, and `dtype`,
            the type of most of the work; None where it is not known.
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
        """Of those planned. Some count their steps from 0, and a resume without its totals counts few of them."""
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
    """The steps that are in no row yet when a checkpoint is saved: for the local log only, and without values.

    The row that follows in the same session has these steps again. Only where none follows, because the run was
    killed, does this one count.
    """

    def to_json(self) -> dict[str, Any]:
        return {**Row.to_json(self), "type": PARTIAL_ROW}


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should read: an alarm, a part that failed and was switched off.

    Attributes:
        step: When; None before the first step.
        level: `info`, `warning` or `error`.
        code: A short name that stays the same: `mfu_above_peak`, `coverage_below_1`, `sink_failed`, `rows_dropped`, ...
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
    """The session's end.

    Attributes:
        step: The last step; None when there was none.
        unix_time: When.
        values: The totals and the session's own rates, under the keys of `flopwatch.records.metrics`.
        notices: How often each notice was given, by code.
        failed_parts: What was switched off, and why.
        dropped_rows: Rows that a full queue swallowed, by sink.
        ended_by: The exception that ended it, such as `RuntimeError: ...` or `KeyboardInterrupt` (Ctrl-C); None for a
            session that ended by itself.
        exact: Whether every row of the session was exact (see `Row.exact`); None when no row had FLOPs.
        notes: Why not, as the rows said it.
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
