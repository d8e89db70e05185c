"""From what was noted on each step to what is known about it, once the values have arrived."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple

from flopwatch.monitor.batch_reader import Reading, Work, as_work
from flopwatch.monitor.late_values import Kept, LateValues
from flopwatch.monitor.meter import MeasuredStep
from flopwatch.monitor.step_clock import Segments
from flopwatch.monitor.step_price import NO_CALLS, StepCalls, StepFlops
from flopwatch.monitor.timers import StepTimer

_LOOK_SECONDS = 0.001

FlopsOf = Callable[[StepCalls, list[Work]], StepFlops | None]
"""What a step costs, by its calls and its batches."""
PeakSeconds = Callable[[StepFlops | None], tuple[float | None, float | None]]
"""How long a device needs at its peaks for a step's model FLOPs, and for those executed."""


@dataclass(slots=True)
class NotedStep:
    """What `log_step` keeps: numbers, small tensors, marks. Nothing in it has been read from a device."""

    step: int
    epoch: Any
    loss: Any
    grad_norm: Any
    learning_rate: Any
    readings: list[Reading]
    segments: Segments | None
    waits: Segments | None
    skip_wandb: bool
    more: dict[str, Any]
    user_flops: int | None = None
    calls: StepCalls = NO_CALLS
    has_lost_batches: bool = False


class SettledStep(NamedTuple):
    """A step with everything that is known about it; `more` are the user's own metrics."""

    measured: MeasuredStep
    epoch: float | None
    learning_rate: float | None
    more: dict[str, float]
    skip_wandb: bool


class SettledWindow(NamedTuple):
    """A window with everything that is known about it.

    Attributes:
        steps: Its steps.
        busy_seconds_per_step: Processor time of the training's thread in the typical one; None where nobody asks.
    """

    steps: list[SettledStep]
    busy_seconds_per_step: float | None = None


