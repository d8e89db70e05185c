"""The frozen records of a report, which every renderer draws from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from flopwatch.records.trial import PrivacySpent

Privacy: TypeAlias = Literal["not private", "private", "unknown"]
Quantity: TypeAlias = Literal["time", "memory"]
Axis: TypeAlias = Literal["sequence", "batch"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One trial in a matrix. Numbers are finite and positive, and None unless the trial is `ok`.

    Attributes:
        trial: Its name.
        trainer: Its column.
        privacy: Whether the trainer is differentially private; unknown for a user's own trainer.
        batch_size: Samples per step.
        seq_len: Positions per sample.
        outcome: Its outcome, or `missing`.
        seconds: Median step time; `low_seconds` and `high_seconds` are its 95 % interval.
        is_unstable: The interval is wide, so small differences mean nothing.
        peak_bytes: Reserved on an accelerator, host memory of the process tree on a CPU.
        above_start_bytes: Host memory beyond that of the process before the model; None on an accelerator.
        device_bytes: Memory of the accelerator.
        alloc_retries: Times the allocator had to free its cache; above 0 the trial barely fits.
        bytes_by_phase: Peak of each phase.
        samples_per_s: Throughput.
        tokens_per_s: Throughput in positions; None where samples are not sequences.
        mfu: Model FLOPs per second as a share of the peak.
        hfu: Executed FLOPs per second as a share of the peak.
        hardware_flops: FLOPs executed in one step.
        is_lower_bound: Some ops have no formula, so FLOPs, MFU and HFU are lower bounds.
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
    """Totals of the whole sweep.

    Attributes:
        trials: Planned trials.
        by_outcome: Trials by outcome; `missing` are those without a result.
        trial_seconds: Sum of all trials' durations; trials that ran at the same time count each.
        wall_seconds: From the first start to the last end; None if a clock is clearly wrong.
    """

    trials: int
    by_outcome: Mapping[str, int]
    trial_seconds: float
    wall_seconds: float | None


@dataclass(frozen=True, slots=True)
class TrainerTotals:
    """Totals of one trainer.

    Attributes:
        trainer: Its name.
        privacy: Its privacy class.
        tried: Trials that ran.
        ok: Trials that ran to their end.
        out_of_memory: Trials that ran out of memory.
        failed: Trials that ran and ended in any other way.
        not_run: Inferred, unsupported, skipped, cancelled or missing.
        success_rate: ok / tried; None when nothing was tried.
        mean_peak_bytes: Mean over its `ok` trials with a known peak.
        peaks: The number of those trials.
        shared_mean_peak_bytes: Mean over the configurations that every trainer ran, for a fair comparison.
        shared_peaks: The number of those configurations.
        by_outcome: Trials by outcome.
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
    """Trials that failed for one cause. The fields after `example` describe that trial.

    Attributes:
        outcome: Their outcome.
        cause: Exception, signal or exit code, with numbers and paths removed.
        count: The number of trials.
        trials: Their names.
        by_trainer: Trials by trainer.
        example: Name of one of them.
        reason: Why it ended, in one line.
        phase: The phase it ended in.
        step: The step it ended at.
        evidence: What the outcome was decided by.
        command: The command that runs it again.
        log_tail: The end of its log.
        stacks: The stacks of its threads.
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
        trainer: The trainer.
        batch_size: Samples per step of both.
        seq_len: Positions per sample of both.
        time: Ratio of the median step times; `low_time` and `high_time` are its bounds by the two intervals.
        memory: Ratio of the peaks.
        memory_above_start: Ratio of the memory that model and step added; only where the peak is host memory.
        flops: Ratio of the executed FLOPs.
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
    """The memory limit of a trainer at one sequence length.

    Attributes:
        trainer: The trainer.
        seq_len: Positions per sample.
        largest_ok: Largest batch that ran.
        smallest_oom: Smallest batch that ran out of memory.
        is_inferred: `smallest_oom` was inferred from a smaller trial and not run.
        is_monotone: False when a batch ran that is larger than one that ran out of memory.
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
        quantity: The compared quantity.
        axis: The axis along which they cross.
        fixed: The value on the other axis.
        below: The better trainer at smaller values.
        above: The better trainer at larger values.
        low: The largest measured value at which `below` is better.
        high: The smallest measured value at which `above` is better.
        at: Log-linear interpolation; None if no difference is measurable at a value between `low` and `high`.
        equal_at: Measured values between `low` and `high` without a measurable difference.
        is_claimed: False if medians cross but intervals overlap at a neighbour, so that nothing is decided.
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
        privacy: The class of all candidates.
        fastest: The trial with the most samples per second.
        tied: Trials that are not measurably slower, best first.
        lightest: The trial with the least memory within 10 % of the fastest; None when memory is unknown.
        candidates: The number of trials compared.
    """

    seq_len: int
    privacy: Privacy
    fastest: Cell
    tied: tuple[Cell, ...]
    lightest: Cell | None
    candidates: int


@dataclass(frozen=True, slots=True)
class PrivacyRow:
    """The privacy that a training would spend.

    Attributes:
        batch_size: Samples of a logical batch.
        trainers: The columns that spend it.
        spent: Epsilon and the training it belongs to.
    """

    batch_size: int
    trainers: tuple[str, ...]
    spent: PrivacySpent


@dataclass(frozen=True, slots=True)
class Group:
    """Trials that may be compared: same model, dtype, device and so on.

    Attributes:
        title: Its heading.
        settings: The settings all trials share.
        parameters: Parameters of the model.
        trainers: Columns, in order.
        batch_sizes: All batch sizes, ascending.
        seq_lens: All sequence lengths, ascending.
        cells: All trials.
        choices: What to run.
        cost_factors: Costs against `standard`.
        frontier: Memory limits.
        crossovers: Where one trainer overtakes another, decided or not.
        pareto: Trials that no other of the same class and sequence length beats in both memory and throughput.
        denominators: The peaks that MFU and HFU are shares of, in words.
        warnings: Why comparisons within the group may mislead.
        privacy_spent: Epsilon where the matrix requests it, the smallest batch first.
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
    """An environment in which trials ran.

    Attributes:
        settings: Versions, device, host, ...
        trials: The number of trials that ran in it.
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
    """Everything that the report shows.

    Attributes:
        name: Name of the sweep's folder.
        folder: Path of the folder.
        engine: The engine that ran the sweep.
        created: Unix time of the plan.
        totals: Totals of all trials.
        trainers: Totals of each trainer.
        groups: Comparable trials, the group with the most `ok` trials first.
        failures: One for each cause, the most urgent first.
        environments: The most common first.
        preflight: Rows of `preflight.json`.
        warnings: What readers must know before the numbers.
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
