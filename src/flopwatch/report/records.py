"""What a report knows: frozen records that every renderer draws from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from flopwatch.records.trial import PrivacySpent

Privacy: TypeAlias = Literal["not private", "private", "unknown"]
Quantity: TypeAlias = Literal["time", "memory"]
Axis: TypeAlias = Literal["sequence", "batch"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One trial as comparisons see it. Numbers are of `ok` trials only, finite and positive, else None.

    Attributes:
        trial: Its name.
        trainer: The column it stands in.
        privacy: Whether the trainer is differentially private; unknown for a user's own.
        batch_size: Samples per step.
        seq_len: Positions per sample.
        outcome: How it ended, or `missing`.
        seconds: Median of a step; `low_seconds` and `high_seconds` are its 95 % interval.
        is_unstable: The interval is wide: small differences mean nothing.
        peak_bytes: Reserved on an accelerator, host memory of the process tree on a CPU.
        above_start_bytes: Host memory above what the process had before the model; None on an accelerator.
        device_bytes: What the accelerator has.
        alloc_retries: Above 0 it barely fits.
        bytes_by_phase: Peak in each phase.
        samples_per_s: Throughput.
        tokens_per_s: Throughput in positions; None where samples are not sequences.
        mfu: Share of the peak by model FLOPs.
        hfu: Share of the peak by executed FLOPs.
        hardware_flops: Executed in one step.
        is_lower_bound: Some ops had no formula, so FLOPs, MFU and HFU are at least this.
    """

    trial: str
    trainer: str
    privacy: Privacy
    batch_size: int
    seq_len: int
    outcome: str
    seconds: float | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    is_unstable: bool = False
    peak_bytes: int | None = None
    above_start_bytes: int | None = None
    device_bytes: int | None = None
    alloc_retries: int | None = None
    bytes_by_phase: Mapping[str, int] = field(default_factory=dict)
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    hardware_flops: int | None = None
    is_lower_bound: bool = False


@dataclass(frozen=True, slots=True)
class Totals:
    """Of the whole sweep.

    Attributes:
        trials: Asked for.
        by_outcome: How many ended how; `missing` are those without a result.
        trial_seconds: Life times of all workers added up; trials side by side count each.
        wall_seconds: From the first start to the last end; None when a clock cannot be right.
    """

    trials: int
    by_outcome: Mapping[str, int]
    trial_seconds: float
    wall_seconds: float | None


@dataclass(frozen=True, slots=True)
class TrainerTotals:
    """Of one trainer.

    Attributes:
        trainer: Its name.
        privacy: Its class.
        tried: Trials that were run.
        ok: Of those, ran to the end.
        out_of_memory: Of those, too large.
        failed: Of those, everything else.
        not_run: Inferred, unsupported, skipped, cancelled or missing.
        success_rate: ok / tried; None when nothing was tried.
        mean_peak_bytes: Over its `ok` trials that tell.
        peaks: How many those are.
        shared_mean_peak_bytes: Over the configurations that every trainer ran, so it can be compared.
        shared_peaks: How many those are.
        by_outcome: How many ended how.
    """

    trainer: str
    privacy: Privacy
    tried: int
    ok: int
    out_of_memory: int
    failed: int
    not_run: int
    success_rate: float | None
    mean_peak_bytes: float | None
    peaks: int
    shared_mean_peak_bytes: float | None
    shared_peaks: int
    by_outcome: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Failure:
    """Trials that ended for one cause.

    Attributes:
        outcome: How they ended.
        cause: Exception, signal or exit code, with numbers and paths taken out.
        count: How many.
        trials: Their names.
        by_trainer: How many of each trainer.
        example: Name of one; what follows is of this one.
        reason: One line.
        phase: Where it was.
        step: At which step.
        evidence: What the outcome rests on.
        command: Runs it again.
        log_tail: Its last lines.
        stacks: What its threads did.
        advice: What to do.
    """

    outcome: str
    cause: str
    count: int
    trials: tuple[str, ...]
    by_trainer: Mapping[str, int]
    example: str
    reason: str
    phase: str
    step: int | None
    evidence: Mapping[str, Any]
    command: str
    log_tail: str
    stacks: str
    advice: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CostFactor:
    """A trainer against `standard` at one batch size and sequence length; 2 is twice as much.

    Attributes:
        trainer: Which.
        batch_size: Samples per step, of both.
        seq_len: Positions per sample, of both.
        time: Of medians; `low_time` and `high_time` is what the two intervals allow.
        memory: Of peaks.
        memory_above_start: Of what the model and its step added; only where host memory is the peak.
        flops: Of executed FLOPs.
    """

    trainer: str
    batch_size: int
    seq_len: int
    time: float | None
    low_time: float | None
    high_time: float | None
    memory: float | None
    memory_above_start: float | None
    flops: float | None


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """How far a trainer gets at one sequence length.

    Attributes:
        trainer: Which.
        seq_len: Positions per sample.
        largest_ok: Largest batch that ran.
        smallest_oom: Smallest batch out of memory.
        is_inferred: That one was not run.
        is_monotone: False when a larger batch ran than one that did not: the limit is not sharp.
    """

    trainer: str
    seq_len: int
    largest_ok: int | None
    smallest_oom: int | None
    is_inferred: bool
    is_monotone: bool


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where one trainer overtakes another.

    Attributes:
        quantity: What is compared.
        axis: What grows.
        fixed: The other axis' value.
        below: The better one at smaller values.
        above: The better one at larger values.
        low: The largest measured value where `below` is better.
        high: The smallest measured value where `above` is better.
        at: Log-linear interpolation; None when measured values between them do not tell the two apart.
        equal_at: Measured values between them that do not tell the two apart.
        is_claimed: False when medians cross but intervals overlap at a neighbour: not decided.
    """

    quantity: Quantity
    axis: Axis
    fixed: int
    below: str
    above: str
    low: int
    high: int
    at: float | None
    equal_at: tuple[int, ...] = ()
    is_claimed: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run at one sequence length within one privacy class.

    Attributes:
        seq_len: Positions per sample.
        privacy: Candidates are of this class only.
        fastest: Most samples per second of all that ran.
        tied: Those that cannot be told from it by measurement, best first.
        lightest: Least memory among those within 10 % of the fastest; None when memory is not known.
        candidates: How many were compared.
    """

    seq_len: int
    privacy: Privacy
    fastest: Cell
    tied: tuple[Cell, ...]
    lightest: Cell | None
    candidates: int


