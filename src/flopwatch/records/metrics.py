"""Every metric that a run logs, and the computation of goodput. Standard library only.

`basic` metrics are in every row of the log. The others are only in detailed rows (see `detailed_log_every`). A metric
whose value is unknown is left out of the row.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

from flopwatch.language import Said
from flopwatch.records.time_uses import LOST

Group = Literal["training", "perf", "counters", "total", "time", "ranks", "dataset"]

STEP_KEY = "global_step"
"""The key under which sinks get the step number, the x-axis of all metrics."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of one metric of a row in the log.

    Attributes:
        key: Its name in every sink, such as `perf/mfu`.
        unit: `1` for a share between 0 and 1, `%`, `s`, `FLOP`, `FLOP/s`, `tokens`, `tokens/s`, ...
        description: What it means, in one sentence.
        basic: True if it is part of every row.
    """

    key: str
    unit: str
    description: str
    basic: bool = False

    @property
    def group(self) -> str:
        return self.key.partition("/")[0]


_ALL = (
    Metric("training/loss", "", "Mean loss of the window's steps.", basic=True),
    Metric("training/lr", "", "Learning rate of the window's last step.", basic=True),
    Metric("training/epoch", "epochs", "Epoch of the window's last step.", basic=True),
    Metric("training/grad_norm", "", "Mean gradient norm of the window's steps.", basic=True),
    Metric("perf/mfu", "1", "Model FLOPs over what the devices could have done in the same time.", basic=True),
    Metric("perf/mfu_percent", "%", "perf/mfu in percent.", basic=True),
    Metric("perf/hfu", "1", "Executed FLOPs, with recomputation and padding, over what the devices could have done."),
    Metric("perf/hfu_percent", "%", "perf/hfu in percent.", basic=True),
    Metric("perf/step_time", "s", "Mean seconds of a step, input wait included, pauses not.", basic=True),
    Metric("perf/step_time_p50", "s", "Median step time of the last 512 steps."),
    Metric("perf/step_time_p90", "s", "90th percentile of the step times of the last 512 steps."),
    Metric("perf/step_time_p99", "s", "99th percentile of the step times of the last 512 steps."),
    Metric("perf/steps_per_second", "1/s", "Steps per second of training time."),
    Metric("perf/tokens_per_second", "tokens/s", "All positions of the batches, padding included.", basic=True),
    Metric("perf/real_tokens_per_second", "tokens/s", "Tokens that attention_mask does not mark as padding."),
    Metric("perf/trainable_tokens_per_second", "tokens/s", "Tokens whose label is not -100."),
    Metric("perf/samples_per_second", "samples/s", "Samples per second of training time.", basic=True),
    Metric("perf/tokens_per_second_per_device", "tokens/s", "perf/tokens_per_second of one device."),
    Metric("perf/samples_per_second_per_device", "samples/s", "perf/samples_per_second of one device."),
    Metric("perf/model_flops_per_second_per_device", "FLOP/s", "Model FLOPs per second per device.", basic=True),
    Metric("perf/hardware_flops_per_second_per_device", "FLOP/s", "Executed FLOPs per second per device.", basic=True),
    Metric("perf/peak_flops_per_second_per_device", "FLOP/s", "The peak FLOP/s that MFU and HFU are relative to."),
    Metric("perf/padding_percent", "%", "Share of all positions that is padding.", basic=True),
    Metric("perf/recompute_percent", "%", "Share of the executed FLOPs that runs a second time.", basic=True),
    Metric("perf/input_wait_percent", "%", "Share of the step time spent waiting for batches.", basic=True),
    Metric("perf/counted_steps_percent", "%", "Share of the window's steps with known FLOPs; left out at 0 and 100 %."),
    Metric("perf/exact", "1", "1 if all FLOPs of the row are exact, 0 if not.", basic=True),
    Metric("perf/goodput", "1", "Productive time over wall time since the run's first process started.", basic=True),
    Metric("perf/goodput_percent", "%", "perf/goodput in percent.", basic=True),
    Metric("perf/memory_allocated_gib", "GiB", "Most device memory held by tensors so far."),
    Metric("perf/memory_reserved_gib", "GiB", "Most device memory reserved by torch so far."),
    Metric("perf/joules_per_step", "J", "Energy of all devices per step, at their mean power in the window."),
    Metric("perf/joules_per_token", "J", "The same per position, padding included.", basic=True),
    Metric("perf/joules_per_sample", "J", "The same per sample."),
    Metric(
        "counters/flops_per_second_per_device",
        "FLOP/s",
        "By hardware counters, mean over devices; compare it with perf/hardware_flops_per_second_per_device.",
        basic=True,
    ),
    Metric("counters/tensor_active", "1", "Share of the cycles in which the tensor cores were busy.", basic=True),
    Metric("counters/sm_active", "1", "Share of the cycles in which a compute unit had work."),
    Metric("counters/dram_active", "1", "Share of the cycles in which the device's memory was read or written."),
    Metric("counters/sm_clock_mhz", "MHz", "Mean clock of the compute units."),
    Metric("counters/power_watts", "W", "Mean power of all devices together."),
    Metric("counters/energy_joules", "J", "Energy of all devices in the window, pauses included.", basic=True),
    Metric("ranks/reporting", "ranks", "Ranks that reported; if not all, values are the logging rank's.", basic=True),
    Metric("ranks/longest_input_wait_percent", "%", "perf/input_wait_percent of that rank.", basic=True),
    Metric("ranks/longest_input_wait_rank", "rank", "The rank that waits longest for its input.", basic=True),
    Metric("ranks/longest_own_step_seconds", "s", "Step time of that rank without its backward pass.", basic=True),
    Metric("ranks/longest_own_step_rank", "rank", "The rank whose step without backward pass is longest.", basic=True),
    Metric("ranks/shortest_own_step_seconds", "s", "The shortest step time of a rank without its backward pass."),
    Metric("total/steps", "steps", "Optimizer steps since the first start."),
    Metric("total/samples", "samples", "Samples since the first start."),
    Metric("total/tokens", "tokens", "All positions since the first start.", basic=True),
    Metric("total/real_tokens", "tokens", "Tokens that are not padding since the first start."),
    Metric("total/trainable_tokens", "tokens", "Tokens with a label since the first start."),
    Metric("total/model_flops", "FLOP", "Model FLOPs since the first start."),
    Metric("total/hardware_flops", "FLOP", "Executed FLOPs since the first start."),
    Metric("total/energy_joules", "J", "Energy of all devices since the first start, as far as it was measured."),
    Metric("time/train_seconds", "s", "Time in steps since the first start, warm-up and input wait included."),
    Metric("time/input_wait_seconds", "s", "Time waiting for batches, mean over ranks; part of train_seconds."),
    Metric("time/wait_unknown_seconds", "s", "Time of steps whose input wait is unknown."),
    Metric("time/warm_up_seconds", "s", "Time in steps recognised as warm-up; part of train_seconds."),
    Metric("time/eval_seconds", "s", "Time in evaluation since the first start."),
    Metric("time/checkpoint_seconds", "s", "Time in checkpointing since the first start."),
    Metric("time/pause_seconds", "s", "Time in pause() and other phases since the first start."),
    Metric("time/count_seconds", "s", "Time flopwatch itself spent counting FLOPs since the first start."),
    Metric("time/outside_seconds", "s", "Time between steps that is in no phase and not known to be input wait."),
    Metric("time/wall_seconds", "s", "Time since the run's first process started, with the time between sessions."),
    Metric(
        "time/productive_seconds",
        "s",
        "Time in useful steps, without input wait, compilation, stalls, and what is between passes.",
    ),
    Metric("time/start_up_seconds", "s", "From the start of each process to the beginning of its first step."),
    Metric("time/compile_seconds", "s", "Extra time of warm-up steps over typical ones; part of warm_up_seconds."),
    Metric("time/stall_seconds", "s", "Extra time of steps that took more than 5 times the median."),
    Metric("time/compile_outside_seconds", "s", "Time in torch.compile before the first step, and in evaluation."),
    Metric("time/restart_seconds", "s", "From the last record of a session to the start of the next one's process."),
    Metric("time/rerun_seconds", "s", "Time in steps that were run again from a checkpoint."),
    Metric("time/divided_seconds", "s", "Time of the steps, without input wait, in which the optimizer was timed."),
    Metric("time/optimizer_seconds", "s", "Time of the optimizer in time/divided_seconds."),
    Metric("time/host_seconds", "s", "Time after the optimizer, until the step ends, in time/divided_seconds."),
    Metric("time/passes_timed_seconds", "s", "Time of the steps, without input wait, whose passes were timed."),
    Metric("time/outside_passes_seconds", "s", "Time outside of passes and optimizer in time/passes_timed_seconds."),
    Metric("time/between_seconds", "s", "Time in steps outside of their passes and optimizer, such as fetching."),
    Metric("time/model_at_peak_seconds", "s", "Time that the model FLOPs would have taken at the devices' peak."),
    Metric("time/hardware_at_peak_seconds", "s", "Time that the executed FLOPs would have taken at the peak."),
    Metric("time/recompute_at_peak_seconds", "s", "Time that the recomputed FLOPs would have taken at the peak."),
    Metric("time/unpriced_seconds", "s", "Time of the steps whose FLOPs are unknown, without warm-up."),
    Metric(
        "time/processor_seconds",
        "s",
        "Processor time of the training's process, all threads together, since its first start.",
    ),
    Metric("time/other_seconds", "s", "Wall time in none of the other classes."),
)

METRICS = {metric.key: metric for metric in _ALL}

_OF_DATASETS = {
    "loss": Metric("dataset/*/loss", "", "Mean loss of this dataset's samples in the window.", basic=True),
    "accuracy": Metric("dataset/*/accuracy", "1", "Share of this dataset's predictions that are right.", basic=True),
    "samples": Metric("dataset/*/samples", "samples", "Number of this dataset's samples in the window."),
}


def find_metric(key: str) -> Metric:
    """The definition of a metric by its key. A key that flopwatch does not define is a basic metric of the user.

    >>> find_metric("perf/step_time").unit
    's'
    >>> find_metric("dataset/code/loss").description
    "Mean loss of this dataset's samples in the window."
    >>> find_metric("training/temperature").basic
    True
    """
    if key.startswith("dataset/") and key.rpartition("/")[2] in _OF_DATASETS:
        return _OF_DATASETS[key.rpartition("/")[2]]
    return METRICS.get(key) or Metric(key, "", "Logged by the user.", basic=True)


# Goodput is the share of a run's wall time that is productive. Wall time begins with the run's first process and
# includes the time between sessions. It is divided into uses. The use `train` is the time in steps; a step that is
# repeated after a restart counts once. `input_wait`, `compile` and `stall` are disjoint parts of `train` that are lost;
# the rest of `train` is productive. The functions below take and return the seconds of each use, as in `Row.ledger`.

APART = ("eval", "checkpoint", "pause", "count", "outside", "compile_outside")
"""Uses of the time between steps: the monitor's phases, time in no phase, and compilation outside of steps."""
AT_PEAK = ("model_at_peak", "hardware_at_peak", "recompute_at_peak", "unpriced")
"""How long the devices would have needed for the FLOPs of the steps, and the time of steps with unknown FLOPs."""
OF_STEPS = (
    *("train", "input_wait", "wait_unknown", "warm_up", "compile", "stall", "divided", "optimizer", "host"),
    *("passes_timed", "outside_passes"),
    *AT_PEAK,
)
"""Uses of the time in steps. A resumed run takes their seconds from the checkpoint; all other seconds keep growing."""
_UNKNOWN_WAIT_SHARE = 0.1
"""Of the time in steps. The wait of single steps is unknown after an evaluation in no phase, which does no harm."""
_LEAST_TOLD_SHARE = 0.02
"""Of the wall time. Even in a training without any loader, some time passes between the passes."""
_STALL_FACTOR = 5.0
"""A step that takes more than this many times the median counts as stalled, for example by a hung file system."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where the wall time of a run went: `productive_seconds` and `lost_seconds` add up to `wall_seconds`.

    Attributes:
        share: Productive time divided by wall time. The time between the passes of steps may be input wait or work, so
            it is left out of both.
        wall_seconds: Since the start of the run's first process.
        productive_seconds: Time in useful steps, without input wait, compilation and stalls.
        lost_seconds: Unproductive time by cause, such as `eval`; `other` is the remainder.
        knows_input_wait: Whether the input wait of nearly all steps is known. If not, it is part of the time between
            the passes; if that was not measured either, it counts as productive.
    """

    share: float
    wall_seconds: float
    productive_seconds: float
    lost_seconds: Mapping[str, float]
    knows_input_wait: bool = True

    @property
    def known_seconds(self) -> float:
        """The time of which `share` is a share: the wall time without what is between the passes."""
        return self.wall_seconds - self.lost_seconds.get("between", 0.0)

    @property
    def caveat(self) -> str | None:
        """What a reader of `share` has to know about input wait that was not measured; None if there is nothing."""
        if "between" in self.lost_seconds:
            left_out = self.lost_seconds["between"]
            if left_out < _LEAST_TOLD_SHARE * self.wall_seconds:
                return None
            return Said(
                "{seconds:,.1f} s between the passes of steps are left out of it: they may be work, or waits for "
                "batches that were not timed.",
                seconds=left_out,
            )
        return None if self.knows_input_wait else Said("The input wait is unknown and counts as productive.")

    def largest_losses(self, count: int = 3) -> list[tuple[str, float]]:
        known = [(name, seconds) for name, seconds in self.lost_seconds.items() if seconds > 0]
        return sorted(known, key=lambda loss: -loss[1])[:count]


