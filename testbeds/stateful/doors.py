"""The doors through which flopwatch comes to a loop, each with the same two calls, so that the loop's code is the same.

    run.watch(model)
    with run.step(batch) as step:
        ...
        step.log(loss=loss)

`Plain` does nothing: it is a training without flopwatch, and also the unchanged script under `flopwatch run`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

STEPS = 16
LOG_EVERY = 4
SETTINGS = {"sink_options": {"prometheus": {"port": 0}}}
"""Of sinks that need some; the system chooses a free port."""


class PlainStep:
    """Takes what a loop logs, and forgets it."""

    def log(self, **values: Any) -> None:
        pass

    def micro_batch(self, batch: Any) -> None:
        pass


class Plain:
    """No monitor."""

    def watch(self, model: nn.Module | None) -> None:
        pass

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[Any]:
        yield PlainStep()

    def close(self) -> None:
        pass


class Monitored:
    """A `TrainingMonitor` with `with monitor.step(batch)`."""

    def __init__(self, folder: Path, sinks: list[str]) -> None:
        self._folder = folder
        self._sinks = sinks
        self._monitor: Any = None

    def watch(self, model: nn.Module | None) -> None:
        """The first call makes the monitor; later ones tell it of another model."""
        if self._monitor is not None:
            self._monitor.set_model(model)
            return
        from flopwatch import TrainingMonitor

        options = {"peak_flops_per_s": 1e12, "log_every": LOG_EVERY, "sinks": self._sinks}
        self._monitor = TrainingMonitor(self._folder, SETTINGS, model=model, **options)

    def step(self, batch: Any = None) -> Any:
        return self._monitor.step(batch)

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()


class LoggedStep:
    """Remembers what a loop logs until its step has ended."""

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor
        self.values: dict[str, Any] = {}

    def log(self, **values: Any) -> None:
        self.values.update(values)

    def micro_batch(self, batch: Any) -> None:
        self._monitor.micro_batch(batch)


class Logged(Monitored):
    """A `TrainingMonitor` that is told of each step by `log_step` only."""

    def __init__(self, folder: Path, sinks: list[str]) -> None:
        super().__init__(folder, sinks)
        self._number = 0

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[Any]:
        step = LoggedStep(self._monitor)
        yield step
        self._monitor.log_step(self._number, batch=batch, **step.values)
        self._number += 1
        step.values.clear()


class Watched(Plain):
    """`flopwatch.watch()` at the top; the loop is unchanged."""

    def __init__(self, folder: Path, sinks: list[str]) -> None:
        import flopwatch

        options: dict[str, Any] = {"peak_flops_per_s": 1e12, "log_every": LOG_EVERY}
        others = [sink for sink in sinks if sink != "console"]
        if others:
            options["sinks"] = others
        self._process = flopwatch.watch(folder, quiet="console" not in sinks, **options)

    def close(self) -> None:
        self._process.stop()


DOORS = {"step": Monitored, "log_step": Logged, "watch": Watched}


def open_door(name: str, folder: Path, sinks: list[str]) -> Plain | Monitored:
    """The door of this name; `plain` is a training without flopwatch."""
    if name == "plain":
        return Plain()
    os.makedirs(folder, exist_ok=True)
    return DOORS[name](folder, sinks)
