"""A window: the steps of one log row. Values stay on the device until the window ends; then one copy fetches all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import IGNORED_LABEL
from flopwatch.monitor.measured_step import MeasuredStep
from flopwatch.monitor.pricing.batch_reader import Reading, Work, as_work
from flopwatch.monitor.pricing.price import StepCost
from flopwatch.monitor.pricing.step_counter import NOTHING, StepTrace
from flopwatch.monitor.timing.step_clock import OptimizerPlace, Segments
from flopwatch.monitor.timing.timers import StepTimer
from flopwatch.records.run import Number
from flopwatch.torch_internals.ops import tensor_version

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
    except Exception:  # code of the user, such as a tensor class, has raised; only this value is lost
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
    try:
        return None if value is None else float(value)
    except Exception:  # code of the user, such as __float__, may raise anything
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
        for members in groups.values():
            flat = _flattened([tensors[index] for index in members])
            self._copies.append((members, [tensors[index].numel() for index in members], *_fetched(flat, event)))
            for index in members:
                self._tensors[index] = None

    def are_there(self) -> bool:
        return all(arrived.query() for *_, arrived in self._copies)

    def read(self) -> list[list[Any]]:
        """Return one flat list of values per tensor, in the order of the tensors."""
        result = [[] if tensor is None else _flat_list(tensor) for tensor in self._tensors]
        for members, sizes, host, _ in self._copies:
            values, start = host.tolist(), 0
            for index, size in zip(members, sizes, strict=True):
                result[index] = values[start : start + size]
                start += size
        return result


def _flat_list(tensor: torch.Tensor) -> list[Any]:
    """The tensor's values; an empty list if they cannot be read, such as those of sparse, nested or fake tensors."""
    try:
        values: Any = (tensor if tensor.dim() < 2 else tensor.reshape(-1)).tolist()
    except Exception:
        return []
    return values if tensor.dim() else [values]


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
                right, judged = _judged(logits.detach(), labels)
                sums[:, _RIGHT].index_add_(0, rows, right.to(sums.dtype))
                sums[:, _JUDGED].index_add_(0, rows, judged.to(sums.dtype))

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
    """Count the correct predictions and the labelled positions of each sample."""
    samples = len(labels)
    counts = (labels != IGNORED_LABEL).reshape(samples, -1)
    right = (logits.argmax(-1) == labels).reshape(samples, -1) & counts
    return right.sum(1), counts.sum(1)


_LOOK_SECONDS = 0.001


class NotedStep(NamedTuple):
    """What `log_step` keeps of a step; nothing of it has been read from the device yet."""

    step: int
    epoch: Any
    loss: Any
    grad_norm: Any
    learning_rate: Any
    readings: Sequence[Reading]
    segments: Segments | None
    waits: Segments | None
    skip_wandb: bool
    more: Mapping[str, Any]
    user_flops: int | None = None
    trace: StepTrace = NOTHING
    optimizer_place: OptimizerPlace | None = None
    passes: Segments | None = None

    def scalars(self) -> list[tuple[str, Any]]:
        """The step's values by name, in the order in which they are read."""
        own = ("loss", self.loss), ("grad_norm", self.grad_norm), ("lr", self.learning_rate), ("epoch", self.epoch)
        return [*own, *self.more.items()]


class SettledStep(NamedTuple):
    """A step whose values have been read from the device.

    Attributes:
        noted: The step as `log_step` kept it.
        seconds: The step's time; None for a session's first step, if the loop did not open it with `step()`.
        input_wait_seconds: The part of `seconds` spent waiting for batches; None if unknown.
        works: Sizes of the step's batches; None if one of them could not be read.
        values: Loss, gradient norm, learning rate, epoch and the user's own metrics; only those that are numbers.
        optimizer_seconds: The part of `seconds` in which optimizers changed the parameters; None if unknown.
        host_seconds: The part of `seconds` after the last optimizer; None if unknown.
        passes_seconds: The part of `seconds` in forward and backward passes; None if unknown.
    """

    noted: NotedStep
    seconds: float | None
    input_wait_seconds: float | None
    works: list[Work] | None
    values: dict[str, float]
    optimizer_seconds: float | None = None
    host_seconds: float | None = None
    passes_seconds: float | None = None


class SettledWindow(NamedTuple):
    """A window whose values have been read from the device.

    Attributes:
        steps: The steps of the window.
        left_out: Names of values that are not a single number or were overwritten; `batch` for an overwritten batch.
        batch_failure: The exception that reading a batch has raised; None if all batches could be read.
    """

    steps: list[SettledStep]
    left_out: frozenset[str] = frozenset()
    batch_failure: Exception | None = None


