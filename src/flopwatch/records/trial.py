"""The configuration and the result of a sweep's trial, and the names of trainers. Standard library only.

`sweep` writes these records and `report` reads them; the two packages do not import each other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from flopwatch.decode import Stored
from flopwatch.records.privacy import Privacy, PrivacySpent
from flopwatch.records.settings import (
    COMMAND,
    LABELS,
    PRIVATE,
    Limits,
    TrialSpec,
    canonical_trainer,
    content_key,
    is_private,
)

__all__ = [
    "AFTER_THE_STEPS", "COMMAND", "FAILED", "FEWEST_STEPS", "FORMAT", "LABELS", "NOT_RUN", "OUT_OF_MEMORY", "PRIVATE",
    "UNSETTLED", "UNSTABLE_WIDTH", "HostMethod", "Limits", "Measured", "MemoryUse", "Outcome", "StepCost", "StepTimes",
    "TrialJob", "TrialResult", "TrialSpec", "canonical_trainer", "content_key", "is_private", "is_trial_name",
]  # fmt: skip

FORMAT = 1
"""The format of spec.json and result.json. A file with a newer format is not read."""

Outcome: TypeAlias = Literal[
    "ok", "oom_device", "oom_host", "crash", "timeout", "hang", "error",
    "unsupported", "invalid", "cancelled", "lost", "oom_inferred", "skipped",
]  # fmt: skip
"""How a trial ended.

- `ok`: It ran to its end and was measured.
- `oom_device`, `oom_host`: The memory of the accelerator or of the host, or the limit set on it, did not suffice.
- `crash`: It was killed by a signal that flopwatch did not send.
- `timeout`: It took longer than `Limits.wall_seconds`.
- `hang`: It made no progress for longer than `Limits.no_progress_seconds`.
- `error`: It raised an exception, or exited with a status other than 0.
- `unsupported`: The trainer cannot train the model.
- `invalid`: The configuration itself cannot be used.
- `cancelled`: The user stopped it, or the runner of the sweep ended.
- `lost`: Its supervisor process died, as after a node failure or a preemption.
- `oom_inferred`: It was not run, because a smaller trial was out of memory.
- `skipped`: It was not run, because the smallest trial of its kind could not begin.
"""

FAILED: tuple[Outcome, ...] = ("crash", "timeout", "hang", "error", "invalid", "lost")
"""The outcomes that `--only failed` runs again. Out of memory is a result, not a failure."""

HostMethod: TypeAlias = Literal["high_water", "samples", "rss"]
"""How host memory was measured.

- `high_water`: The kernel's high-water mark of a single process.
- `samples`: The sum over several processes, sampled several times a second.
- `rss`: Like `samples`, but shared pages count once per process, because the system does not report PSS.
"""

OUT_OF_MEMORY: tuple[Outcome, ...] = ("oom_device", "oom_host", "oom_inferred")

UNSETTLED: tuple[Outcome, ...] = ("cancelled", "lost")
"""Resuming a sweep always repeats trials with these outcomes, which do not depend on the trial's configuration."""


AFTER_THE_STEPS = ("memory", "flops", "privacy", "trace")
"""Phases after the training steps. A failure in one of them does not change the trial's outcome."""

NOT_RUN: tuple[Outcome, ...] = ("oom_inferred", "skipped", "unsupported")


UNSTABLE_WIDTH = 0.05
"""Step times are unstable if the interval of their median is wider than this share of the median."""

