"""Where the wall time of a run went, for a run whose MFU is unknown: seconds, shares and milliseconds per step."""

from collections.abc import Sequence
from dataclasses import dataclass

from flopwatch.records.time_uses import USES
from flopwatch.records.trace_split import TraceSplit
from flopwatch.runs.comparison import total
from flopwatch.runs.reading import RunLog
from flopwatch.runs.waterfall.losses import divided_wall_time

_LEAST_SHARE = 0.01
_ABOUT_THE_PEAK = ("The FLOPs are not exact", "Without a trace", "The peak")


@dataclass(frozen=True, slots=True)
class TimeUse:
    """One use of the wall time.

    Attributes:
        seconds_per_step: None for what is not part of ordinary steps.
        evidence: The measurement that shows it, in one sentence.
        advice: What to try next; empty if there is nothing to advise.
    """

    key: str
    name: str
    seconds: float
    share: float
    seconds_per_step: float | None
    evidence: str
    advice: str


@dataclass(frozen=True, slots=True)
class Times:
    """All uses of a run's wall time, and its rates. Unknown values are None.

    Attributes:
        wall_seconds: Time since the start of the run's first process.
        uses: The longest first. They add up to the wall time.
        steps: Number of steps.
        tokens_per_second: Of the training steps; `samples_per_second` and `flops_per_second` too.
        notes: What limits these figures, in whole sentences.
    """

    wall_seconds: float
    uses: tuple[TimeUse, ...]
    steps: int | None
    tokens_per_second: float | None
    samples_per_second: float | None
    flops_per_second: float | None
    notes: tuple[str, ...]

    def largest(self, count: int = 3) -> list[TimeUse]:
        """The uses that take most, without the work itself, which cannot be judged without a peak."""
        return [use for use in self.uses if not USES[use.key].without_peak and use.share >= _LEAST_SHARE][:count]


def times_of(log: RunLog, traces: Sequence[TraceSplit] = ()) -> Times | None:
    """The uses of a run's wall time; None if it is unknown. `read_around` is enough."""
    # At an infinite peak FLOPs take no time, so that every use of the devices' time is one of the parts.
    parts = divided_wall_time(log, traces, model_at_peak=0.0, hardware_at_peak=0.0, recompute_at_peak=0.0)
    if parts is None:
        return None
    steps = total(log, "total/steps")
    uses = [
        TimeUse(
            loss.key,
            USES[loss.key].without_peak or loss.name,
            loss.seconds,
            loss.seconds / parts.wall_seconds,
            loss.seconds / steps if steps and USES[loss.key].in_steps else None,
            loss.evidence,
            loss.advice,
        )
        for loss in parts.losses
    ]
    return Times(
        parts.wall_seconds,
        tuple(sorted(uses, key=lambda use: -use.seconds)),
        None if steps is None else int(steps),
        total(log, "perf/tokens_per_second"),
        total(log, "perf/samples_per_second"),
        total(log, "perf/model_flops_per_second_per_device"),
        tuple(note for note in parts.notes if not note.startswith(_ABOUT_THE_PEAK)),
    )
