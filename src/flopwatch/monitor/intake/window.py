"""From what was noted on each step to what is known about it, once the values have arrived."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import IGNORED_LABEL
from flopwatch.monitor.intake.batch_reader import Reading, Work, as_work
from flopwatch.monitor.intake.step_clock import Segments, StepTimer
from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.pricing.certificates import NO_CALLS, StepCalls, StepFlops
from flopwatch.records.run import Number
from flopwatch.torch_internals import tensor_version

# Values that are on the device, fetched with one copy per window and read when the copy has arrived.


_UNREADABLE = -1


class Kept(NamedTuple):
    """A loss or norm to be read later, and the version its storage had: an in-place change raises it."""

    value: torch.Tensor
    version: int

    def is_unchanged(self) -> bool:
        """Also False for what is not a single real number, and for a DTensor shard: its local value is a part only."""
        return tensor_version(self.value) == self.version


_NOT_A_NUMBER = Kept(torch.zeros(()), _UNREADABLE)
_NUMBERS = frozenset((float, int, bool, type(None)))


def keep(value: Any) -> Any:
    """Hold on to a tensor of one number without its graph; numbers stay as they are. Never raises.

    CUDA graphs write the next step's loss into the same memory, so on an accelerator the value is copied. A copy of a
    CPU tensor would cost more than all the rest of a step; there `Kept.is_unchanged` tells whether the training wrote
    into it. Anything that holds more than one number is dropped at once: a window of such values could fill the memory.
    """
    try:
        if type(value) is not torch.Tensor:  # asking for DTensor takes 5 µs after a training step, as much as detach()
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
                return tuple.__new__(Kept, (value, tensor_version(value)))  # without the Python function that Kept() is
            except RuntimeError:  # a tensor of inference mode has no version
                pass
        return _keep_copy(value)
    except Exception:  # a tensor class or an object with code of its own: costs this value, and nothing else
        return _NOT_A_NUMBER


def _keep_copy(value: torch.Tensor) -> Kept:
    """For values on an accelerator, which are all read with one copy, and for those without a version."""
    if value.is_complex() or value.is_meta or value.layout is not torch.strided:
        return _NOT_A_NUMBER
    with torch.inference_mode(False):  # so that the copy has a version
        return Kept(value.clone(), 0)


def _keep_object(value: Any) -> Any:
    """Arrays and containers are read at once, so that they can be freed; other objects, when the window ends."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return value
    return float(value.item() if hasattr(value, "item") else value)


def read_now(value: Any) -> float | None:
    """A value that is read while the device may be waited for; None where it is not a single real number."""
    try:
        return None if value is None else float(value)
    except Exception:  # code of the user's
        return None


def _keep_sharded(value: DTensor) -> Kept:
    """A norm of sharded parameters. Reading one that is not the same everywhere would take a collective: left out."""
    is_whole = all(placement.is_replicate() for placement in value.placements)
    local = value.to_local().detach()
    return _keep_copy(local) if is_whole and local.numel() == 1 else _NOT_A_NUMBER


class LateValues:
    """Tensors of one window on their way to the host.

    The copies are queued behind the work that computes the values, one per device; `are_there` asks without waiting. On
    a CPU nothing is copied and everything is there at once.
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
        for members in groups.values():
            flat = _flattened([tensors[index] for index in members])
            self._copies.append((members, [tensors[index].numel() for index in members], *_fetched(flat, event)))
            for index in members:
                self._tensors[index] = None

    def are_there(self) -> bool:
        return all(arrived.query() for *_, arrived in self._copies)

    def read(self) -> list[list[Any]]:
        """Each tensor's values in a flat list, in the order given."""
        result = [[] if tensor is None else _flat_list(tensor) for tensor in self._tensors]
        for members, sizes, host, _ in self._copies:
            values, start = host.tolist(), 0
            for index, size in zip(members, sizes, strict=True):
                result[index] = values[start : start + size]
                start += size
        return result


def _flat_list(tensor: torch.Tensor) -> list[Any]:
    """The tensor's values; none where they cannot be read: sparse, nested, fake, of a type without numbers."""
    try:
        return _values_of(tensor)
    except Exception:
        return []


def _values_of(tensor: torch.Tensor) -> list[Any]:
    dimensions = tensor.dim()
    if dimensions == 0:
        return [tensor.item()]
    values: list[Any] = tensor.tolist() if dimensions == 1 else tensor.reshape(-1).tolist()
    return values


def _flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if not tensors[0].is_floating_point():
        kind = torch.int64
    else:
        kind = torch.float32 if tensors[0].device.type == "mps" else torch.float64  # Metal has no float64
    return torch.cat([tensor.reshape(-1).to(kind) for tensor in tensors])


def _fetched(flat: torch.Tensor, event: Any) -> tuple[torch.Tensor, Any]:
    # Without pinned memory, a copy to the host blocks even with non_blocking=True.
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.device.type == "cuda")
    host.copy_(flat, non_blocking=True)
    arrived = event(flat.device)
    arrived.record()
    return host, arrived


# Loss and accuracy per dataset in mixed training: summed on the device, fetched once per logging window.


_LOSS, _LOSS_SAMPLES, _RIGHT, _JUDGED, _SAMPLES = range(5)


class DatasetMetrics:
    """One small table on the device: a row per dataset. A window's sums are read one window late."""

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
            raise InputError("log_datasets needs the loss of each sample, or logits and labels, or all three")
        if any(len(tensor) != len(names) for tensor in given):
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
            raise InputError(f"log_datasets got {len(names)} dataset names for tensors of shape {sizes}")
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
                right, judged = _judged(logits.detach(), labels)
                sums[:, _RIGHT].index_add_(0, rows, right.to(sums.dtype))
                sums[:, _JUDGED].index_add_(0, rows, judged.to(sums.dtype))

    def take(self) -> dict[str, Number]:
        """The sums that have arrived; those of now go on their way."""
        arrived: dict[str, Number] = {}
        if self._late is not None and self._late.are_there():
            arrived, self._late = self._values(self._late.read()[0]), None
        if self._sums is not None and self._late is None:
            self._late, self._sums = LateValues([self._sums]), None
            if not arrived and self._late.are_there():  # on a CPU there is nothing to wait for
                arrived, self._late = self._values(self._late.read()[0]), None
        return arrived

    def _table(self, device: torch.device) -> torch.Tensor:
        kind = torch.float32 if device.type == "mps" else torch.float64
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


def _judged(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Right and judged predictions of each sample."""
    samples = len(labels)
    counts = (labels != IGNORED_LABEL).reshape(samples, -1)
    right = (logits.argmax(-1) == labels).reshape(samples, -1) & counts
    return right.sum(1), counts.sum(1)


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