FEWEST_STEPS = 6
"""Fewer steps have no 95 % interval: the range of 5 steps contains the true median with a probability of only 94 %."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Statistics of the measured steps' times in seconds, without warm-up.

    Attributes:
        median: The median time; `low` and `high` are its 95 % bootstrap interval.
        p10: The 10th percentile; `p90` and `p99` likewise.
        first: Time of the first warm-up step, which includes compilation and allocation.
        unstable: True if the interval is wider than 5 % of the median; small differences are then not significant.
    """

    count: int
    median: float
    low: float
    high: float
    p10: float
    p90: float
    p99: float
    first: float
    unstable: bool

    def why_broken(self) -> str | None:
        return None if min(self.median, self.low, self.high) > 0 else "a step time is 0 seconds or less"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Peak memory of a trial in bytes; a value that could not be measured is None.

    Attributes:
        allocated_bytes: Held by tensors on the accelerator.
        reserved_bytes: Reserved by torch's allocator on the accelerator.
        alloc_retries: How often torch's allocator had to free its cache to get memory; above 0, the trial barely fits.
        device_bytes: Total memory of the accelerator.
        baseline_bytes: Host memory of the worker before the model was built.
        by_phase: Peak in `build`, `forward`, `backward` and `optimizer`: memory allocated on the accelerator, or on a
            CPU the host memory of the worker process.
        host_bytes: Host memory of the trial's process tree from building the model to the last step, with each page
            counted once (PSS); for a command, over its whole run time.
        host_method: How `host_bytes` was measured: a `HostMethod`, or a word that a later version added.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    alloc_retries: int | None = None
    device_bytes: int | None = None
    baseline_bytes: int | None = None
    by_phase: Mapping[str, int] = field(default_factory=dict)
    host_bytes: int | None = None
    host_method: str | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The peak that decides whether a trial fits: reserved memory on an accelerator, host memory on a CPU."""
        return self.reserved_bytes if self.reserved_bytes is not None else self.host_bytes

    def why_broken(self) -> str | None:
        sizes = (self.allocated_bytes, self.reserved_bytes, self.device_bytes, self.host_bytes, self.baseline_bytes)
        return "an amount of memory is negative" if any(size is not None and size < 0 for size in sizes) else None


@dataclass(frozen=True, slots=True)
class StepCost:
    """FLOPs, MFU and HFU of one step.

    Attributes:
        model_flops: FLOPs of the step with the standard trainer, so that trainers can be compared.
        hardware_flops: FLOPs that this trainer executes, including the second passes of DP-SGD.
        method: How the model FLOPs were counted; `coverage` is the share of matmul-like op calls that had a formula.
        attention: `full` or `causal`.
        is_lower_bound: True if `coverage` is below 1, so that the true number of FLOPs is higher.
        peak: The peak that MFU is relative to (`Peak.to_json()`); None if it is unknown.
        mfu: model FLOPs / (median seconds x peak), and `hfu` of the hardware FLOPs; None without a peak.
        notes: Fallbacks that were used, and facts that could not be determined.
    """

    model_flops: int | None = None
    hardware_flops: int | None = None
    method: str | None = None
    attention: str = "full"
    coverage: float | None = None
    is_lower_bound: bool = False
    peak: Mapping[str, Any] | None = None
    mfu: float | None = None
    hfu: float | None = None
    notes: tuple[str, ...] = ()

    def why_broken(self) -> str | None:
        peak = self.peak.get("flops_per_s") if self.peak else 1.0
        is_number = isinstance(peak, int | float) and not isinstance(peak, bool) and 0 < peak < float("inf")
        return None if is_number else f"the peak {str(peak)[:40]!r} is not a positive number"


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured in a trial. A trial that failed has the values that were measured before it failed.

    Attributes:
        steps: Statistics of the step times; None if no step was measured.
        phase_seconds: Median seconds of `forward`, `backward` and `optimizer`.
        samples_per_s: Batch size divided by the median step time.
        tokens_per_s: Tokens per step divided by the median step time; None if samples are not sequences.
        cost: FLOPs and MFU; None if they were not counted.
        trace: Path of the Kineto trace, relative to the sweep's folder.
        extra: Further numbers by name, such as those a command reported.
        privacy: The privacy budget; None without differential privacy, or if `TrialSpec.privacy` is empty.
        declared_privacy: How the trainer says that it is private; None if it does not say so.
        not_measured: Phases after the training steps that failed (`memory`, `flops`, `trace`), with the reason; or
            `reported numbers`, if the `metrics.json` of a command cannot be used. The other measurements stay valid.
    """

    parameters: int | None = None
    steps: StepTimes | None = None
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    memory: MemoryUse = field(default_factory=MemoryUse)
    cost: StepCost | None = None
    trace: str | None = None
    extra: Mapping[str, float] = field(default_factory=dict)
    privacy: PrivacySpent | None = None
    not_measured: Mapping[str, str] = field(default_factory=dict)
    declared_privacy: Privacy | None = None


