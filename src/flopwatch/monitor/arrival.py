"""From recorded steps to measured ones: waits for their values to come from the device, and reads them."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import Any, NamedTuple

from flopwatch.guard import Guard
from flopwatch.monitor.counting.batch_reader import BatchSizes, Reading, sizes_from
from flopwatch.monitor.counting.costs import FlopCost
from flopwatch.monitor.counting.evidence import NOTHING, StepTrace
from flopwatch.monitor.kept import DatasetMetrics, Kept, LateValues, read_now
from flopwatch.monitor.measured_step import MeasuredStep, seconds_of
from flopwatch.monitor.ranks.reports import RATED
from flopwatch.monitor.timing.divide import Divided, StepParts, TapeDivision, times_of
from flopwatch.monitor.timing.tape import StepTimer, Tape

_LOOK_SECONDS = 0.001


class RecordedStep(NamedTuple):
    """What is recorded of a step when it ends; nothing of it has been read from the device yet."""

    step: int
    epoch: Any
    loss: Any
    grad_norm: Any
    learning_rate: Any
    readings: Sequence[Reading]
    skip_wandb: bool
    more: Mapping[str, Any]
    user_flops: int | None = None
    trace: StepTrace = NOTHING

    def scalars(self) -> list[tuple[str, Any]]:
        """The step's values by name, in the order in which they are read."""
        own = ("loss", self.loss), ("grad_norm", self.grad_norm), ("lr", self.learning_rate), ("epoch", self.epoch)
        return [*own, *self.more.items()]


