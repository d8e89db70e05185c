"""Where the peak went: every loss between 100 % of the devices' peak and the MFU of a run, in points that add up.

All losses are computed in seconds. The whole is the wall time of the run; a second in which the devices do nothing
useful is lost whole, and a second of training counts as useful for the time that the model's FLOPs would take at the
peak. Points are these seconds in percent of the wall time, so they add up to 100 by construction.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flopwatch.records.trace import TraceSplit
from flopwatch.runs.reading import RunLog


@dataclass(frozen=True, slots=True)
class Loss:
    """One step of the waterfall.

    Attributes:
        key: Its stable name, such as `input_wait`.
        name: Its name for people, such as "input wait".
        points: Percent of the peak that it costs.
        seconds: Time that it costs.
        evidence: The measurement that shows it, in one sentence.
        advice: What to try next, in one sentence; empty if there is nothing to advise.
    """

    key: str
    name: str
    points: float
    seconds: float
    evidence: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The way from 100 % of the peak down to the MFU of a whole run: `losses` and `mfu_percent` add up to 100.

    Attributes:
        wall_seconds: Time since the start of the run's first process.
        losses: In the order in which they are drawn; a loss that is unknown is not in it.
        mfu_percent: Model FLOPs of the whole run over what the devices could have done in the wall time.
        step_mfu_percent: MFU of the training steps alone, without input wait excluded: the figure in the log.
        traced: The traces that were used; empty without a trace.
        notes: What limits these figures, in whole sentences.
    """

    wall_seconds: float
    losses: tuple[Loss, ...]
    mfu_percent: float
    step_mfu_percent: float | None = None
    traced: tuple[TraceSplit, ...] = ()
    notes: tuple[str, ...] = ()


def waterfall_of(log: RunLog, traces: tuple[TraceSplit, ...] = ()) -> Waterfall | None:
    """The waterfall of a run; None if its log has no peak, no FLOPs or no wall time."""
    raise NotImplementedError


def seconds_of(log: RunLog) -> Mapping[str, float]:
    """Time by use, such as `train` and `eval`, at the end of the log; empty without rows."""
    raise NotImplementedError
