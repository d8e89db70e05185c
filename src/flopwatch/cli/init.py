"""`flopwatch init`: writes a YAML file with every setting of the monitor or of a sweep, for the user to edit."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click

from flopwatch.cli import argument, flag
from flopwatch.errors import InputError


def init(
    file: Annotated[
        Path | None,
        argument("The file to write. Default: flopwatch.yaml, or sweep.yaml.", "[FILE]"),
    ] = None,
    sweep: Annotated[bool, flag("Write the settings of a sweep instead of those of the monitor.", "--sweep")] = False,
    force: Annotated[bool, flag("Replace the file if it exists.", "--force")] = False,
) -> None:
    """Write a YAML file in which every setting is explained and has its default."""
    target = file or Path("sweep.yaml" if sweep else "flopwatch.yaml")
    _write(target, SWEEP if sweep else monitor_template(), replace=force)
    name = shlex.quote(str(target))
    use = f"flopwatch sweep {name} --dry-run" if sweep else f"flopwatch run --config {name} train.py"
    click.echo(f"Wrote {target}. Use it with: {use}")


def _write(target: Path, text: str, *, replace: bool) -> None:
    try:
        with target.open("w" if replace else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise InputError(f"{target} exists; name another file, or add --force to replace it") from None
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; name another file") from None


_MONITOR_HEAD = """\
# Settings of flopwatch's monitor. Each has its default; remove the `#` before a setting to change it.
#   flopwatch run --config flopwatch.yaml train.py
#   flopwatch.TrainingMonitor("outputs", config="flopwatch.yaml")
flopwatch:
"""

_MONITOR_GROUPS = {
    "The peak that MFU is compared with": ("peak_tflops", "dtype", "attention"),
    "Where rows are written": ("sinks", "sink_options", "logging_rank"),
    "How often rows are written, and what they contain": (
        *("log_every", "log_seconds", "detailed_log_every", "reduced_logging", "local_log_every", "local_log_seconds"),
        *("log_dataset_metrics", "dataset_metrics_every", "warm_up_steps", "total_steps"),
    ),
    "Batches": ("batch_size", "seq_length", "data_parallel_size"),
    "How FLOPs are found": (
        *("mode", "flops_profile_freq", "phase_frequencies", "recalibration_frequency", "initial_profiling"),
        "calibration_enabled",
    ),
}
"""Settings that belong together. The template lists all others under "Other settings"."""


def monitor_template() -> str:
    """The text of the monitor's configuration file, made from the fields of `MonitorConfig`."""
    from flopwatch.monitor.config import MonitorConfig

    fields = MonitorConfig.model_fields
    defaults = MonitorConfig.model_validate({}).model_dump(mode="json")
    grouped = {name for names in _MONITOR_GROUPS.values() for name in names}
    groups = {**_MONITOR_GROUPS, "Other settings": tuple(name for name in fields if name not in grouped)}
    lines: list[str] = []
    for title, names in groups.items():
        lines += ["", f"  # {title}"]
        settings = [_yaml(name, defaults[name]) for name in names]
        width = max(map(len, settings))
        lines += [
            f"  #{setting:<{width}}  # {' '.join(filter(None, [field.description, _choices(field.annotation)]))}"
            for field, setting in zip((fields[name] for name in names), settings, strict=True)
        ]
    return _MONITOR_HEAD + "\n".join(lines) + "\n"


def _yaml(name: str, value: Any) -> str:
    """A line of YAML.

    >>> _yaml("sinks", ["console"]), _yaml("batch_size", None)
    ('sinks: [console]', 'batch_size: null')
    """
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return f"{name}: {text.removesuffix('...' + chr(10)).strip()}"


def _choices(annotation: Any) -> str | None:
    """The values of a setting that has only a few.

    >>> _choices(Literal["full", "causal"])
    'One of: full, causal.'
    """
    return f"One of: {', '.join(get_args(annotation))}." if get_origin(annotation) is Literal else None


SWEEP = """\
# The matrix of a sweep: every list is an axis, and every combination of their values is a trial. Each setting has its
# default; remove the `#` before a setting to change it.
#   flopwatch sweep sweep.yaml --dry-run    shows the trials
#   flopwatch sweep sweep.yaml              measures them
#   flopwatch report flopwatch-sweep        compares the results

# standard, dpsgd, ghost, fast, or a class `package.module:Class`. {label: mine, command: "train.sh {batch_size}"} runs
# any program, with the trial's values of {batch_size} and {seq_len} in its arguments.
trainers: [standard]
# tiny, small, medium, 1b; for images resnet20-gn, resnet18-gn; the path of a Hugging Face config.json;
# `package.module:function`.
models: [small]
# Samples per step, in all processes of a trial together.
batch_sizes: [4, 8]
# Positions per sample.
seq_lens: [512, 1024]
# fp32, or bf16 and fp16 by autocast.
dtypes: [fp32]

# ---- The training step
# Gradient checkpointing; [false, true] measures both.
#checkpointing: [false]
# Samples in memory at once; null is the whole batch.
#micro_batch_sizes: [null]
# `package.module:function` that makes the batch; null makes it from the model's inputs.
#batch: null
# Seeds of weights and batch; several seeds repeat each trial.
#seeds: [0]
# Options of the trainer, such as {lr: 0.001, max_grad_norm: 1.0, noise_multiplier: 1.0}. A list of values is an axis.
#options: {}
# The private training to compute epsilon for, such as {dataset_size: 50000, epochs: 3, target_epsilon: 8}.
#privacy: null

# ---- How long a trial measures
# Measured steps, and steps before them that are not measured.
#steps: 10
#warmup_steps: 3
# Record one Kineto trace per trial.
#trace: true

# ---- Where a trial runs
# auto, cpu, cuda, or another device of torch.
#device: auto
# Threads, CPU cores and GPUs of a trial; null leaves the choice to the engine. `gpus: 0.5` shares one GPU.
#threads: null
#cpus: null
#gpus: null
# Several processes: numbers of nodes, processes per node (empty: gpus_per_node, or 1), and ddp or fsdp (empty: ddp).
#nodes: [1]
#processes: []
#layouts: []
#gpus_per_node: null

# ---- Which trials run, and when they are ended
# Conditions that leave a trial out, such as ["trainer=ghost seq_len>=1024", {checkpointing: true, trainer: standard}].
#exclude: []
# The limits of a trial. Other keys: `no_progress_seconds` (600 unless the trainer is a command), and `memory` of the
# host, such as 16GiB.
#limits: {wall_seconds: 3600}
# Retries of a trial that was lost or preempted, and other outcomes to retry: error, crash, timeout, hang.
#retries: 2
#retry_on: []
# Repeat each trial until the 95 % interval of its step time is at most this wide, such as 5%, at most so many times.
#until: null
#max_repeats: 5
# Start no new trial after this time, such as 8h or 90m.
#budget: null
"""