class Arrival:
    """The steps of one window, while their values are copied from the device to the host.

    Attributes:
        timer: Has set the marks of the parts.
        left_out: Names of values that are not a single number or were overwritten; `batch` for an overwritten batch.
        batch_failure: The exception that reading a batch has raised; None if all batches could be read.
    """

    def __init__(
        self,
        steps: Sequence[RecordedStep],
        parts: Sequence[StepParts],
        timer: StepTimer,
        with_sizes: Callable[[Reading], Reading | None],
    ) -> None:
        """Begin to copy the values to the host. `with_sizes` computes batch sizes that `log_step` has deferred."""
        self.steps, self.parts = steps, parts
        self.timer = timer
        self.left_out: set[str] = set()
        self.batch_failure: Exception | None = None
        self._readings = [self._all_with_sizes(step.readings, with_sizes) for step in steps]
        self._scalars = LateValues(
            [kept.value for step in steps for _, kept in step.scalars() if isinstance(kept, Kept)]
        )
        self._integers = LateValues([t for readings in self._readings for r in readings or () for t in r.tensors()])

    def _all_with_sizes(
        self, readings: Sequence[Reading], with_sizes: Callable[[Reading], Reading | None]
    ) -> list[Reading] | None:
        """Compute the sizes of a step's batches; None if a batch was overwritten in the meantime or cannot be read."""
        computed: list[Reading | None] = [None]
        # For example, a dtype or tensor class does not support an op used here.
        with Guard("batch", lambda _, error: setattr(self, "batch_failure", error)):
            computed = [with_sizes(reading) for reading in readings]
        known = [reading for reading in computed if reading is not None]
        if len(known) == len(computed):
            return known
        if self.batch_failure is None:
            self.left_out.add("batch")
        return None

    def arrives(self, seconds: float) -> bool:
        """Wait at most `seconds` for the values, and return whether they have arrived.

        Polls instead of synchronising, because a hung device must not block the training.
        """
        ends = monotonic() + seconds
        while not self._has_arrived():
            if monotonic() >= ends:
                return False
            sleep(_LOOK_SECONDS)
        return True

    def _has_arrived(self) -> bool:
        newest = next((part.segments[-1] for part in reversed(self.parts) if part.segments), None)
        marks_passed = newest is None or self.timer.has_passed(newest[2])  # a step that ends in a phase has no segments
        return marks_passed and self._scalars.are_there() and self._integers.are_there()

    def measured(self, cost: Callable[[RecordedStep, list[BatchSizes] | None], FlopCost]) -> tuple[MeasuredStep, ...]:
        """Read all values; `cost` finds the FLOPs. Call this only after `arrives` has returned True."""
        scalars, integers = iter(self._scalars.read()), iter(self._integers.read())
        measured = []
        for step, parts, readings in zip(self.steps, self.parts, self._readings, strict=True):
            batch_sizes = None if readings is None else [sizes_from(reading, integers) for reading in readings]
            values: dict[str, Any] = self._values(step, scalars)
            amounts: dict[str, Any] = {}
            for name in RATED:
                of_batches = [getattr(batch, name) for batch in batch_sizes or ()]
                amounts[name] = sum(of_batches) if of_batches and None not in of_batches else None
            measured.append(
                MeasuredStep(
                    step.step,
                    is_warm_up=step.trace.was_counted,
                    is_counted=step.trace.was_counted,
                    loss=values.pop("loss", None),
                    grad_norm=values.pop("grad_norm", None),
                    epoch=values.pop("epoch", None),
                    learning_rate=values.pop("lr", None),
                    more=values,
                    skip_wandb=step.skip_wandb,
                    **amounts,
                    **cost(step, batch_sizes)._asdict(),
                    **times_of(parts, self.timer.seconds),
                )
            )
        return tuple(measured)

    def _values(self, step: RecordedStep, scalars: Iterator[list[Any]]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, value in step.scalars():
            if value is None or isinstance(value, str):
                continue
            read = next(scalars) if isinstance(value, Kept) else [value]
            is_readable = not isinstance(value, Kept) or (len(read) == 1 and value.is_unchanged())
            number = read_now(read[0]) if is_readable else None
            if number is None:
                self.left_out.add(name)
            else:
                values.setdefault(name, number)  # Arguments such as `loss` take precedence over `more`.
        return values


def passed_seconds(parts: Sequence[StepParts], timer: StepTimer) -> float:
    """Time of these steps so far, up to the last event that the device has reached."""
    segments = [segment for part in parts for segment in part.segments or () if timer.has_passed(segment[2])]
    return sum(timer.seconds(start, end) for _, start, end in segments)


class Arrivals:
    """The steps that are on their way from the tape to a window.

    Attributes:
        read_early: Steps of the current window whose values were read early, when a checkpoint was saved.
        datasets: Sums by dataset, which arrive late too.
        outside_seconds: Time of gaps that belong to no step.
        count_seconds: Time that the training's thread has spent counting FLOPs.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.division = TapeDivision()
        self._parts: list[StepParts] = []
        """The parts of the recorded steps that are in no `Arrival` yet."""
        self._late: deque[tuple[Arrival, list[MeasuredStep], float | None]] = deque()
        self.read_early: list[MeasuredStep] = []
        self.datasets = DatasetMetrics()
        self.outside_seconds = self.count_seconds = 0.0

    def use_timer(self, timer: StepTimer) -> None:
        """Measure with another timer from now on; the step that is open begins again."""
        self._tape.timer = timer
        self._tape.take()
        self._parts = [StepParts(None) for _ in self._parts]  # the new timer cannot read their marks
        self.division = TapeDivision(seconds_before_first_step=self.division.seconds_before_first_step)

    def divide(self) -> Divided:
        divided = self.division.divide(self._tape.take())
        self._parts += divided.steps
        self.outside_seconds += sum(seconds for phase, seconds in divided.spent if phase == "outside")
        return divided

    def begin(self, steps: Sequence[RecordedStep], with_sizes: Callable[[Reading], Reading | None]) -> Arrival:
        parts, self._parts = self._parts[: len(steps)], self._parts[len(steps) :]
        return Arrival(steps, parts, self._tape.timer, with_sizes)

    def end_window(self, arrival: Arrival, busy_seconds_per_step: float | None) -> None:
        """End the current window: the steps that were read early and those of `arrival`, whose values come later."""
        self._late.append((arrival, self.read_early, busy_seconds_per_step))
        self.read_early = []

    def take_arrived(self, wait_seconds: float) -> Iterator[tuple[Arrival, list[MeasuredStep], float | None]]:
        """The windows whose values have arrived: the arrival, the steps that were read early, and the busy time."""
        while self._late and self._late[0][0].arrives(wait_seconds):
            yield self._late.popleft()

    @property
    def late_steps(self) -> int:
        return sum(len(arrival.steps) for arrival, _, _ in self._late)

    def later_seconds(self) -> float:
        """Time of the steps that are in no window yet and whose values have not been read."""
        late = [passed_seconds(arrival.parts, arrival.timer) + seconds_of(early) for arrival, early, _ in self._late]
        return passed_seconds(self._parts, self._tape.timer) + sum(late)
