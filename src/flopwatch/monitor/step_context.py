"""`with monitor.step(batch) as step:` one optimizer step as a context."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flopwatch.monitor.training_monitor import TrainingMonitor


class Step:
    """An optimizer step under way. It is logged when the context ends, unless the body raised.

    Attributes:
        number: The step's number.
    """

    __slots__ = ("_batch", "_epoch", "_lengths", "_logged", "_monitor", "number")

    def __init__(
        self, monitor: "TrainingMonitor", number: int, epoch: Any, batch: Any, lengths: Sequence[int] | None
    ) -> None:
        self.number = number
        self._monitor = monitor
        self._epoch = epoch
        self._batch = batch
        self._lengths = lengths
        self._logged: dict[str, Any] = {}

    def log(self, loss: Any = None, lr: Any = None, grad_norm: Any = None, epoch: Any = None, **more: Any) -> None:
        """Values of this step; tensors are read later. Can be called several times."""
        given = {"loss": loss, "learning_rate": lr, "grad_norm": grad_norm, "epoch": epoch, **more}
        self._logged.update((name, value) for name, value in given.items() if value is not None)

    def micro_batch(self, batch: Any, lengths: Sequence[int] | None = None) -> None:
        """One of the batches of this step, for gradient accumulation.

        When it arrived is known where it comes from `monitor.batches(loader)`; else the step's input wait is not.
        """
        self._monitor.micro_batch(batch, lengths)

    def __enter__(self) -> "Step":
        self._monitor._open_step(has_batch=self._batch is not None)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            values = {"epoch": self._epoch, **self._logged}
            self._monitor.log_step(self.number, batch=self._batch, lengths=self._lengths, **values)
        else:
            self._monitor._abandon_step()
