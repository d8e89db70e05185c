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


_LARGEST = 2**63 - 1
_LARGEST_SEED = 2**64 - 1  # of those that `torch.manual_seed` accepts


@dataclass(frozen=True, slots=True)
class Setting:
    """How the matrix, the commands and the report name and describe a setting of a trial.

    The name of its field is its key in the matrix, its flag, its `KEY=VALUE` and its column.

    Attributes:
        text: What the help, the template of a matrix and the reference page say; empty if the matrix has no such key.
        axis: The values of an axis that the matrix does not name; None if a sweep has one value for all its trials.
        has_flag: Whether `sweep`, `trial` and `fit` have a flag for it; without one it is written as `KEY=VALUE`.
        column: What the column of the report contains; empty without a column of its own.
        column_name: The column's name if it is not that of the field.
        compared: `apart` if the report compares only trials with the same value; `beside` if trials with another value
            get a column of their own, and `named` if the heading of this column always has the value.
        heading: What stands before the value in this heading; empty if it is the field's name.
        word: What stands before the value of an axis in the names of trials; None if it is the field's name.
        bounds: The smallest and the largest number; `pattern` is the form of a text.
        since: The first `FORMAT` with it. A later setting that has its default is not in the key of a trial, so that
            earlier results stay valid.
    """

    text: str = ""
    axis: tuple[Any, ...] | None = None
    column: str = ""
    column_name: str = ""
    compared: Literal["", "apart", "beside", "named"] = ""
    has_flag: bool = False
    heading: str = ""
    word: str | None = None
    bounds: tuple[int, int] = (1, _LARGEST)
    pattern: str | None = None
    since: int = 1


def _set(text: str = "", axis: tuple[Any, ...] | None = None, column: str = "", **more: Any) -> Mapping[str, Setting]:
    return {"setting": Setting(text, axis, column, **more)}


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
        gpus: Accelerators of the trial; 0 leaves the choice to the engine.
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
        "standard, dpsgd, ghost, fast, or a class package.module:Class.", ("standard",),
        "standard, dpsgd, ghost, fast, module:Class or command", compared="beside", has_flag=True))
    model: str = field(metadata=_set(
        "tiny, small, medium, 1b; for images resnet20-gn, resnet18-gn; the path of a Hugging Face config.json; "
        "or package.module:function.", ("small",), "model: preset, config file or module:function",
        compared="apart", word="", has_flag=True))
    batch_size: int = field(metadata=_set(
        "Samples per step, in all processes together.", (4, 8), "samples per step", has_flag=True))
    seq_len: int = field(metadata=_set("Positions per sample.", (512, 1024), "positions per sample", has_flag=True))
    label: str = field(default="", metadata=_set(column="name of the trainer in the names of trials"))
    command: str | None = field(default=None, metadata=_set(
        "A shell command as a trainer, such as 'python t.py --bs {batch_size}'.", compared="beside", has_flag=True))
    dtype: str = field(default="fp32", metadata=_set(
        "fp32, or bf16 and fp16 by autocast.", ("fp32",), "dtype in which matmuls compute",
        compared="apart", word="", has_flag=True))
    device: str = field(default="auto", metadata=_set(
        "auto, cpu, cuda, or another device of torch; auto is the accelerator if there is one.", None,
        "device requested in the matrix; auto: the best available", column_name="device_asked", compared="apart"))
    steps: int = field(default=10, metadata=_set(
        "Measured steps of a trial.", None, "requested number of measured steps", compared="beside", has_flag=True))
    warmup_steps: int = field(default=3, metadata=_set(
        "Steps before the measured ones.", None, "steps before the measured ones", compared="beside",
        heading="warmup", bounds=(0, _LARGEST)))
    checkpointing: bool = field(default=False, metadata=_set(
        "Gradient checkpointing; [false, true] measures both.", (False,), "whether gradient checkpointing is on",
        compared="apart", word="ckpt"))
    seed: int = field(default=0, metadata=_set(
        "Seed of weights and batch. With several, the report shows mean times.", (0,),
        "random seed of the weights and the batch", bounds=(-(2**63), _LARGEST_SEED)))
    threads: int | None = field(default=None, metadata=_set(
        "Threads of a trial; null leaves the choice to the engine.", None, "requested CPU threads", compared="apart"))
    gpus: int = field(default=0, metadata=_set(
        "GPUs of a trial; 0 leaves the choice to the engine.", None, "requested accelerators", compared="apart",
        bounds=(0, _LARGEST)))
    cpus: int | None = field(default=None, metadata=_set(
        "CPU cores of a trial; null leaves the choice to the engine.", None, "CPU cores requested from the engine",
        compared="apart"))
    options: Mapping[str, Any] = field(default_factory=dict, metadata=_set(
        "Options of the trainer, such as {lr: 0.001, max_grad_norm: 1.0, noise_multiplier: 1.0}. A list of values is "
        "an axis."))
    trace: bool = field(default=True, metadata=_set("Record one Kineto trace per trial."))
    limits: Limits = field(default_factory=Limits, metadata=_set())
    processes: int = field(default=1, metadata=_set(
        "Processes of a trial, started by torchrun.", (1,), "worker processes", compared="apart"))
    layout: str | None = field(default=None, metadata=_set(
        "How processes train together: ddp or fsdp.", (), "how processes share the training, such as ddp or fsdp",
        compared="beside", word=""))
    batch: str | None = field(default=None, metadata=_set(
        "package.module:function that makes the batch; null makes it from the model's inputs.", None,
        "function that makes the batch", pattern=r"^[\w.]+:\w+$"))
    micro_batch_size: int | None = field(default=None, metadata=_set(
        "Samples in memory at once; null is the whole batch.", (None,),
        "samples per forward pass (empty: whole batch)", heading="micro-batch", word="micro",
        compared="named"))  # because it changes memory and time even if it is the same in all trials
    privacy: Mapping[str, Any] = field(default_factory=dict, metadata=_set(
        "The private training to compute epsilon for, such as {dataset_size: 50000, epochs: 3, target_epsilon: 8}."))
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
