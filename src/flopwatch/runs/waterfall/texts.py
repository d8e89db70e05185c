"""The losses of a waterfall, in the order in which they are drawn: names, evidence, and what to try next."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flopwatch.numbers import duration, percent, step_time
from flopwatch.text import one_line


@dataclass(frozen=True, slots=True)
class LossText:
    """The texts of one loss.

    Attributes:
        key: Its stable name in JSON.
        name: Its name for people.
        measured: What the seconds are, in words that follow "9 min of 1 h 15 min".
        advice: What to try next, as a whole sentence; empty if there is nothing to try. `{path}` is the run's folder.
    """

    key: str
    name: str
    measured: str
    advice: str = ""


_TEXTS = (
    LossText(
        "start_up",
        "start-up",
        "between the start of a process and its first step",
        "Load data and model faster, or restart less often; a long run makes this loss small.",
    ),
    LossText(
        "restart",
        "restarts",
        "without a process between sessions, and in steps that were run again from a checkpoint",
        "Save checkpoints more often, and find out why the sessions ended.",
    ),
    LossText("eval", "evaluation", "in evaluation", "Evaluate less often, or on fewer batches."),
    LossText(
        "checkpoint",
        "checkpoints",
        "in saving checkpoints",
        "Save less often, or asynchronously (torch.distributed.checkpoint.async_save).",
    ),
    LossText("pause", "pauses", "in pause(), in phases of other names, and in writing traces"),
    LossText(
        "outside",
        "work between steps",
        "between steps, in no phase and not waiting for a batch",
        'Save and log less often. With a TrainingMonitor in the loop, monitor.phase("checkpoint") names this work.',
    ),
    LossText(
        "count", "counting FLOPs", "in flopwatch itself, which counts some steps as they run, most of them at first"
    ),
    LossText("other", "other time", "in none of the other classes"),
    LossText(
        "compile",
        "compilation and warm-up",
        "by which the first steps were longer than typical ones",
        "Use fewer different batch shapes with torch.compile, and keep its cache (TORCHINDUCTOR_CACHE_DIR).",
    ),
    LossText(
        "stall",
        "stalled steps",
        "by which single steps took more than 5 times the median",
        "Look at what the machine did at those steps: other jobs, a slow file system, garbage collection.",
    ),
    LossText(
        "input_wait",
        "input wait",
        "waiting for batches",
        "Prepare batches ahead, in other processes (num_workers and prefetch_factor of a DataLoader), or once before "
        "the training.",
    ),
    LossText(
        "straggler",
        "straggler",
        "by which one rank made the steps of all ranks longer",
        "`flopwatch watch {path}` names the rank and the cause; look at that host, or at how batches are divided.",
    ),
    LossText(
        "ranks_wait",
        "communication and waiting for ranks",
        "in which ranks were not busy themselves, without stragglers",
        "Accumulate gradients over more batches, or overlap communication with the backward pass.",
    ),
    LossText(
        "unpriced",
        "steps with unknown FLOPs",
        "in steps whose FLOPs are unknown",
        "`flopwatch explain {path}` says why.",
    ),
    LossText(
        "optimizer",
        "optimizer",
        "in the optimizer's step",
        "Use fused=True or foreach=True, or accumulate gradients over more batches.",
    ),
    LossText(
        "between",
        "between the passes",
        "in steps, outside of forward pass, backward pass and optimizer",
        "If batches are fetched there, prepare them ahead, in other processes. Otherwise read values such as "
        "loss.item() less often.",
    ),
    LossText(
        "host",
        "after the optimizer",
        "between the optimizer and the end of the step",
        "Log less often, and do not read values such as loss.item() on every step.",
    ),
    LossText(
        "idle",
        "idle and host gaps",
        "in which the traced device had no work, without input wait",
        "Use torch.compile or CUDA graphs, or larger batches, so that Python keeps up with the device.",
    ),
    LossText(
        "exposed_communication",
        "exposed communication",
        "in communication during which the traced device computed nothing",
        "Overlap communication with the backward pass, or use larger batches per rank.",
    ),
    LossText(
        "copies",
        "copies",
        "in copies between host and device during which it computed nothing",
        "Use pin_memory=True and non_blocking=True, and keep data on the device.",
    ),
    LossText(
        "other_kernels",
        "kernels other than matmuls",
        "in norms, activations and other element-wise work",
        "Use torch.compile or fused kernels for norms, activations and the loss.",
    ),
    LossText(
        "slow_matmuls",
        "slow matmuls",
        "by which matrix products and attention took longer than at the peak",
        "Use larger batches or sizes that are multiples of 64, and a lower-precision compute type.",
    ),
    LossText(
        "achievable",
        "achievable peak below the datasheet",
        "by which even the fastest matrix product measured on this device is slower than the peak",
        "Nothing in the training changes this; `flopwatch peak --measure` measures the device again.",
    ),
    LossText(
        "below_peak",
        "forward and backward below the peak",
        "by which forward and backward pass took longer than at the peak",
        "`flopwatch trace {path}` divides this time while the training runs: matmuls, other kernels, idle time.",
    ),
    LossText(
        "recompute",
        "recomputation",
        "for FLOPs that the backward pass computes again, because of activation checkpointing or fused attention",
        "Checkpoint fewer layers if memory allows. What fused attention computes again is small and saves memory.",
    ),
    LossText(
        "padding",
        "padding",
        "for FLOPs of padding, and of pairs that the mask hides",
        "Pack sequences, or put sequences of similar length into one batch.",
    ),
    LossText(
        "extra_passes",
        "extra passes",
        "for FLOPs that the model's mathematics does not need, such as extra passes of private training",
        "Compare ways of clipping with `flopwatch sweep`; for packed batches, use attention within documents only.",
    ),
)

LOSSES: Mapping[str, LossText] = {text.key: text for text in _TEXTS}
"""The losses by key, in the order of the waterfall."""


IN_STEPS = frozenset(
    {
        *("input_wait", "straggler", "ranks_wait", "unpriced", "optimizer", "between", "host", "idle"),
        *("copies", "other_kernels", "slow_matmuls", "achievable", "below_peak", "recompute", "padding"),
        *("exposed_communication", "extra_passes"),
    }
)
"""Losses inside of ordinary steps, which lower the MFU of the steps too."""


def text_of(text: LossText, seconds: float, wall_seconds: float, facts: Mapping[str, Any]) -> tuple[str, str]:
    """The evidence and the advice of a loss, each as one sentence."""
    if seconds < 0:  # only `below_peak` can be, if the peak is too low
        return f"At this peak, the executed FLOPs take {duration(-seconds)} more than the steps took.", _TOO_LOW
    steps, tokens, real_tokens = facts["steps"], facts["tokens"], facts["real_tokens"]
    each = f" ({step_time(seconds / steps)} per step)" if steps and text.key in IN_STEPS else ""
    evidence = f"{duration(seconds)} of {duration(wall_seconds)}{each} {text.measured}"
    if text.key == "padding" and tokens and real_tokens is not None:
        evidence += f"; {percent(1 - real_tokens / tokens)} of all tokens are padding"
    if text.key == "straggler" and facts["straggler"] is not None:
        evidence += f"; in the newest row it is rank {facts['straggler']}"
    advice = text.advice.replace("{path}", in_shell(facts["path"]))
    if text.key in ("idle", "below_peak") and not facts["times_passes"]:
        advice = f"{MEASURE_WAIT} {advice}"
    return f"{evidence}.", advice


MEASURE_WAIT = (
    "To measure the input wait, pass the batches of a TrainingMonitor through monitor.batches(), or fetch them in "
    "`with monitor.input_wait():`."
)
_TOO_LOW = "Check the peak with `flopwatch peak`, or pass peak_flops_per_s."


def in_shell(path: str) -> str:
    """A path as it is typed in a shell, on one line.

    >>> in_shell("runs/a"), in_shell("my runs/a")
    ('runs/a', "'my runs/a'")
    """
    return shlex.quote(one_line(path))
