"""A trial's configuration and its result: frozen records with a JSON form. Standard library only: supervisors use them.

`sweep` writes these records and `report` reads them; the two packages do not import each other.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from flopwatch.records.reading import MAY_BE_INFINITE, read_record

FORMAT = 1
"""The format of spec.json and result.json. A file with a newer format is not read."""

Outcome: TypeAlias = Literal[
    "ok",  # ran to its end and was measured
    "oom_device",  # the accelerator's memory did not suffice
    "oom_host",  # the host's memory, or the limit set on it, did not suffice
    "crash",  # ended by a signal that flopwatch did not send
    "timeout",  # took longer than the wall limit
    "hang",  # made no progress for longer than the no-progress limit
    "error",  # raised an exception, or exited with a status other than 0
    "unsupported",  # this trainer cannot train this model
    "invalid",  # the configuration itself cannot be used
    "cancelled",  # stopped by the user, or with the runner
    "lost",  # its supervisor vanished: node failure, preemption
    "oom_inferred",  # not run, because a smaller trial was out of memory
    "skipped",  # not run, because a rule of the sweep excludes it
]

FAILED: tuple[Outcome, ...] = ("crash", "timeout", "hang", "error", "invalid", "lost")
"""What `--only failed` runs again. Out of memory is a result, and every resume runs cancelled trials again."""

HostMethod: TypeAlias = Literal[
    "high_water",  # the kernel's high-water mark of a single process, which misses no moment
    "samples",  # the sum over several processes, sampled several times a second
    "rss",  # as samples, but shared pages count once per process, because this system does not report PSS
]

OUT_OF_MEMORY: tuple[Outcome, ...] = ("oom_device", "oom_host", "oom_inferred")

UNSETTLED: tuple[Outcome, ...] = ("cancelled", "lost", "skipped")
"""Every resume runs these again, because they say nothing about the configuration."""

AFTER_THE_STEPS = ("memory", "flops", "privacy", "trace")
"""Phases in which flopwatch measures, after the training steps: failing there does not fail the trial."""

NOT_RUN: tuple[Outcome, ...] = ("oom_inferred", "skipped", "unsupported")


@dataclass(frozen=True, slots=True)
class Limits:
    """When a supervisor ends its trial.

    Attributes:
        wall_seconds: Longest life of the worker; None is no limit.
        no_progress_seconds: Longest time without a new phase or step; None is no limit.
        memory_bytes: Host memory of the trial's whole process tree; None is no limit.
    """

    wall_seconds: float | None = 3600.0
    no_progress_seconds: float | None = 600.0
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """One configuration.

    Attributes:
        trainer: `standard`, `dpsgd`, `ghost`, `fast`, `package.module:Class`, or `command`.
        model: A preset, the path of a Hugging Face config, or `package.module:function`; unused by a command.
        batch_size: Samples per step.
        seq_len: Positions per sample.
        label: The trainer's name in trial names and tables, such as `DPGhostClippingTrainer`.
        command: The shell command of a `command` trainer, with `{batch_size}`, `{seq_len}` and `{model}` filled in.
        dtype: What matmuls compute in: `fp32`, or `bf16` by autocast.
        device: `cpu`, `cuda`, ...; `auto` is the accelerator if there is one.
        steps: Measured steps.
        warmup_steps: Steps before the measured ones.
        checkpointing: With gradient checkpointing.
        seed: Seed of the weights and of the batch.
        threads: CPU threads of the worker; None leaves it to the slot.
        gpus: Accelerators of the trial on each of its nodes; a fraction shares one.
        cpus: Cores the trial asks of an engine that reserves them; None is the engine's default.
        options: Further arguments of the trainer, such as `max_grad_norm`.
        trace: Whether one step is recorded as a Kineto trace.
        limits: When it is ended.
        nodes: Machines of the trial; above 1 its processes are started by torchrun on each.
        processes: Worker processes on each node.
        layout: How several processes share the training: `ddp` or `fsdp`; None for a single process.
        batch: `package.module:function` that makes the batch; None makes one from the model's inputs.
        micro_batch_size: Samples that are in memory at once; None is the whole batch.
        privacy: The training whose epsilon is computed: `dataset_size` or `sample_rate`, `epochs` or `steps`, `delta`,
            `accountant`, `target_epsilon`; empty for a trainer that is not private.
    """

    trainer: str
    model: str
    batch_size: int
    seq_len: int
    label: str = ""
    command: str | None = None
    dtype: str = "fp32"
    device: str = "auto"
    steps: int = 10
    warmup_steps: int = 3
    checkpointing: bool = False
    seed: int = 0
    threads: int | None = None
    gpus: float = 0.0
    cpus: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    trace: bool = True
    limits: Limits = field(default_factory=Limits)
    nodes: int = 1
    processes: int = 1
    layout: str | None = None
    batch: str | None = None
    micro_batch_size: int | None = None
    privacy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Processes of the whole trial."""
        return self.nodes * self.processes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "TrialSpec":
        """Build it from JSON. Unknown fields are ignored; raises BrokenRecordError for wrong or missing ones."""
        return read_record(cls, content)

    def why_broken(self) -> str | None:
        if self.batch_size < 1 or self.seq_len < 1:
            return f"it has a batch of {self.batch_size} and a length of {self.seq_len}; both are at least 1"
        return None

    def measured_settings(self) -> dict[str, Any]:
        """The settings that change the measurement; labels and time limits do not."""
        content = self.to_json()
        for name in ("label", "trace", "limits"):
            del content[name]
        # Settings added after 0.1.0 count only if they are used, so that the keys of older sweeps do not change and
        # their trials are not measured again.
        for name, value in _LATER_SETTINGS.items():
            if content[name] == value:
                del content[name]
        return {**content, "memory_bytes": self.limits.memory_bytes}


