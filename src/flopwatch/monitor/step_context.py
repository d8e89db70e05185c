"""`with monitor.step(batch) as step:` one optimizer step as a context."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flopwatch.monitor.training_monitor import TrainingMonitor

_NOTHING_MORE: dict[str, Any] = {}


class Step:
    """An optimizer step under way. It is logged when the context ends, unless the body raised.

    Attributes:
        number: The step's number.
    """

    __slots__ = ("_batch", "_epoch", "_grad_norm", "_lengths", "_loss", "_lr", "_monitor", "_more", "number")

    def __init__(
        self, monitor: "TrainingMonitor", number: int, epoch: Any, batch: Any, lengths: Sequence[int] | None
    ) -> None:
        self.number = number
        self._monitor = monitor
        self._epoch = epoch
        self._batch = batch
        self._lengths = lengths
        self._loss: Any = None
        self._lr: Any = None
        self._grad_norm: Any = None
        self._more: dict[str, Any] | None = None

    def log(self, loss: Any = None, lr: Any = None, grad_norm: Any = None, epoch: Any = None, **more: Any) -> None:
        """Values of this step; tensors are read later. Can be called several times."""
        if loss is not None:
            self._loss = loss
        if lr is not None:
            self._lr = lr
        if grad_norm is not None:
            self._grad_norm = grad_norm
        if epoch is not None:
            self._epoch = epoch
        if more:
            known = {name: value for name, value in more.items() if value is not None}
            self._lr = known.pop("learning_rate", self._lr)
            self._more = {**(self._more or {}), **known}

    def micro_batch(self, batch: Any, lengths: Sequence[int] | None = None) -> None:
        """One of the batches of this step, for gradient accumulation.

        When it arrived is known where it comes from `monitor.batches(loader)`; else the step's input wait is not.
        """
        self._monitor.micro_batch(batch, lengths)

    def __enter__(self) -> "Step":
        monitor = self._monitor
        core = monitor._core
        if core is not None:
            try:
                core.step_clock.start_step(self._batch is not None)
                core.pricing.begin_step()
            except Exception as error:
                monitor._failed("start_step", error)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        monitor = self._monitor
        core = monitor._core
        if kind is not None:
            monitor._abandon_step()
        elif self._more or self._batch is None or core is None or not monitor._logs_steps_itself:
            monitor.log_step(self.number, batch=self._batch, lengths=self._lengths, **self._values())
        else:  # what `log_step` does, without taking its arguments apart a second time
            entered = monitor._clock()
            try:
                core.note_step(
                    self.number, self._epoch, self._loss, self._grad_norm, self._lr, False,
                    self._batch, self._lengths, _NOTHING_MORE,
                )  # fmt: skip
                if core.is_off:
                    monitor._core = None
            except Exception as error:
                monitor._failed("log_step", error)
            core.own_seconds += monitor._clock() - entered

    def _values(self) -> dict[str, Any]:
        """As `log_step` takes them."""
        known = {"epoch": self._epoch, "loss": self._loss, "grad_norm": self._grad_norm, "learning_rate": self._lr}
        return {**known, **(self._more or {})}
