"""The uses of a run's time, one row each: keys, names, and what to try next. Standard library only.

Rows of the log, the waterfall, the page of a run and the commands take their keys and words from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from flopwatch.language import Said


@dataclass(frozen=True, slots=True)
class Use:
    """One use of time.

    Attributes:
        key: Its stable name in logs and JSON.
        name: Its name for people.
        measured: What the seconds are, in words that follow "9 min of 1 h 15 min"; empty if no waterfall shows it.
        advice: What to try next, as a whole sentence; empty if there is nothing to try. `{path}` is the run's
            folder, `{trace}` how to trace it.
        verdict: What it means if it costs much, in whole sentences; `{points}` is what it costs.
        of_trace: The field of a `TraceSplit` with its seconds.
        without_peak: Its name where no peak is known: then it is all of the time of what it is named after.
    """

    key: str
    name: str
    measured: str = ""
    advice: str = ""
    verdict: str = ""
    of_trace: str = ""
    without_peak: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "measured", "advice", "verdict", "without_peak"):
            object.__setattr__(self, name, Said(getattr(self, name)))

    @property
    def in_steps(self) -> bool:
        """Whether it lies inside of ordinary steps, so that it lowers their MFU too."""
        return self.key in IN_STEPS


_ROWS = (
    Use("warm_up", "warm-up"),
    Use(
        "start_up",
        "start-up",
        "between the start of a process and its first step",
        "Load data and model faster, or restart less often; a long run makes this loss small.",
        "Start-up costs {points}: the run is short compared with the time that its processes take to start.",
    ),
    Use(
        "restart",
        "restarts",
        "without a process between sessions, and in steps that were run again from a checkpoint",
        "Save checkpoints more often, and find out why the sessions ended.",
        "Restarts cost {points}: work was lost between sessions and done again.",
    ),
    Use("rerun", "steps that were run again"),
    Use(
        "compile_outside",
        "compilation outside of steps",
        "in torch.compile before the first step, and in evaluation",
        "Keep the cache of the compiler (TORCHINDUCTOR_CACHE_DIR), and use fewer different batch shapes; a longer run "
        "makes this loss small.",
        "Compilation outside of steps costs {points}: the model was compiled before the first step, or in an "
        "evaluation.",
    ),
    Use(
        "eval",
        "evaluation",
        "in evaluation",
        "Evaluate less often, or on fewer batches.",
        "Evaluation costs {points}: the training evaluates often, or for long.",
    ),
    Use(
        "checkpoint",
        "checkpoints",
        "in saving checkpoints",
        "Save less often, or asynchronously (torch.distributed.checkpoint.async_save).",
        "Saving checkpoints costs {points}: the training waits while they are written.",
    ),
    Use(
        "pause",
        "pauses",
        "in pause(), in phases of other names, and in writing traces",
        verdict="Pauses cost {points}: the training spends this time in phases that are neither evaluation nor "
        "checkpoints.",
    ),
    Use(
        "outside",
        "work between steps",
        "between steps, in no phase and not known to be a wait for a batch",
        "If batches are fetched there, prepare them ahead. Otherwise save and log less often; with a TrainingMonitor "
        'in the loop, monitor.phase("checkpoint") names this work.',
        "Work between steps costs {points}: the training does something there that has no name yet.",
    ),
    Use(
        "count",
        "counting FLOPs",
        "in flopwatch itself, which counts some steps as they run, most of them at first",
        verdict="Counting FLOPs costs {points}: flopwatch does this at the beginning, and a longer run makes it small.",
    ),
    Use(
        "other",
        "other time",
        "in none of the other classes",
        verdict="Time in no class costs {points}: the log does not say what the training did.",
    ),
    Use(
        "compile",
        "compilation and warm-up",
        "by which the first steps were longer than typical ones",
        "If the model is compiled, use fewer different batch shapes, and keep the cache (TORCHINDUCTOR_CACHE_DIR).",
        "Compilation and warm-up cost {points}: the first steps, or steps with new shapes, take far longer than "
        "others.",
    ),
    Use(
        "stall",
        "stalled steps",
        "by which single steps took more than 5 times the median",
        "If batches are fetched inside of these steps, prepare them ahead. Otherwise look at what the machine did at "
        "those steps: other jobs, a slow file system, garbage collection.",
        "Stalled steps cost {points}: single steps take more than 5 times as long as others.",
    ),
    # Inside of ordinary steps are those from here on.
    Use("productive", "training steps"),
    Use(
        "input_wait",
        "input wait",
        "waiting for batches",
        "Prepare batches ahead, in other processes or in more of them (num_workers and prefetch_factor of a "
        "DataLoader), or once before the training.",
        "Waiting for input costs {points}: the loader cannot keep up.",
    ),
    Use(
        "unpriced",
        "steps with unknown FLOPs",
        "in steps whose FLOPs are unknown",
        "`flopwatch explain {path}` says why.",
        "Steps with unknown FLOPs cost {points}: what they did for the training cannot be counted.",
    ),
    Use("matmul", "matmuls", of_trace="matmul_seconds"),
    Use("attention", "attention", of_trace="attention_seconds"),
    Use(
        "optimizer",
        "optimizer",
        "in the optimizer's step",
        "Use fused=True or foreach=True, or accumulate gradients over more batches.",
        "The optimizer costs {points}: its step is long compared with forward and backward pass.",
        of_trace="optimizer_seconds",
    ),
    Use(
        "between",
        "between the passes",
        "in steps, outside of forward pass, backward pass and optimizer",
        "If batches are fetched there, prepare them ahead, in other processes. Otherwise read values such as "
        "loss.item() less often.",
        "Time between the passes costs {points}: the step does something outside of forward pass, backward pass and "
        "optimizer, such as fetching its batch.",
    ),
    Use(
        "host",
        "after the optimizer",
        "between the optimizer and the end of the step",
        "Log less often, and do not read values such as loss.item() on every step.",
        "Work after the optimizer costs {points}: logging or reading values holds up every step.",
    ),
    Use(
        "idle",
        "idle and host gaps",
        "in which the traced device had no work, without input wait",
        "Use torch.compile, if the model is not compiled yet, CUDA graphs or larger batches, so that Python keeps up.",
        "Idle time costs {points}: the device waits for Python, which does not launch work fast enough.",
        of_trace="idle_seconds",
    ),
    Use(
        "exposed_communication",
        "exposed communication",
        "in communication during which the traced device computed nothing",
        "Overlap communication with the backward pass, or use larger batches per rank.",
        "Communication costs {points}: the devices wait while nothing is computed.",
        of_trace="exposed_communication_seconds",
    ),
    Use(
        "copies",
        "copies",
        "in copies between host and device during which it computed nothing",
        "Use pin_memory=True and non_blocking=True, and keep data on the device.",
        "Copies between host and device cost {points}: nothing is computed meanwhile.",
        of_trace="copy_seconds",
    ),
    Use(
        "other_kernels",
        "kernels other than matmuls",
        "in norms, activations and other element-wise work",
        "Use fused kernels for norms, activations and the loss, or torch.compile if the model is not compiled yet.",
        "Kernels other than matmuls cost {points}: norms, activations and other memory-bound work take the time.",
        of_trace="other_kernel_seconds",
    ),
    Use(
        "slow_matmuls",
        "slow matmuls",
        "by which matrix products and attention took longer than at the peak",
        "Use larger batches or sizes that are multiples of 64, and a lower-precision compute type if "
        "this device computes it faster (`flopwatch peak --dtype bf16`).",
        "Slow matmuls cost {points}: the shapes or the compute type of these matrix products do not suit the device.",
        without_peak="matmuls and attention",
    ),
    Use(
        "achievable",
        "achievable peak below the datasheet",
        "by which even the fastest matrix product measured on this device is slower than the peak",
        "Nothing in the training changes this; `flopwatch peak --measure` measures the device again.",
        "The gap between datasheet and device costs {points}: no matrix product reaches the datasheet's peak.",
    ),
    Use(
        "below_peak",
        "forward and backward below the peak",
        "by which forward and backward pass took longer than at the peak",
        "{trace} divides this time: matmuls, other kernels, idle time.",
        "Slow forward and backward passes cost {points}: a trace shows what takes the time.",
        without_peak="forward and backward pass",
    ),
    Use(
        "recompute",
        "recomputation",
        "for FLOPs that the backward pass computes again, because of activation checkpointing or fused attention",
        "Checkpoint fewer layers if memory allows. What fused attention computes again is small and saves memory.",
        "Recomputation costs {points}: the backward pass computes again what was not kept in memory.",
    ),
    Use(
        "padding",
        "padding",
        "for FLOPs of padding, and of pairs that the mask hides",
        "Pack sequences, or put sequences of similar length into one batch.",
        "Padding costs {points}: the devices compute on tokens that do not count.",
    ),
    Use(
        "extra_passes",
        "extra passes",
        "for FLOPs that the model's mathematics does not need, such as extra passes of private training",
        "Compare ways of clipping with `flopwatch sweep`; for packed batches, use attention within documents only.",
        "FLOPs that the model does not need cost {points}: the extra passes of private training are such FLOPs.",
    ),
)

USES: Mapping[str, Use] = {use.key: use for use in _ROWS}
"""Every use of time, by key."""
LOSSES: Mapping[str, Use] = {use.key: use for use in _ROWS if use.measured}
"""The losses of a waterfall, in the order in which they are drawn."""
_OUTSIDE = tuple(takewhile(lambda key: key != "productive", USES))
IN_STEPS = frozenset(USES) - {*_OUTSIDE}
MAY_HAVE_WAITS = ("outside", "stall", "between")
"""Where a wait for a batch is if flopwatch has not seen the fetch, which is far longer than usual in the first two."""
LOST = (*(key for key in _OUTSIDE if key not in ("warm_up", "other")), "input_wait")
"""Every use of time that goodput counts as lost, except `other`, which is the remainder, and `between`."""
OF_TRACES: Mapping[str, Use] = {use.of_trace: use for use in _ROWS if use.of_trace}
"""What a trace divides the time of steps into, by the field of a `TraceSplit`."""