_LATER_SETTINGS: Mapping[str, Any] = {
    "nodes": 1,
    "processes": 1,
    "layout": None,
    "batch": None,
    "micro_batch_size": None,
    "privacy": {},
}


def content_key(spec: TrialSpec, environment: Mapping[str, Any]) -> str:
    """The trial's identity: a hash of its configuration and of its environment.

    >>> spec = TrialSpec("standard", "tiny", 4, 512)
    >>> content_key(spec, {"torch": "2.13.0"}) == content_key(spec, {"torch": "2.14.0"})
    False
    """
    import hashlib  # takes 5 ms, and supervisors do not need it

    content = json.dumps({"spec": spec.measured_settings(), "environment": dict(environment)}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the measured steps, without warm-up.

    Attributes:
        count: Measured steps.
        median: Their median; `low` and `high` are its 95 % bootstrap interval.
        p10: Tenth percentile, and so on.
        first: The very first step, with compilation and allocation.
        unstable: True if the interval is wider than 5 % of the median, so that small differences are not significant.
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
        return None if min(self.median, self.low, self.high) > 0 else "it has steps of 0 seconds or less"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Peak memory in bytes; None if the device does not report it.

    Attributes:
        allocated_bytes: Held by tensors on the accelerator.
        reserved_bytes: Reserved by torch's allocator on the accelerator.
        alloc_retries: How often the allocator had to free its cache first; above 0 the trial barely fits.
        device_bytes: Total memory of the accelerator.
        rss_bytes: In sweeps of 0.1.0, before `host_bytes`: resident memory, with shared pages counted once per process.
        baseline_bytes: Host memory of the worker before the model was built.
        by_phase: Peak in `build`, `forward`, `backward`, `optimizer`: allocated on an accelerator, host memory of the
            worker's own process on a CPU.
        host_bytes: Host memory of the trial's process tree from building the model to the last step, with each page
            counted once (PSS); for a command over its whole life.
        host_method: How it was measured, a `HostMethod`; later versions may have others.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    alloc_retries: int | None = None
    device_bytes: int | None = None
    rss_bytes: int | None = None
    baseline_bytes: int | None = None
    by_phase: Mapping[str, int] = field(default_factory=dict)
    host_bytes: int | None = None
    host_method: str | None = None

    @property
    def host_peak_bytes(self) -> int | None:
        """Host memory; for older sweeps their resident memory."""
        return self.host_bytes if self.host_bytes is not None else self.rss_bytes

    @property
    def peak_bytes(self) -> int | None:
        """The figure that decides whether it fits: reserved on an accelerator, host memory on a CPU."""
        return self.reserved_bytes if self.reserved_bytes is not None else self.host_peak_bytes

    def why_broken(self) -> str | None:
        sizes = (
            self.allocated_bytes,
            self.reserved_bytes,
            self.device_bytes,
            self.host_peak_bytes,
            self.baseline_bytes,
        )
        return "it has a negative amount of memory" if any(size is not None and size < 0 for size in sizes) else None


@dataclass(frozen=True, slots=True)
class StepCost:
    """FLOPs of one step.

    Attributes:
        model_flops: FLOPs of the standard training step, whichever trainer ran.
        hardware_flops: FLOPs that this trainer executes, including second passes of DP-SGD.
        method: How the model FLOPs were found.
        attention: `full` or `causal`.
        coverage: Share of the matmul-like op calls that had a formula.
        is_lower_bound: True when some had none.
        peak: The denominator (`Peak.to_json()`); None if it is unknown.
        mfu: model FLOPs / (median seconds x peak); None without a peak.
        hfu: The same with hardware FLOPs.
        notes: What a reader must know.
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
        return None if is_number else f"its peak is {str(peak)[:40]!r} FLOP/s"


@dataclass(frozen=True, slots=True)
class PrivacySpent:
    """The privacy budget that a training of this many steps spends, by one of Opacus's accountants.

    Attributes:
        epsilon: Epsilon for `delta`; None if it cannot be computed, and `note` says why.
        delta: Probability that epsilon is exceeded.
        noise_multiplier: Standard deviation of the noise over the clipping bound.
        sample_rate: Probability that a sample is in a batch.
        steps: Steps of the whole training, not of the trial.
        accountant: `rdp`, `prv` or `gdp`.
        note: What a reader must know, such as a warning of Opacus's.
    """

    epsilon: float | None = field(metadata=MAY_BE_INFINITE)
    delta: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    accountant: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a trial, up to where it ended.

    Attributes:
        parameters: Number of the model's parameters.
        steps: Times of its steps; None before the first measured one.
        phase_seconds: Median seconds of `forward`, `backward` and `optimizer`.
        samples_per_s: Batch size over the median.
        tokens_per_s: Positions over the median; None where samples are not sequences.
        memory: Peak memory.
        cost: FLOPs and MFU; None if they were not counted.
        trace: The Kineto trace, relative to the sweep's folder.
        extra: Further numbers by name, such as those a command reported.
        privacy: The privacy budget; None for a training that is not private, or if `privacy` was not given.
        not_measured: Phases after the steps that failed (`memory`, `flops`, `trace`), with the reason. The trial's
            other measurements stay valid.
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

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Measured":
        """Build it from JSON; raises BrokenRecordError for wrong or missing fields."""
        return read_record(cls, content)


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial.

    Attributes:
        name: The trial's name within its sweep, such as `StandardTrainer_bs4_seq512`.
        key: Hash of its configuration and its environment.
        spec: Its configuration.
        outcome: One of the words of `Outcome`.
        reason: One line that explains the outcome.
        evidence: The facts behind the outcome: `killed_by` (only if flopwatch killed it), `exit_code`, `signal`,
            `exception`, `oom_kills`, `memory_limit`, `hint`; from a scheduler `state` or `error`; with several
            processes `rank`.
        phase: Where it was: `start`, `import`, `build`, `warmup`, `measure`, `memory`, `flops`, `privacy`, `trace`,
            `done`.
        step: The last step it began in that phase; None outside of steps.
        measured: Its measurements until then.
        unix_time: When it began; None if it did not run.
        seconds: From start to end of the worker; None if it did not run.
        environment: Versions, host, device, clocks, git.
        command: The command that runs only this trial again, from the sweep's folder.
        log_tail: The last lines of its log.
        stacks: The stacks of all threads when it was ended because it made no progress.
        earlier_attempts: How attempts before this one ended, oldest first: `outcome`, `reason`, `host`, `unix_time`,
            `seconds`, `folder`; only those that were lost and tried again in the same run of the sweep.
        attempt: The token of the attempt, as in `spec.json`; it identifies late results of earlier attempts.
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "TrialResult":
        """Build it from JSON; raises BrokenRecordError for wrong or missing fields.

        Negative and absurd durations become None: earlier versions used the system's clock, which may jump.
        """
        result = read_record(cls, content)
        is_absurd = result.seconds is not None and not 0 <= result.seconds < _LONGEST_LIFE_SECONDS
        return replace(result, seconds=None) if is_absurd else result

    def why_broken(self) -> str | None:
        return None if is_trial_name(self.name) else f"its name {self.name[:40]!r} cannot be the name of a trial"


@dataclass(frozen=True, slots=True)
class TrialJob:
    """What `spec.json` holds: a trial to run.

    Attributes:
        spec: Its configuration.
        name: Its name within the sweep.
        key: Hash of its configuration and of what it runs on.
        environment: What is known before it runs: versions and sources, but no devices of the submitting host.
        cwd: Where the sweep was started. Trainers, config files and scripts are named relative to it.
        attempt: Token of this attempt. A supervisor that starts late sees by it that the trial was placed again.
        retries: How often it may be tried again.
        earlier_attempts: As in `TrialResult`.
    """

    spec: TrialSpec
    name: str
    key: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    cwd: str | None = None
    format: int = FORMAT
    attempt: str = ""
    retries: int = 0
    earlier_attempts: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def why_broken(self) -> str | None:
        return None if is_trial_name(self.name) else f"its name {self.name[:40]!r} cannot be the name of a trial"


_LONGEST_LIFE_SECONDS = 10 * 365 * 86400.0


def is_trial_name(name: str) -> bool:
    """Whether it can be the name of a folder under `trials`.

    >>> is_trial_name("standard_bs1_seq8"), is_trial_name("../x")
    (True, False)
    """
    return name not in ("", ".", "..") and "/" not in name and name.isprintable() and len(name.encode()) < 256
