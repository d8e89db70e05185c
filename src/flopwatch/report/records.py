"""The data of a report as frozen dataclasses. The terminal, HTML, Markdown and JSON output are all made from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from flopwatch.records.privacy import PrivacySpent

PrivacyClass: TypeAlias = Literal["not private", "private", "unknown"]
Quantity: TypeAlias = Literal["time", "memory"]


@dataclass(frozen=True, slots=True)
class TrialCell:
    """The measurements of one trial. They are finite and positive, and None unless the outcome is `ok`.

    Trials that differ only in their seeds are one cell of a group, with their mean time and their largest memory.

    Attributes:
        trial: Name of the trial; of several seeds, that of the first one that is `ok`.
        trainer: Column of the trial in tables: its trainer, and settings such as options where they vary.
        privacy: Whether the trainer is differentially private; `unknown` for a user's trainer that does not say so.
        outcome: How the trial ended; `missing` if it has no result yet.
        seconds: Median step time; `low_seconds` and `high_seconds` are the ends of its 95 % interval.
        is_unstable: True if the interval is wide, so that small differences in time mean nothing.
        peak_bytes: Peak of reserved memory on an accelerator, or of the host memory of all processes on a CPU.
        device_bytes: Memory size of the accelerator.
        alloc_retries: How often the allocator had to free its cache; above 0 the trial barely fits.
        tokens_per_s: Tokens per second, including padding; None if samples are not sequences.
        is_lower_bound: True if some ops have no FLOPs formula, so that FLOPs, MFU and HFU are lower bounds.
        why_no_epsilon: Why a private trainer has no finite epsilon; empty if it has one, or nothing speaks against one.
        epsilon: Epsilon of the training that the setting `privacy` describes; None if it is unknown or infinite.
        seeds: Number of trials in this cell, which differ only in their seeds; the means are those of the `ok` ones.
    """

    trial: str
    trainer: str
    privacy: PrivacyClass
    batch_size: int
    seq_len: int
    outcome: str
    seconds: float | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    is_unstable: bool = False
    peak_bytes: int | None = None
    device_bytes: int | None = None
    alloc_retries: int | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    is_lower_bound: bool = False
    why_no_epsilon: str = ""
    epsilon: float | None = None
    seeds: int = 1


@dataclass(frozen=True, slots=True)
class SweepTotals:
    """Totals of the whole sweep.

    Attributes:
        trials: Number of planned trials.
        by_outcome: Number of trials with each outcome; `missing` means that a trial has no result yet.
        trial_seconds: Sum of the durations of all trials and their earlier attempts, also of those that ran at the same
            time.
        wall_seconds: Time from the first start to the last end, by the clocks of the hosts; None if no trial ran.
    """

    trials: int
    by_outcome: Mapping[str, int]
    trial_seconds: float
    wall_seconds: float | None


@dataclass(frozen=True, slots=True)
class TrainerTotals:
    """Totals of one trainer.

    Attributes:
        tried: Number of trials that ran.
        ok: Number of trials that ran to their end.
        out_of_memory: Number of trials that ran out of memory.
        failed: Number of trials that ran and ended in any other way.
        not_run: Number of all other trials: inferred to run out of memory, unsupported, skipped, cancelled or missing.
        success_rate: `ok / tried`; None if no trial ran.
        mean_peak_bytes: Mean peak memory over the `ok` trials whose peak is known.
    """

    trainer: str
    privacy: PrivacyClass
    tried: int
    ok: int
    out_of_memory: int
    failed: int
    not_run: int
    success_rate: float | None
    mean_peak_bytes: float | None
    by_outcome: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Failure:
    """Trials that failed for the same cause, and one of them as an example.

    Attributes:
        cause: Exception, signal or exit code, with numbers and paths replaced so that equal causes match.
        trials: Names of the trials; `count` is their number.
        by_trainer: Number of these trials for each trainer.
        example: Name of the example. The following fields, up to `stacks`, are about this trial.
        reason: Why the trial ended, in one line.
        evidence: Facts from which the outcome was decided, such as the exit code.
        command: Shell command that runs the trial again.
        stacks: Stack traces of its threads.
        advice: What the user can do about the failure.
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
class FrontierPoint:
    """The largest batch that fits in memory, for one trainer and sequence length.

    Attributes:
        largest_ok: Largest batch that ran; None if none ran.
        smallest_oom: Smallest batch that ran out of memory; None if none did.
        is_inferred: True if `smallest_oom` was not run, because a smaller trial had already run out of memory.
        is_monotone: False if some batch ran that is larger than one that ran out of memory.
    """

    trainer: str
    seq_len: int
    largest_ok: int | None
    smallest_oom: int | None
    is_inferred: bool
    is_monotone: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The best configurations at one sequence length, among private or among not private trainers.

    Attributes:
        fastest: The trial with the most samples per second; if others are not measurably slower, the one of them with
            the smallest epsilon.
        tied: The other trials that are not measurably slower, the fastest first.
        lightest: The trial with the least memory among those with at least 90 % of the highest throughput; None if
            that is the fastest one, or if memory is unknown.
        candidates: The number of trials compared. Private trials without epsilon are left out if others have one.
        verdict: Whether the fastest is measurably faster than the others, in words.
        caveats: Reasons to be careful with the verdict. Every form of the report shows them.
    """

    seq_len: int
    privacy: PrivacyClass
    fastest: TrialCell
    tied: tuple[TrialCell, ...]
    lightest: TrialCell | None
    candidates: int
    verdict: str
    caveats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrivacyRow:
    """The privacy budget that a training would spend.

    Attributes:
        batch_size: Samples in a logical batch, which may consist of several micro-batches.
        trainers: The trainers that would spend this budget.
        spent: Epsilon, and the settings of the training for which it was computed.
    """

    batch_size: int
    trainers: tuple[str, ...]
    spent: PrivacySpent


@dataclass(frozen=True, slots=True)
class Group:
    """Trials that can be compared with each other, because they have the same model, dtype, device and resources.

    Attributes:
        settings: The settings that all trials share.
        parameters: Number of parameters of the model.
        trainers: The columns of the tables, in order.
        cells: The measurements of all trials, those of several seeds combined.
        choices: The best configurations at each sequence length.
        frontier: The largest batch that fits, for each trainer and sequence length.
        denominators: The peak FLOP/s of which MFU and HFU are shares, as text.
        warnings: Reasons why comparisons within the group may mislead.
        privacy_spent: Epsilon of each batch size, the smallest first; empty unless the sweep has the setting `privacy`.
    """

    title: str
    settings: Mapping[str, Any]
    parameters: int | None
    trainers: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    seq_lens: tuple[int, ...]
    cells: tuple[TrialCell, ...]
    choices: tuple[Choice, ...]
    frontier: tuple[FrontierPoint, ...]
    denominators: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    privacy_spent: tuple[PrivacyRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Environment:
    """Settings such as versions, device and host, and the number of trials that ran with exactly these settings."""

    settings: Mapping[str, str]
    trials: int


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One row in the table of all trials.

    Attributes:
        group: Place of its group among the groups.
        measured: What it measured, and how it ended.
    """

    name: str
    group: int
    model: str
    dtype: str
    checkpointing: bool
    reason: str
    total_seconds: float | None
    command: str
    trace: str | None
    measured: TrialCell


@dataclass(frozen=True, slots=True)
class SweepSummary:
    """Everything that the report of a sweep shows.

    Attributes:
        name: Name of the sweep's folder; `folder` is its path.
        engine: Where the trials ran: `local`, `ray` or `slurm`.
        created: Unix time at which the sweep was planned.
        groups: Groups of comparable trials, the group with the most `ok` trials first.
        failures: One entry for each cause, the most urgent first.
        environments: The environments in which trials ran, the most common first.
        warnings: What readers must know before they use the numbers.
    """

    name: str
    folder: str
    engine: str | None
    created: float | None
    totals: SweepTotals
    trainers: tuple[TrainerTotals, ...]
    groups: tuple[Group, ...]
    failures: tuple[Failure, ...]
    environments: tuple[Environment, ...]
    warnings: tuple[str, ...] = ()
    rows: tuple[TrialRow, ...] = ()