@dataclass(frozen=True, slots=True)
class PrivacyRow:
    """What a private training would spend.

    Attributes:
        batch_size: Samples of a logical batch.
        trainers: The columns whose trials say so.
        spent: Epsilon, and what it is for.
    """

    batch_size: int
    trainers: tuple[str, ...]
    spent: PrivacySpent


@dataclass(frozen=True, slots=True)
class Group:
    """Trials that may be compared: same model, dtype, device and so on.

    Attributes:
        title: In words.
        settings: What they have in common.
        parameters: Of the model.
        trainers: Columns, in order.
        batch_sizes: Rows.
        seq_lens: Rows.
        cells: All trials.
        choices: What to run.
        cost_factors: Against `standard`.
        frontier: Out-of-memory limits.
        crossovers: Where one overtakes another, and where that is not decided.
        pareto: Trials no other of the same class and sequence length beats in both memory and throughput.
        denominators: The peaks that MFU and HFU are shares of, in words.
        warnings: Why comparisons within it may mislead.
        privacy_spent: Epsilon where it was asked for, the smallest batch first.
    """

    title: str
    settings: Mapping[str, Any]
    parameters: int | None
    trainers: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    seq_lens: tuple[int, ...]
    cells: tuple[Cell, ...]
    choices: tuple[Choice, ...]
    cost_factors: tuple[CostFactor, ...]
    frontier: tuple[FrontierPoint, ...]
    crossovers: tuple[Crossover, ...]
    pareto: tuple[str, ...]
    denominators: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    privacy_spent: tuple[PrivacyRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Environment:
    """Where trials ran.

    Attributes:
        settings: Versions, device, host, ...
        trials: How many ran there.
    """

    settings: Mapping[str, str]
    trials: int


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One line of the table of all trials."""

    name: str
    group: int
    trainer: str
    model: str
    dtype: str
    checkpointing: bool
    batch_size: int
    seq_len: int
    outcome: str
    reason: str
    total_seconds: float | None
    step_seconds: float | None
    is_unstable: bool
    tokens_per_s: float | None
    samples_per_s: float | None
    peak_bytes: int | None
    mfu: float | None
    hfu: float | None
    command: str
    trace: str | None
    epsilon: float | None = None


@dataclass(frozen=True, slots=True)
class SweepSummary:
    """Everything the report says about a sweep.

    Attributes:
        name: Of its folder.
        folder: Where it lies.
        engine: What ran it.
        created: Unix time of its plan.
        totals: Of all trials.
        trainers: Per trainer.
        groups: Comparable trials, the largest group first.
        failures: By cause, the ones to look at first.
        environments: The most used first.
        preflight: Rows of `preflight.json`.
        warnings: What a reader must know first.
        rows: Every trial.
    """

    name: str
    folder: str
    engine: str | None
    created: float | None
    totals: Totals
    trainers: tuple[TrainerTotals, ...]
    groups: tuple[Group, ...]
    failures: tuple[Failure, ...]
    environments: tuple[Environment, ...]
    preflight: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    rows: tuple[TrialRow, ...] = ()
