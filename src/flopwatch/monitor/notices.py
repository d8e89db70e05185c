"""What the monitor has to say to a person: level, code, and a sentence with the value and what to do next."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flopwatch.records import Peak
from flopwatch.run_records import Level

Tell = Callable[[Level, str, str], None]
"""Takes a level, a code and a message."""


class Words(NamedTuple):
    """A notice without its step. What stands behind a colon in the code only tells notices apart."""

    level: Level
    code: str
    message: str


def mfu_above_peak(mfu: float, peak: Peak) -> Words:
    return Words(
        "warning",
        "mfu_above_peak",
        f"MFU is {100 * mfu:.1f} %, more than the device can do: the peak of {peak.flops_per_s:.4g} FLOP/s "
        f"({peak.device}, {peak.dtype}, {peak.source}) is not that of this training; pass dtype= or "
        "peak_flops_per_s=",
    )


def not_readable(name: str) -> Words:
    if name == "batch":
        return Words(
            "warning",
            "batch_reused",
            "the batch's tensors were written into after log_step, so steps of one window have no tokens and "
            "FLOPs; from here on batches are read at once",
        )
    return Words(
        "warning",
        f"not_readable:{name}",
        f"{name} was written into after log_step, is not a single number, or is spread over ranks, so it is "
        f"left out; pass {name}.detach().clone(), a number, or {name}.full_tensor()",
    )


def log_not_resumed(log: Path, error: BaseException) -> Words:
    return Words("warning", "log_not_resumed", f"the totals start at 0: {log} is of no use: {error}")


def steps_lost(last_step: int, first_step: int) -> Words:
    return Words(
        "warning",
        "steps_lost",
        f"the log ends at step {last_step} and the run continues at {first_step}: the totals lack the steps "
        "in between; save monitor.state_dict() with your checkpoint and load it",
    )


def totals_estimated(first_step: int) -> Words:
    return Words(
        "info",
        "totals_estimated",
        f"the run continues at step {first_step}, inside a logged window of several ranks: tokens and FLOPs of its "
        "first steps are divided as on this rank; call monitor.state_dict() on every rank when you save, and they are "
        "exact",
    )


def state_is_behind() -> Words:
    return Words(
        "warning",
        "state_is_behind",
        "state_dict() was not called on all ranks, or some are late: the totals in it end with the last window "
        "of all ranks. Call it on every rank to have them up to this step",
    )


def ranks_unknown(rank: int, world_size: int) -> Words:
    return Words(
        "warning",
        "ranks_unknown",
        f"{world_size} ranks, but torch.distributed is not initialised before the first step: all numbers are those "
        f"of rank {rank}",
    )


def ranks_lost(rank: int, why: str) -> Words:
    return Words("warning", "ranks_lost", f"from here on all numbers are those of rank {rank}: {why}")


def ranks_missing(missing: int, world_size: int) -> Words:
    return Words(
        "warning",
        "ranks_missing",
        f"{missing} of {world_size} ranks did not tell of this window: its numbers are those of the logging rank, and "
        "the totals lack the others' part (ranks/reporting says in which rows)",
    )


def device_late(steps: int, seconds: float) -> Words:
    return Words(
        "warning",
        "device_late",
        f"the device had not finished the last {steps} steps {seconds:g} s after the end: they are in no number",
    )


def ranks_late(seconds: float) -> Words:
    return Words(
        "warning",
        "ranks_late",
        f"other ranks had not closed their monitor {seconds:.0f} s after this one: the last window lacks them",
    )
