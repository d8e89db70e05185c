"""What a run has done since its first start: totals that survive a resume. Pure arithmetic."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flopwatch.goodput import APART, goodput_of, loss_in_step
from flopwatch.monitor.meter import MeasuredStep
from flopwatch.run_records import Number

_TOTALS = ("samples", "tokens", "real_tokens", "trainable_tokens", "model_flops", "hardware_flops")


@dataclass
class Ledger:
    """Adds up steps and phases. What was never known is not in `totals`; a part unknown later keeps what was known.

    Attributes:
        steps: Optimizer steps that count.
        totals: Samples, tokens and FLOPs of them.
        seconds: By class, see `flopwatch.goodput`; `wall` is up to the newest row.
        first_start_unix_time: When the run's first process started; None for a log that does not tell.
    """

    steps: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first_start_unix_time: float | None = None
    _not_compared: list[float] = field(default_factory=list, repr=False)
    """Work of warm-up steps from before the first typical one."""

    def add_steps(self, steps: Iterable[MeasuredStep], typical_seconds: float | None = None) -> None:
        """Count steps; beyond `typical_seconds`, the work of a warm-up or stalled step made no progress."""
        for step in steps:
            self.steps += 1
            for name in _TOTALS:
                amount = getattr(step, name)
                if amount is not None:
                    self.totals[name] = self.totals.get(name, 0) + amount
            if step.seconds is not None and step.work_seconds is not None:
                if step.is_watched:
                    self._add_watched(step.seconds, step.work_seconds, typical_seconds)
                    self._add_wait(step)
                    continue
                self.spend("train", step.seconds)
                if step.is_warm_up:
                    self.spend("warm_up", step.seconds)
                self._look_for_loss(step.work_seconds, typical_seconds, is_warm_up=step.is_warm_up)
            self._add_wait(step)

    def _add_wait(self, step: MeasuredStep) -> None:
        if step.input_wait_seconds is not None:
            self.spend("input_wait", step.input_wait_seconds)

    def _add_watched(self, seconds: float, work_seconds: float, typical: float | None) -> None:
        """A step that was counted as it ran: what it took beyond the typical one is time spent counting."""
        extra = 0.0 if typical is None else max(0.0, work_seconds - typical)
        self.spend("train", seconds - extra)
        self.spend("count", extra)

    def add_amounts(self, amounts: Mapping[str, int]) -> None:
        """Samples, tokens and FLOPs of a window, where they are not told step by step."""
        for name in _TOTALS:
            if name in amounts:
                self.totals[name] = self.totals.get(name, 0) + amounts[name]

    def _look_for_loss(self, work_seconds: float, typical: float | None, *, is_warm_up: bool) -> None:
        if is_warm_up:
            self._not_compared.append(work_seconds)
        elif (loss := loss_in_step(work_seconds, typical, is_warm_up=False)) is not None:
            self.spend(*loss)
        if typical is not None and self._not_compared:
            for waiting in self._not_compared:
                if (loss := loss_in_step(waiting, typical, is_warm_up=True)) is not None:
                    self.spend(*loss)
            self._not_compared.clear()

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Time outside steps; a phase without a metric of its own counts as pause."""
        self.spend(phase if phase in APART else "pause", seconds)

    def spend(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def tell_wall(self, unix_time: float) -> None:
        """Wall time is up to this moment."""
        if self.first_start_unix_time is not None:
            self.seconds["wall"] = unix_time - self.first_start_unix_time

    def values(self) -> dict[str, Number]:
        """The totals under the keys of `flopwatch.metrics`."""
        values: dict[str, Number] = {
            "total/steps": self.steps,
            **{f"total/{name}": total for name, total in self.totals.items()},
            **{f"time/{name}_seconds": seconds for name, seconds in self.seconds.items()},
        }
        goodput = goodput_of(self.seconds)
        if goodput is not None:
            values["perf/goodput"] = goodput.share
            values["perf/goodput_percent"] = 100 * goodput.share
            values["time/productive_seconds"] = goodput.productive_seconds
            values["time/other_seconds"] = goodput.lost_seconds["other"]
        return values

    def to_json(self) -> dict[str, Any]:
        state = {"steps": self.steps, "totals": dict(self.totals), "seconds": dict(self.seconds)}
        return state | {"first_start_unix_time": self.first_start_unix_time}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Ledger":
        first_start = state.get("first_start_unix_time")  # logs before goodput have none
        return cls(int(state["steps"]), dict(state["totals"]), dict(state["seconds"]), first_start)
