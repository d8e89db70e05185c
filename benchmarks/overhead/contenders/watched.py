"""flopwatch's own monitor in the loop, with what it says and what a stopwatch says of its calls."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from flopwatch import TrainingMonitor
from overhead.training_loop import LEARNING_RATE, LOG_EVERY, Contender, Training

Call = Literal["attention_mask", "batch"]

ALL_SINKS = ("tensorboard", "wandb")
"""Beside the local log, which is always there."""
_PATIENCE_SECONDS = 600.0


class Watched:
    """A training with our monitor. `call` is what `log_step` is given: a mask, or the whole batch."""

    def __init__(
        self,
        training: Training,
        folder: Path,
        *,
        mode: str = "smart",
        sinks: tuple[str, ...] = (),
        every: int | None = None,
        call: Call = "attention_mask",
    ) -> None:
        self._training = training
        self._given: dict[str, Any] = {"attention_mask": training.attention_mask}
        if call == "batch":
            self._given = {"batch": {**training.batch, "attention_mask": training.attention_mask}}
        # Turns without the monitor pass too, so windows must end by steps, as they would without these turns.
        config: dict[str, Any] = {"log_every": LOG_EVERY, "log_seconds": 3600.0}
        if every is not None:
            config |= {"recalibration_frequency": every, "flops_profile_freq": every}
        self.monitor = TrainingMonitor(folder, {"flopwatch": config}, model=training.model, mode=mode, sinks=sinks)
        self.call_seconds: list[float] = []
        self._call_cpu_seconds = 0.0
        self._first_of_window = 0
        self._at_start = self._at_end = (0, 0.0, 0.0, 0.0)

    def contender(self) -> Contender:
        return Contender(self._step, apart=self.monitor.pause, get_ready=self._get_ready, close=self._close)

    def _get_ready(self) -> None:
        """Make a row, and wait until the sinks have loaded what they load and started what they start for it."""
        self.monitor.log_now()
        self._first_of_window = len(self.call_seconds)
        self._wait_for_sinks()
        self._at_start = self._spent()

    def calls_in_the_loop(self) -> list[float]:
        return self._ordinary(self._at_start[0])

    def _ordinary(self, first: int) -> list[float]:
        """Seconds of the calls from this one on that did not end a logging window."""
        return [
            seconds
            for place, seconds in enumerate(self.call_seconds, start=1 - self._first_of_window)
            if place > first - self._first_of_window and place % LOG_EVERY != 0
        ]

    def figures(self) -> Mapping[str, Any]:
        """Of the time from the warm-up to the end."""
        steps, calls, threads, call_cpu = (now - then for now, then in zip(self._at_end, self._at_start, strict=True))
        return {
            "own_seconds_per_step": (calls + threads) / steps,
            "own_cpu_seconds_per_step": (call_cpu + threads) / steps,
            "thread_seconds_per_step": threads / steps,
            "count_seconds": self.monitor.count_seconds,
            "sinks_start_cpu_seconds": self._at_start[2],
        }

    def calls_in_a_row(self, calls: int) -> list[float]:
        """The same call over and over, when everything it needs is in the caches."""
        loss, grad_norm = self._training.step()
        first = len(self.call_seconds)
        for number in range(first, first + calls):
            self._log(number, loss, grad_norm)
        return self._ordinary(first + calls // 10)

    def _wait_for_sinks(self) -> None:
        """Until each has written its rows. Not by the public interface: only a benchmark has to know."""
        threads = self.monitor._started_run.outlets._threads if self.monitor._started_run else []
        for thread in threads:
            if not thread.flush(_PATIENCE_SECONDS):
                why = thread.failed or f"it took more than {_PATIENCE_SECONDS:.0f} s"
                raise RuntimeError(f"{thread.name} did not write all rows, so this is no measurement ({why})")

    def _close(self) -> None:
        self._wait_for_sinks()
        self._at_end = self._spent()
        self.monitor.close()

    def _spent(self) -> tuple[int, float, float, float]:
        monitor = self.monitor
        return len(self.call_seconds), monitor.own_seconds, monitor.thread_cpu_seconds, self._call_cpu_seconds

    def _step(self, number: int) -> None:
        loss, grad_norm = self._training.step()
        self._log(number, loss, grad_norm)

    def _log(self, number: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        cpu_before = time.thread_time()
        before = time.perf_counter()
        self.monitor.log_step(number, 0, loss, grad_norm, LEARNING_RATE, **self._given)
        self.call_seconds.append(time.perf_counter() - before)
        self._call_cpu_seconds += time.thread_time() - cpu_before


def flopwatch(training: Training, folder: Path, **options: Any) -> Contender:
    return Watched(training, folder, **options).contender()