@dataclass(frozen=True, slots=True)
class TrialResult(Stored):
    """The result of a trial.

    Attributes:
        name: The trial's name within its sweep, such as `StandardTrainer_bs4_seq512`.
        key: Hash of the trial's configuration and environment.
        reason: One line that explains the outcome.
        evidence: The facts behind the outcome: `killed_by` (only if flopwatch killed the trial), `exit_code`, `signal`,
            `exception`, `oom_kills`, `memory_limit`, `hint`; `state` or `error` from a scheduler; `rank` if there are
            several processes.
        phase: The phase in which the trial ended: `start`, `import`, `build`, `warmup`, `measure`, `memory`, `flops`,
            `privacy`, `trace` or `done`.
        step: The last step that the trial began in this phase; None if the phase has no steps.
        unix_time: When the trial started; `seconds` is the run time of its worker. None if it did not run.
        environment: Versions, host, device, clocks, git.
        command: The command that runs only this trial again, from the sweep's folder.
        log_tail: The last lines of its log.
        stacks: The stacks of all threads, if the trial was killed because it made no progress.
        earlier_attempts: The attempts that were lost and repeated in the same run of the sweep, oldest first, each with
            `outcome`, `reason`, `host`, `unix_time`, `seconds` and `folder`.
        attempt: A random name of the attempt, as in `spec.json`. A result of an earlier attempt has another name.
    """

    name: str
    key: str
    spec: TrialSpec
    outcome: Outcome
    reason: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    phase: str = "start"
    step: int | None = None
    measured: Measured = field(default_factory=Measured)
    unix_time: float | None = None
    seconds: float | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    log_tail: str = ""
    stacks: str = ""
    format: int = FORMAT
    earlier_attempts: tuple[Mapping[str, Any], ...] = ()
    attempt: str = ""

    def why_broken(self) -> str | None:
        return _why_no_name(self.name)


@dataclass(frozen=True, slots=True)
class TrialJob(Stored):
    """The content of `spec.json`: a trial to run.

    Attributes:
        key: Hash of the trial's configuration and environment.
        environment: What is known before the trial runs, such as versions. The devices of the host that submits the
            trial are not included, because the trial may run on another host.
        cwd: The folder in which the sweep was started; paths of trainers, config files and scripts are relative to it.
        attempt: A random name of this attempt. A late supervisor that finds another name here does not run the trial.
        earlier_attempts: As in `TrialResult`.
    """

    spec: TrialSpec
    name: str
    key: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    cwd: str | None = None
    format: int = FORMAT
    attempt: str = ""
    earlier_attempts: tuple[Mapping[str, Any], ...] = ()

    def why_broken(self) -> str | None:
        return _why_no_name(self.name)


def _why_no_name(name: str) -> str | None:
    return None if is_trial_name(name) else f"the name {name[:40]!r} cannot be the name of a trial"


def is_trial_name(name: str) -> bool:
    """Whether `name` can be the name of a trial, and so of a folder in `trials/`.

    >>> is_trial_name("standard_bs1_seq8"), is_trial_name("../x")
    (True, False)
    """
    return name not in ("", ".", "..") and "/" not in name and name.isprintable() and len(name.encode()) < 256