def goodput_of(seconds: Mapping[str, float]) -> Goodput | None:
    """Compute goodput from the seconds by use, such as `train`; None if the wall time is unknown.

    >>> found = goodput_of({"wall": 100.0, "train": 80.0, "compile": 5.0, "eval": 12.0, "input_wait": 15.0})
    >>> found.share, found.lost_seconds
    (0.6, {'eval': 12.0, 'compile': 5.0, 'input_wait': 15.0, 'other': 8.0})
    >>> found = goodput_of({"wall": 100.0, "train": 80.0, "passes_timed": 8.0, "outside_passes": 4.0})
    >>> found.productive_seconds, found.share
    (40.0, 0.6666666666666666)
    """
    wall = seconds.get("wall")
    if not wall or wall < 0:
        return None
    lost = {name: seconds[name] for name in LOST if name in seconds}
    at_work = seconds.get("train", 0.0) - lost.get("compile", 0.0) - lost.get("stall", 0.0)
    if "input_wait" in lost:  # the wait of a step is that of all ranks on average, and may be longer than a rank's step
        lost["input_wait"] = min(lost["input_wait"], max(at_work, 0.0))
    productive = at_work - lost.get("input_wait", 0.0)
    timed = seconds.get("passes_timed", 0.0)
    if timed > 0:  # the share of the time in steps, without input wait, that is outside of their passes and optimizer
        lost["between"] = max(min(seconds.get("outside_passes", 0.0) / timed, 1.0) * productive, 0.0)
        productive -= lost["between"]
    lost["other"] = wall - productive - sum(lost.values())
    known = wall - lost.get("between", 0.0)
    is_wait_known = seconds.get("wait_unknown", 0.0) <= _UNKNOWN_WAIT_SHARE * seconds.get("train", 0.0)
    knows_input_wait = is_wait_known and "input_wait" in seconds
    return Goodput(productive / known if known > 0 else 0.0, wall, productive, lost, knows_input_wait)


