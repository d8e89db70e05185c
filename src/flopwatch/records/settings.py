"""The settings of a sweep's trial: each is a field of `TrialSpec` and declares there all that others know about it.

Standard library only.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from flopwatch.decode import Stored
from flopwatch.errors import InputError
from flopwatch.spellings import TRAINERS


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits at which the supervisor process kills a trial.

    Attributes:
        wall_seconds: Longest run time of the trial's worker process. Here and below, None means no limit.
        no_progress_seconds: Longest time without a new phase or step.
        memory_bytes: Host memory of the trial's whole process tree.
    """

    wall_seconds: float | None = 3600.0
    no_progress_seconds: float | None = 600.0
    memory_bytes: int | None = None


VARIED, STEP = "What every sweep varies", "The training step"
LENGTH, PLACE = "How long a trial measures", "Where a trial runs"
SECTIONS = (VARIED, STEP, LENGTH, PLACE)
"""The parts of a matrix, in the order in which `flopwatch init --sweep` writes them."""

_LARGEST = 2**63 - 1
_MODEL = "tiny, small, medium or 1b; the path of a Hugging Face config.json; or module:function."
_COMMAND = "Run a shell command instead of a trainer: 'python t.py --bs {batch_size}'."


@dataclass(frozen=True, slots=True)
class Setting:
    """How the matrix, the commands and the report name and describe a setting of a trial.

    Attributes:
        key: Its key in the matrix. The field's name is understood too, and so are the `aliases`.
        section: One of `SECTIONS`; empty if the key comes after them.
        axis: The values of an axis that the matrix does not name; None if a sweep has one value for all its trials.
        text: What the template of a matrix and the reference page say.
        column: What the column of the report contains; empty without a column of its own.
        column_name: The column's name if it is not that of the field.
        compared: `apart` if the report compares only trials with the same value; `beside` if trials with another value
            get a column of their own, and `named` if the heading of this column always has the value.
        heading: What stands before the value in this heading; empty if it is the field's name.
        word: What stands before the value of an axis in the names of trials; None if it is the field's name.
        flag: Help of the flag of `flopwatch trial` and `fit`, `flags` of that of `flopwatch sweep`; empty without one.
        bounds: The smallest and the largest number; `pattern` is the form of a text.
        since: The first `FORMAT` with it. A later setting that has its default is not in the key of a trial, so that
            earlier results stay valid.
    """

    key: str = ""
    section: str = ""
    axis: tuple[Any, ...] | None = None
    text: str = ""
    column: str = ""
    column_name: str = ""
    compared: Literal["", "apart", "beside", "named"] = ""
    heading: str = ""
    word: str | None = None
    flag: str = ""
    flags: str = ""
    aliases: tuple[str, ...] = ()
    bounds: tuple[int, int] = (1, _LARGEST)
    pattern: str | None = None
    since: int = 1


def _set(*words: Any, **more: Any) -> Mapping[str, Setting]:
    return {"setting": Setting(*words, **more)}


