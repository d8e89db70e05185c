"""From recorded steps to measured ones: keeps their values, waits for them to come from the device, and reads them.

The values of a step stay on the device until its window ends; one copy fetches all. So do the sums by dataset.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import IGNORED_LABEL
from flopwatch.guard import Guard, caught
from flopwatch.monitor.counting.batch_reader import BatchSizes, Reading, sizes_from
from flopwatch.monitor.counting.costs import FlopCost
from flopwatch.monitor.counting.evidence import NOTHING, StepTrace
from flopwatch.monitor.measured_step import MeasuredStep, seconds_of
from flopwatch.monitor.ranks.reports import RATED
from flopwatch.monitor.timing.divide import Divided, StepParts, TapeDivision, times_of
from flopwatch.monitor.timing.tape import StepTimer, Tape
from flopwatch.records.counters import CounterWindow
from flopwatch.records.run import Number
from flopwatch.torch_internals.ops import tensor_version

_LOOK_SECONDS = 0.001
_UNREADABLE = -1


class Kept(NamedTuple):
    """A tensor to be read later, and its version counter in torch, which every in-place change increases."""

    value: torch.Tensor
    version: int

    def is_unchanged(self) -> bool:
        """Whether nothing was written into the tensor since it was kept; False if the kept value was not a number."""
        return tensor_version(self.value) == self.version


_NOT_A_NUMBER = Kept(torch.zeros(()), _UNREADABLE)
_NUMBERS = frozenset((float, int, bool, type(None)))


def keep(value: Any) -> Any:
    """Keep a value until the window ends: a tensor of one number without its graph, a plain number as it is.

    Never raises. On an accelerator the value is copied, because CUDA graphs write the next step's loss into the same
    memory. A CPU tensor is not copied, because that would take longer than the rest of `log_step`; instead
    `Kept.is_unchanged` shows later whether the training wrote into it. Tensors of several numbers are dropped, because
    a window of them could fill the memory.
    """
    try:
        # Plain tensors skip isinstance(value, DTensor), which takes 5 µs (measured right after a training step).
        if type(value) is not torch.Tensor:
            if not isinstance(value, torch.Tensor):
                return value if type(value) in _NUMBERS else _keep_object(value)
            if isinstance(value, DTensor):
                return _keep_sharded(value)
        if value.numel() != 1:
            return _NOT_A_NUMBER
        if value.requires_grad:
            value = value.detach()
        if value.is_cpu:
            try:
                return tuple.__new__(Kept, (value, tensor_version(value)))  # This is faster than Kept(...).
            except RuntimeError:  # Tensors of inference mode have no version counter.
                pass
        return _keep_copy(value)
    except Exception as error:  # noqa: BLE001 - code of a tensor class has raised; only this value is lost
        caught("a logged value", error)
        return _NOT_A_NUMBER


def _keep_copy(value: torch.Tensor) -> Kept:
    if value.is_complex() or value.is_meta or value.layout is not torch.strided:
        return _NOT_A_NUMBER
    with torch.inference_mode(False):  # so that the copy has a version counter
        return Kept(value.clone(), 0)


def _keep_object(value: Any) -> Any:
    """Read arrays and containers now, so that their memory can be freed; keep other objects until the window ends."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return value
    return float(value.item() if hasattr(value, "item") else value)


def read_now(value: Any) -> float | None:
    """Read a value, waiting for the device if necessary; None if it is not a single real number."""
    with Guard("a logged value"):  # code of the user, such as __float__, may raise anything
        return None if value is None else float(value)
    return None


def _keep_sharded(value: DTensor) -> Kept:
    """Keep a replicated DTensor, such as a norm. Drop any other, because reading it needs a collective."""
    is_whole = all(placement.is_replicate() for placement in value.placements)
    local = value.to_local().detach()
    return _keep_copy(local) if is_whole and local.numel() == 1 else _NOT_A_NUMBER


class LateValues:
    """Copies the tensors of one logging window to the host, without waiting for the device.

    The copies are queued behind the work that computes the values; `are_there` polls whether they have arrived. CPU
    tensors are not copied.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        event: Any = torch.Event,
        is_here: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cpu,
    ) -> None:
        self._tensors: list[torch.Tensor | None] = list(tensors)
        self._copies: list[tuple[list[int], list[int], torch.Tensor, Any]] = []
        groups: dict[tuple[torch.device, bool], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if not is_here(tensor):
                groups.setdefault((tensor.device, tensor.is_floating_point()), []).append(index)
        for (device, is_floating), members in groups.items():
            kind = torch.int64 if not is_floating else _float_type(device)
            flat = torch.cat([tensors[index].reshape(-1).to(kind) for index in members])
            # Without pinned memory, a copy to the host blocks even with non_blocking=True.
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=device.type == "cuda")
            host.copy_(flat, non_blocking=True)
            arrived = event(device)
            arrived.record()
            self._copies.append((members, [tensors[index].numel() for index in members], host, arrived))
            for index in members:
                self._tensors[index] = None

    def are_there(self) -> bool:
        return all(arrived.query() for *_, arrived in self._copies)

    def read(self) -> list[list[Any]]:
        """Return one flat list of values per tensor, in the order of the tensors."""
        result = [[] if tensor is None else _flat_list(tensor) for tensor in self._tensors]
        for members, sizes, host, _ in self._copies:
            values = iter(host.tolist())
            for index, size in zip(members, sizes, strict=True):
                result[index] = list(islice(values, size))
        return result


def _flat_list(tensor: torch.Tensor) -> list[Any]:
    """The tensor's values; an empty list if they cannot be read, such as those of sparse, nested or fake tensors."""
    with Guard("a logged value"):
        values: Any = (tensor if tensor.dim() < 2 else tensor.reshape(-1)).tolist()
        return values if tensor.dim() else [values]
    return []