class LateSteps:
    """The steps of one log row, while their values are copied from the device to the host."""

    def __init__(
        self,
        steps: Sequence[NotedStep],
        timer: StepTimer,
        look_at: Callable[[Reading], Reading | None] = lambda reading: reading,
    ) -> None:
        """Begin to copy the values to the host. `look_at` computes the batch sizes that `log_step` left for later."""
        self.steps = steps
        self._timer = timer
        self._look_at = look_at
        self._left_out: set[str] = set()
        self._batch_failure: Exception | None = None
        self._readings = [self._looked_at(step.readings) for step in steps]
        self._scalars = LateValues(
            [kept.value for step in steps for _, kept in step.scalars() if isinstance(kept, Kept)]
        )
        self._integers = LateValues([t for readings in self._readings for r in readings or () for t in r.tensors()])

    def _looked_at(self, readings: Sequence[Reading]) -> list[Reading] | None:
        """Compute the sizes of a step's batches; None if a batch was overwritten in the meantime or cannot be read."""
        try:
            looked_at = [self._look_at(reading) for reading in readings]
        except Exception as error:  # for example, a dtype or tensor class does not support an op used here
            self._batch_failure = error
            return None
        known = [reading for reading in looked_at if reading is not None]
        if len(known) < len(looked_at):
            self._left_out.add("batch")
            return None
        return known

    def has_arrived(self) -> bool:
        segments = self.steps[-1].segments
        marks_passed = segments is None or self._timer.has_passed(segments[-1][1])
        return marks_passed and self._scalars.are_there() and self._integers.are_there()

    def arrives(self, seconds: float) -> bool:
        """Wait at most `seconds` for the values, and return whether they have arrived.

        Polls instead of synchronising, because a hung device must not block the training.
        """
        ends = monotonic() + seconds
        while not self.has_arrived():
            if monotonic() >= ends:
                return False
            sleep(_LOOK_SECONDS)
        return True

    def settle(self) -> SettledWindow:
        """Read all values. Call this only after `has_arrived` has returned True."""
        scalars, integers = iter(self._scalars.read()), iter(self._integers.read())
        steps = [
            SettledStep(
                step,
                self._seconds_of(step.segments),
                self._seconds_of(step.waits),
                None if readings is None else [as_work(reading, integers) for reading in readings],
                self._values(step, scalars),
                *self._optimizer_times(step),
                self._seconds_of(step.passes),
            )
            for step, readings in zip(self.steps, self._readings, strict=True)
        ]
        return SettledWindow(steps, frozenset(self._left_out), self._batch_failure)

    def _seconds_of(self, segments: Segments | None) -> float | None:
        return None if segments is None else sum([self._timer.seconds(start, end) for start, end in segments])

    def _optimizer_times(self, step: NotedStep) -> tuple[float | None, float | None]:
        """Seconds of the optimizers in a step, and seconds after the last of them."""
        place, segments = step.optimizer_place, step.segments
        if place is None or segments is None:
            return None, None
        own = tuple(segment for first, last in place.spans for segment in segments[first:last])
        if place.rest_at is None:
            return self._seconds_of(own), None
        rest = self._seconds_of(segments[place.rest_at :]) or 0.0
        waited = self._seconds_of((step.waits or ())[place.waits_at :]) or 0.0
        return self._seconds_of(own), max(rest - waited, 0.0)

    def _values(self, step: NotedStep, scalars: Iterator[list[Any]]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, value in step.scalars():
            if value is None or isinstance(value, str):
                continue
            read = next(scalars) if isinstance(value, Kept) else [value]
            try:
                if isinstance(value, Kept) and (len(read) != 1 or not value.is_unchanged()):
                    raise ValueError
                values.setdefault(name, float(read[0]))  # Arguments such as `loss` take precedence over `more`.
            except Exception:  # Code of the user, such as __float__, has raised. Only this value is lost.
                self._left_out.add(name)
        return values


def passed_seconds(steps: Sequence[NotedStep], timer: StepTimer) -> float:
    """Time of these steps so far, up to the last event that the device has reached."""
    marks = [mark for step in steps for mark in step.segments or () if timer.has_passed(mark[1])]
    return sum(timer.seconds(start, end) for start, end in marks)


def price_step(settled: SettledStep, cost: StepCost) -> MeasuredStep:
    """Combine a step with its FLOPs."""
    noted, works, values = settled.noted, settled.works or [], dict(settled.values)
    flops, is_counted = cost.flops, noted.trace.was_counted
    return MeasuredStep(
        noted.step,
        settled.seconds,
        settled.input_wait_seconds,
        _sum_known([work.samples for work in works]),
        _sum_known([work.tokens for work in works]),
        _sum_known([work.real_tokens for work in works]),
        _sum_known([work.trainable_tokens for work in works]),
        None if flops is None else flops.model,
        None if flops is None else flops.hardware,
        None if flops is None else flops.recompute,
        values.pop("loss", None),
        values.pop("grad_norm", None),
        model_peak_seconds=cost.model_peak_seconds,
        hardware_peak_seconds=cost.hardware_peak_seconds,
        reason=cost.reason,
        is_warm_up=is_counted,
        is_counted=is_counted,
        optimizer_seconds=settled.optimizer_seconds,
        host_seconds=settled.host_seconds,
        passes_seconds=settled.passes_seconds,
        epoch=values.pop("epoch", None),
        learning_rate=values.pop("lr", None),
        more=values,
        skip_wandb=noted.skip_wandb,
    )


def _sum_known(amounts: Sequence[int | None]) -> int | None:
    """The sum; None if there are no amounts or one of them is unknown."""
    if len(amounts) == 1:
        return amounts[0]
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known and len(known) == len(amounts) else None