@dataclass
class Window:
    """The steps of one row on their way."""

    steps: list[NotedStep]
    timer: StepTimer
    look_at: Callable[[Reading], Reading | None] = lambda reading: reading
    busy_seconds_per_step: float | None = None
    scalars: LateValues = field(init=False)
    integers: LateValues = field(init=False)
    doubt: str | None = None
    """Why nothing in it is exact."""
    changed_in_place: set[str] = field(default_factory=set)
    batch_failure: Exception | None = None
    """Why the batches of some steps could not be read."""
    begun: list[SettledStep] = field(default_factory=list)
    """The steps before, which a checkpoint has settled already."""

    def __post_init__(self) -> None:
        for step in self.steps:
            looked_at = [self._looked_at(reading) for reading in step.readings]
            # Of a step whose batches are not all known, nothing is known.
            step.has_lost_batches = None in looked_at
            step.readings = [] if None in looked_at else [reading for reading in looked_at if reading is not None]
        self.scalars = LateValues([kept.value for kept in self._kept()])
        self.integers = LateValues([t for step in self.steps for r in step.readings for t in r.tensors()])

    def _looked_at(self, reading: Reading) -> Reading | None:
        try:
            looked_at = self.look_at(reading)
        except Exception as error:  # a type or a tensor class that cannot be computed with
            self.batch_failure = error
            return None
        if looked_at is None:
            self.changed_in_place.add("batch")
        return looked_at

    def has_arrived(self) -> bool:
        segments = self.steps[-1].segments
        marks_passed = segments is None or self.timer.has_passed(segments[-1][1])
        return marks_passed and self.scalars.are_there() and self.integers.are_there()

    def arrives(self, seconds: float) -> bool:
        """Whether it has arrived, or does in that time. Asks again and again: a device that hangs must not hold us."""
        ends = monotonic() + seconds
        while not self.has_arrived():
            if monotonic() >= ends:
                return False
            sleep(_LOOK_SECONDS)
        return True

    def seconds(self) -> float:
        """Of its steps, as far as they have passed."""
        marks = [mark for step in self.steps for mark in step.segments or () if self.timer.has_passed(mark[1])]
        settled = sum(step.measured.seconds or 0.0 for step in self.begun)
        return settled + sum(self.timer.seconds(start, end) for start, end in marks)

    def settle(self, flops_of: FlopsOf, peak_seconds: PeakSeconds = lambda flops: (None, None)) -> SettledWindow:
        """Read everything; price every step."""
        scalars = iter(self.scalars.read())
        integers = iter(self.integers.read())
        steps = [self._settled(step, scalars, integers, flops_of, peak_seconds) for step in self.steps]
        return SettledWindow([*self.begun, *steps], self.busy_seconds_per_step)

    def _settled(
        self,
        step: NotedStep,
        scalars: Iterator[list[Any]],
        integers: Iterator[list[Any]],
        flops_of: FlopsOf,
        peak_seconds: PeakSeconds,
    ) -> SettledStep:
        loss = self._number("loss", step.loss, scalars)
        grad_norm = self._number("grad_norm", step.grad_norm, scalars)
        learning_rate = self._number("lr", step.learning_rate, scalars)
        epoch = self._number("epoch", step.epoch, scalars)
        more = {name: self._number(name, value, scalars) for name, value in step.more.items()} if step.more else {}
        works = [as_work(reading, integers) for reading in step.readings]
        flops = self._flops(step, works, flops_of)
        model_peak_seconds, hardware_peak_seconds = peak_seconds(flops)
        measured = MeasuredStep(
            step.step,
            self._seconds_of(step.segments),
            self._seconds_of(step.waits),
            _sum_known([work.samples for work in works]),
            _sum_known([work.tokens for work in works]),
            _sum_known([work.real_tokens for work in works]),
            _sum_known([work.trainable_tokens for work in works]),
            None if flops is None else flops.model,
            None if flops is None else flops.hardware,
            None if flops is None else flops.recompute,
            loss,
            grad_norm,
            model_peak_seconds=model_peak_seconds,
            hardware_peak_seconds=hardware_peak_seconds,
            reason=None if flops is None else flops.reason or self.doubt,
            is_warm_up=step.calls.count is not None,
            is_watched=step.calls.count is not None,
        )
        return SettledStep(
            measured,
            epoch,
            more.pop("lr", None) if learning_rate is None else learning_rate,
            {name: value for name, value in more.items() if value is not None},
            step.skip_wandb,
        )

    def _flops(self, step: NotedStep, works: list[Work], flops_of: FlopsOf) -> StepFlops | None:
        if step.user_flops is not None:
            return StepFlops(step.user_flops, reason="as the user's flops_fn says")
        return None if step.has_lost_batches else flops_of(step.calls, works)

    def _seconds_of(self, segments: Segments | None) -> float | None:
        return None if segments is None else sum([self.timer.seconds(start, end) for start, end in segments])

    def _number(self, name: str, value: Any, scalars: Iterator[list[Any]]) -> float | None:
        if value is None or isinstance(value, str):
            return None
        read = next(scalars) if isinstance(value, Kept) else [value]
        try:
            if not isinstance(value, Kept) or (len(read) == 1 and value.is_unchanged()):
                return float(read[0])
        except Exception:  # code of the user's: costs this value, and nothing else
            pass
        self.changed_in_place.add(name)
        return None

    def _kept(self) -> list[Kept]:
        return [value for step in self.steps for _, value in _scalars_of(step) if isinstance(value, Kept)]


def _scalars_of(step: NotedStep) -> list[tuple[str, Any]]:
    """In the order in which they are read."""
    own = ("loss", step.loss), ("grad_norm", step.grad_norm), ("lr", step.learning_rate), ("epoch", step.epoch)
    return [*own, *step.more.items()]


def _sum_known(amounts: Sequence[int | None]) -> int | None:
    """Unknown as soon as one is."""
    if len(amounts) == 1:
        return amounts[0]
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known and len(known) == len(amounts) else None