def _float_type(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64


_LOSS, _LOSS_SAMPLES, _RIGHT, _JUDGED, _SAMPLES = range(5)


class DatasetMetrics:
    """Sums loss and accuracy per dataset in a small table on the device, which is read one window later."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._sums: torch.Tensor | None = None
        self._late: LateValues | None = None

    def add(
        self,
        names: Sequence[str],
        losses: torch.Tensor | None,
        logits: torch.Tensor | None,
        labels: torch.Tensor | None,
    ) -> None:
        given = [tensor for tensor in (losses, logits) if tensor is not None]
        if not given or (logits is not None and labels is None):
            raise InputError(
                "log_datasets needs losses= with the loss of each sample, or logits= and labels=, or all three"
            )
        if any(len(tensor) != len(names) for tensor in given):
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
            raise InputError(f"log_datasets: {len(names)} names for tensors of shape {sizes}; pass one name per sample")
        device = given[0].device
        rows = torch.tensor([self._index.setdefault(name, len(self._index)) for name in names]).to(
            device, non_blocking=True
        )
        sums = self._table(device)
        with torch.no_grad():
            sums[:, _SAMPLES].index_add_(0, rows, torch.ones(len(names), device=device, dtype=sums.dtype))
            if losses is not None:
                sums[:, _LOSS].index_add_(0, rows, losses.detach().reshape(len(names), -1).mean(1).to(sums.dtype))
                sums[:, _LOSS_SAMPLES].index_add_(0, rows, torch.ones(len(names), device=device, dtype=sums.dtype))
            if logits is not None and labels is not None:
                judged = (labels != IGNORED_LABEL).reshape(len(labels), -1)
                right = (logits.argmax(-1) == labels).reshape(len(labels), -1) & judged
                sums[:, _RIGHT].index_add_(0, rows, right.sum(1).to(sums.dtype))
                sums[:, _JUDGED].index_add_(0, rows, judged.sum(1).to(sums.dtype))

    def take(self) -> dict[str, Number]:
        """Return the metrics whose sums have arrived on the host, and begin to copy the current sums."""
        arrived: dict[str, Number] = {}
        if self._late is not None and self._late.are_there():
            arrived, self._late = self._values(self._late.read()[0]), None
        if self._sums is not None and self._late is None:
            self._late, self._sums = LateValues([self._sums]), None
            if not arrived and self._late.are_there():  # on a CPU nothing has to be copied
                arrived, self._late = self._values(self._late.read()[0]), None
        return arrived

    def _table(self, device: torch.device) -> torch.Tensor:
        kind = _float_type(device)
        if self._sums is None:
            self._sums = torch.zeros(len(self._index), 5, device=device, dtype=kind)
        missing = len(self._index) - len(self._sums)
        if missing:
            self._sums = torch.cat([self._sums, torch.zeros(missing, 5, device=device, dtype=kind)])
        return self._sums

    def _values(self, flat: list[float]) -> dict[str, Number]:
        values: dict[str, Number] = {}
        for name, row in self._index.items():
            sums = flat[5 * row : 5 * row + 5]
            if not sums or not sums[_SAMPLES]:
                continue
            values[f"dataset/{name}/samples"] = int(sums[_SAMPLES])
            if sums[_LOSS_SAMPLES]:
                values[f"dataset/{name}/loss"] = sums[_LOSS] / sums[_LOSS_SAMPLES]
            if sums[_JUDGED]:
                values[f"dataset/{name}/accuracy"] = sums[_RIGHT] / sums[_JUDGED]
        return values


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


class LateWindow(NamedTuple):
    """A window that has ended, and whose values may still be on their way.

    Attributes:
        read_early: Its first steps, which a checkpoint has read.
        counters: As in `Window`.
    """

    arrival: Arrival
    read_early: list[MeasuredStep]
    counters: tuple[CounterWindow, ...]


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
        self._late: deque[LateWindow] = deque()
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

    def end_window(self, arrival: Arrival, counters: tuple[CounterWindow, ...] = ()) -> None:
        """End the current window: the steps that were read early and those of `arrival`, whose values come later."""
        self._late.append(LateWindow(arrival, self.read_early, counters))
        self.read_early = []

    def take_arrived(self, wait_seconds: float) -> Iterator[LateWindow]:
        """The windows whose values have arrived."""
        while self._late and self._late[0].arrival.arrives(wait_seconds):
            yield self._late.popleft()

    @property
    def late_steps(self) -> int:
        return sum(len(late.arrival.steps) for late in self._late)

    def later_seconds(self) -> float:
        """Time of the steps that are in no window yet and whose values have not been read."""
        late = [passed_seconds(w.arrival.parts, w.arrival.timer) + seconds_of(w.read_early) for w in self._late]
        return passed_seconds(self._parts, self._tape.timer) + sum(late)