def typical_seconds(steps: Collection[float]) -> float | None:
    """The median of the steps' times in seconds; None without steps."""
    return median(steps) if steps else None


def loss_in_step(seconds: float, typical: float | None, *, is_warm_up: bool) -> tuple[str, float] | None:
    """Why a step lost time (`compile` or `stall`), and how many seconds; None for an ordinary step.

    The time of the step is without input wait; `typical` is the median time of recent steps, None if it is unknown.

    >>> loss_in_step(61.0, 1.0, is_warm_up=True), loss_in_step(11.0, 1.0, is_warm_up=False)
    (('compile', 60.0), ('stall', 10.0))
    >>> loss_in_step(4.0, 1.0, is_warm_up=False)
    """
    if typical is None or seconds <= typical:
        return None
    if is_warm_up:
        return "compile", seconds - typical
    return ("stall", seconds - typical) if seconds > _STALL_FACTOR * typical else None


def carried_seconds(resumed: Mapping[str, float], last: Mapping[str, float]) -> dict[str, float]:
    """The seconds by use, such as `train` and `eval`, with which a session begins that resumes from a checkpoint.

    Time in steps is reset to `resumed`, its value at the checkpoint. Time that the earlier session spent on steps after
    the checkpoint is added to `rerun`. Time outside steps continues from `last`, that session's last record. If
    that has less time in steps, counting was taken out of it since the checkpoint, and is in `count`.

    >>> carried_seconds({"train": 40.0, "eval": 3.0}, {"train": 50.0, "eval": 6.0, "restart": 2.0})
    {'train': 40.0, 'eval': 6.0, 'restart': 2.0, 'rerun': 10.0}
    """
    carried = {name: spent for name, spent in resumed.items() if name in OF_STEPS}
    carried |= {name: spent for name, spent in last.items() if name not in OF_STEPS}
    again = last.get("train", 0.0) - resumed.get("train", 0.0)
    if again > 0:
        carried["rerun"] = carried.get("rerun", 0.0) + again
    elif "train" in last:
        carried["train"] = last["train"]
    return carried
