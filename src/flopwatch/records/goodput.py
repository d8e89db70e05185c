"""Goodput: the share of a run's wall time that went into steps that count. Pure arithmetic; never loads torch.

Wall time begins with the first process of the run and goes on between its sessions. Times are seconds by name, as a
row's ledger carries them; `train` is the time in steps that count, `input_wait`, `compile` and `stall` are parts of it
that have nothing in common.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

APART = ("eval", "checkpoint", "pause", "count", "outside")
"""Between steps: phases, and `outside`, what was seen there without a name."""
LOST = ("start_up", "compile", *APART, "input_wait", "stall", "restart", "rerun")
"""Every class of time that makes no progress, except `other`, which is what remains."""
_OF_STEPS = ("train", "input_wait", "warm_up", "compile", "stall")
"""Go back with the steps when a run returns to a checkpoint; everything else has been spent for good."""
_STALL_FACTOR = 5.0
"""A step this many times longer than the median of recent ones was held up: a stopped process, a hung file system."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where the wall time of a run went: `productive_seconds` and `lost_seconds` add up to `wall_seconds`.

    Attributes:
        share: Productive time over wall time.
        wall_seconds: Since the start of the run's first process.
        productive_seconds: In steps that count, without waiting for input, compilation and stalls.
        lost_seconds: By class; `other` is what no class explains.
    """

    share: float
    wall_seconds: float
    productive_seconds: float
    lost_seconds: Mapping[str, float]

    def largest_losses(self, count: int = 3) -> list[tuple[str, float]]:
        """The classes that cost most, with their seconds."""
        known = [(name, seconds) for name, seconds in self.lost_seconds.items() if seconds > 0]
        return sorted(known, key=lambda loss: -loss[1])[:count]


def goodput_of(seconds: Mapping[str, float]) -> Goodput | None:
    """Goodput of a ledger's times; None where the run's first start is not known.

    >>> found = goodput_of({"wall": 100.0, "train": 80.0, "compile": 5.0, "eval": 12.0, "input_wait": 15.0})
    >>> found.share, found.lost_seconds
    (0.6, {'compile': 5.0, 'eval': 12.0, 'input_wait': 15.0, 'other': 8.0})
    """
    wall = seconds.get("wall")
    if not wall or wall < 0:
        return None
    lost = {name: seconds[name] for name in LOST if name in seconds}
    at_work = seconds.get("train", 0.0) - lost.get("compile", 0.0) - lost.get("stall", 0.0)
    if "input_wait" in lost:  # logs of earlier versions counted a long wait as stalled, too
        lost["input_wait"] = min(lost["input_wait"], max(at_work, 0.0))
    productive = at_work - lost.get("input_wait", 0.0)
    lost["other"] = wall - productive - sum(lost.values())
    return Goodput(productive / wall, wall, productive, lost)


def typical_seconds(steps: Collection[float]) -> float | None:
    """The median work of recent steps that are no warm-up, without input wait; None without any."""
    return median(steps) if steps else None


def loss_in_step(seconds: float, typical: float | None, *, is_warm_up: bool) -> tuple[str, float] | None:
    """What the work of a step, input wait not included, took beyond the typical one, and its class.

    None for an ordinary step.

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
    """The times a new session begins with.

    Time in steps continues from the checkpoint; what the earlier session spent on steps after it becomes `rerun`. Time
    outside steps is that of the earlier session's last sign of life, since nobody gives it back.

    Args:
        resumed: The ledger at the step the run resumes after.
        last: The ledger at the last sign of life.

    Example:
        >>> carried_seconds({"train": 40.0, "eval": 3.0}, {"train": 50.0, "eval": 6.0, "restart": 2.0})
        {'train': 40.0, 'eval': 6.0, 'restart': 2.0, 'rerun': 10.0}
    """
    carried = {name: spent for name, spent in resumed.items() if name in _OF_STEPS}
    carried |= {name: spent for name, spent in last.items() if name not in _OF_STEPS}
    again = last.get("train", 0.0) - resumed.get("train", 0.0)
    if again > 0:
        carried["rerun"] = carried.get("rerun", 0.0) + again
    return carried