@dataclass(frozen=True, slots=True)
class TrialSpec(Stored):
    """The configuration of one trial.

    Attributes:
        trainer: `standard`, `dpsgd`, `ghost`, `fast`, `package.module:Class`, or `command`.
        model: A preset, the path of a Hugging Face config, or `package.module:function`; unused by a command.
        label: The trainer's name in trial names and tables, such as `DPGhostClippingTrainer`.
        command: The shell command of a `command` trainer, with `{batch_size}`, `{seq_len}` and `{model}` filled in.
        dtype: Compute type of matmuls: `fp32`, or `bf16` by autocast.
        device: `cpu`, `cuda`, ...; `auto` is the accelerator if there is one, else the CPU.
        steps: Measured steps; `warmup_steps` are those before them.
        checkpointing: Whether activations are checkpointed.
        seed: Seed of the weights and of the batch.
        threads: CPU threads of the worker; None uses the cores that the engine assigns to the trial.
        gpus: Accelerators of the trial ; below 1, several trials share one.
        cpus: Cores to reserve, if the engine reserves cores (Slurm, Ray); None means the engine's default.
        options: Further arguments of the trainer, such as `max_grad_norm`.
        trace: Whether one step is recorded as a Kineto trace.
        processes: Worker processes; torchrun starts them if there are several.
        layout: How several processes train together: `ddp` or `fsdp`; None for a single process.
        batch: `package.module:function` that returns the batch; None makes a dummy batch for the model.
        micro_batch_size: Samples per forward pass, with gradient accumulation; None means the whole batch.
        privacy: The full training for which epsilon is computed: `dataset_size` or `sample_rate`, `epochs` or `steps`,
            `delta`, `accountant`, `target_epsilon`; empty for a trainer without differential privacy.
    """

    # fmt: off
    trainer: str = field(metadata=_set(
        "trainers", VARIED, ("standard",), "standard, dpsgd, ghost, fast, or a class `package.module:Class`. {label: "
        "mine, command: 'train.sh {batch_size}'} runs any program, with the trial's values of {batch_size} and "
        "{seq_len} in its arguments.", "standard, dpsgd, ghost, fast, module:Class or command", compared="beside",
        flag="The trainer: standard, dpsgd, ghost, fast or package.module:Class.",
        flags="Trainers: standard, dpsgd, ghost, fast or package.module:Class."))
    model: str = field(metadata=_set(
        "models", VARIED, ("small",), "tiny, small, medium, 1b; for images resnet20-gn, resnet18-gn; the path of a "
        "Hugging Face config.json; `package.module:function`.", "model: preset, config file or module:function",
        compared="apart", word="", aliases=("model_size", "model_sizes"), flag=_MODEL, flags=_MODEL))
    batch_size: int = field(metadata=_set(
        "batch_sizes", VARIED, (4, 8), "Samples per step, in all processes together.", "samples per step",
        flag="Samples per step.", flags="Batch sizes, such as 4,8."))
    seq_len: int = field(metadata=_set(
        "seq_lens", VARIED, (512, 1024), "Positions per sample.", "positions per sample",
        aliases=("seq_length", "seq_lengths"), flag="Sequence length: tokens of each sample.",
        flags="Sequence lengths, such as 512,1024."))
    label: str = field(default="", metadata=_set(column="name of the trainer in the names of trials"))
    command: str | None = field(default=None, metadata=_set(compared="beside", flag=_COMMAND, flags=_COMMAND))
    dtype: str = field(default="fp32", metadata=_set(
        "dtypes", VARIED, ("fp32",), "fp32, or bf16 and fp16 by autocast.", "dtype in which matmuls compute",
        compared="apart", word="", flag="Compute type: fp32 or bf16.", flags="Compute types, such as fp32,bf16."))
    device: str = field(default="auto", metadata=_set(
        "device", PLACE, None, "auto, cpu, cuda, or another device of torch.",
        "device requested in the matrix; auto: the best available", "device_asked", "apart",
        flag="The device, such as cpu or cuda; auto takes the accelerator if there is one."))
    steps: int = field(default=10, metadata=_set(
        "steps", LENGTH, None, "Measured steps.", "requested number of measured steps", compared="beside",
        flag="Measured steps.", flags="Measured steps of each trial."))
    warmup_steps: int = field(default=3, metadata=_set(
        "warmup_steps", LENGTH, None, "Steps before the measured ones.", "steps before the measured ones",
        compared="beside", heading="warmup", aliases=("warm_up_steps",), bounds=(0, _LARGEST)))
    checkpointing: bool = field(default=False, metadata=_set(
        "checkpointing", STEP, (False,), "Gradient checkpointing; [false, true] measures both.",
        "whether gradient checkpointing is on", compared="apart", word="ckpt", flag="Use gradient checkpointing."))
    seed: int = field(default=0, metadata=_set(
        "seeds", STEP, (0,), "Seeds of weights and batch; several repeat each trial.",
        "random seed of the weights and the batch",
        bounds=(-(2**63), 2**64 - 1)))  # those that `torch.manual_seed` accepts
    threads: int | None = field(default=None, metadata=_set(
        "threads", PLACE, None, "Threads of a trial; null leaves the choice to the engine.", "requested CPU threads",
        compared="apart"))
    gpus: float = field(default=0.0, metadata=_set(
        "gpus", PLACE, None, "GPUs of a trial; `gpus: 0.5` shares one.", "requested accelerators",
        compared="apart"))
    cpus: int | None = field(default=None, metadata=_set(
        "cpus", PLACE, None, "CPU cores of a trial; null leaves the choice to the engine.",
        "CPU cores requested from the engine", compared="apart"))
    options: Mapping[str, Any] = field(default_factory=dict, metadata=_set(
        "options", STEP, None, "Options of the trainer, such as {lr: 0.001, max_grad_norm: 1.0, noise_multiplier: "
        "1.0}. A list of values is an axis."))
    trace: bool = field(default=True, metadata=_set("trace", LENGTH, None, "Record one Kineto trace per trial."))
    limits: Limits = field(default_factory=Limits, metadata=_set(
        "limits", "", None, "The limits of a trial. Other keys: `no_progress_seconds` (600 unless the trainer is a "
        "command), and `memory` of the host, such as 16GiB."))
    processes: int = field(default=1, metadata=_set(
        "processes", PLACE, (1,), "Processes of a trial, started by torchrun.", "worker processes", compared="apart"))
    layout: str | None = field(default=None, metadata=_set(
        "layouts", PLACE, (), "How processes train together: ddp or fsdp.",
        "how processes share the training, such as ddp or fsdp", compared="beside", word=""))
    batch: str | None = field(default=None, metadata=_set(
        "batch", STEP, None, "`package.module:function` that makes the batch; null makes it from the model's inputs.",
        "function that makes the batch", pattern=r"^[\w.]+:\w+$"))
    micro_batch_size: int | None = field(default=None, metadata=_set(
        "micro_batch_sizes", STEP, (None,), "Samples in memory at once; null is the whole batch.",
        "samples per forward pass (empty: whole batch)", heading="micro-batch", word="micro",
        compared="named"))  # because it changes memory and time even if it is the same in all trials
    privacy: Mapping[str, Any] = field(default_factory=dict, metadata=_set(
        "privacy", STEP, None, "The private training to compute epsilon for, such as {dataset_size: 50000, epochs: 3, "
        "target_epsilon: 8}."))
    # fmt: on

    @property
    def runs_torchrun(self) -> bool:
        """Whether torchrun starts the workers; a command starts its processes itself."""
        return self.processes > 1 and self.trainer != "command"

    def why_broken(self) -> str | None:
        if self.batch_size < 1 or self.seq_len < 1:
            return f"batch_size={self.batch_size} and seq_len={self.seq_len} must be at least 1"
        return None

    def measured_settings(self) -> dict[str, Any]:
        """The settings that can change what the trial measures: all but `label`, `trace` and `limits`."""
        content = self.to_json()
        for each in fields(self):
            is_later = each.metadata["setting"].since > 1 and content[each.name] == each.default
            if is_later or each.name in ("label", "trace", "limits"):
                del content[each.name]
        return {**content, "memory_bytes": self.limits.memory_bytes}


SETTINGS: Mapping[str, Setting] = {each.name: each.metadata["setting"] for each in fields(TrialSpec)}
"""By the names of the fields, whose order is that of the axes in the names of trials."""

MATRIX_KEYS: Mapping[str, str] = {
    word: setting.key
    for name, setting in SETTINGS.items()
    for word in (name, *setting.aliases)
    if setting.key not in ("", word)
}
"""Other words for keys of a matrix, and the key."""

_IN_THE_REPORT = (
    "trainer label model batch_size seq_len dtype checkpointing seed micro_batch_size batch processes layout "
    "device threads gpus cpus steps warmup_steps"
)
REPORTED: Mapping[str, Setting] = {name: SETTINGS[name] for name in [*_IN_THE_REPORT.split(), *SETTINGS]}
"""The settings in the order of the report's columns and headings."""


def placeholders(spec: TrialSpec) -> dict[str, Any]:
    """What stands for `{name}` in the command of a trial, besides `{trial_dir}`."""
    return {
        "batch_size": spec.batch_size,
        "seq_len": spec.seq_len,
        "model": shlex.quote(spec.model),
        **{name: shlex.quote(str(value)) for name, value in spec.options.items()},
        "dtype": spec.dtype,
        "seed": spec.seed,
        "processes": spec.processes,
        "micro_batch_size": spec.micro_batch_size or spec.batch_size,
    }


def content_key(spec: TrialSpec, environment: Mapping[str, Any]) -> str:
    """A hash of a trial's configuration and environment. A result with the same key need not be measured again.

    >>> spec = TrialSpec("standard", "tiny", 4, 512)
    >>> content_key(spec, {"torch": "2.13.0"}) == content_key(spec, {"torch": "2.14.0"})
    False
    """
    content = json.dumps({"spec": spec.measured_settings(), "environment": dict(environment)}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:20]


# A trainer is named by its class (docs/requirements.md, R23), by a short name, or as `package.module:Class`.

LABELS = {
    "standard": "StandardTrainer",
    "dpsgd": "DPSGDTrainer",
    "ghost": "DPGhostClippingTrainer",
    "fast": "DPFastGradientClippingTrainer",
}
"""The built-in trainers and their class names, which appear in file names and tables."""

PRIVATE = ("dpsgd", "ghost", "fast")
"""The built-in trainers with differential privacy: they clip the gradient of every sample and add noise."""

COMMAND = "command"

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def canonical_trainer(name: str) -> tuple[str, str]:
    """The short name of a trainer in any accepted spelling, and its label in file names and tables.

    >>> canonical_trainer("DPGhostClippingTrainer")
    ('ghost', 'DPGhostClippingTrainer')
    >>> canonical_trainer("dp-sgd")
    ('dpsgd', 'DPSGDTrainer')
    >>> canonical_trainer("my_package.training:Lora")
    ('my_package.training:Lora', 'Lora')
    """
    plain = name.strip()
    if plain == COMMAND:
        return COMMAND, COMMAND
    if ":" in plain:
        if not _PATH.fullmatch(plain):
            raise InputError(
                f"trainer {name!r} is not of the form 'package.module:Class'; give the class's full import path"
            )
        return plain, plain.partition(":")[2]
    short = re.sub(r"[-_ ]", "", plain.lower()).removesuffix("trainer")
    trainer = TRAINERS.get(short, short)
    if trainer not in LABELS:
        import difflib  # imported here, because supervisor processes import this module and start faster without it

        folded = {spelling.lower(): spelling for pair in LABELS.items() for spelling in pair}
        near = difflib.get_close_matches(plain.lower(), folded, n=1)
        hint = f"; did you mean {folded[near[0]]!r}?" if near else "."
        known = f"There are {', '.join(LABELS)} and your own as 'package.module:Class'"
        raise InputError(f"there is no trainer {name!r}{hint} {known}")
    return trainer, LABELS[trainer]


def is_private(trainer: str) -> bool | None:
    """Whether a built-in trainer has differential privacy; None for any other, which may declare it (`Privacy`)."""
    return trainer in PRIVATE if trainer in LABELS else None
