"""What a run has done since its first start: totals that survive a resume. Pure arithmetic."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flopwatch.monitor.meter import MeasuredStep
from flopwatch.run_records import Number

_TOTALS = ("samples", "tokens", "real_tokens", "trainable_tokens", "model_flops", "hardware_flops")
_TIMES = ("train", "input_wait", "warm_up", "eval", "checkpoint", "pause", "count")


@dataclass
class Ledger:
    """Adds up steps and phases. What was never known is not in `totals`; a part unknown later keeps what was known."""

    steps: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add_steps(self, steps: Iterable[MeasuredStep]) -> None:
        for step in steps:
            self.steps += 1
            for name in _TOTALS:
                amount = getattr(step, name)
                if amount is not None:
                    self.totals[name] = self.totals.get(name, 0) + amount
            if step.seconds is not None:
                self.add_seconds("train", step.seconds)
                if step.is_warm_up:
                    self.add_seconds("warm_up", step.seconds)
            if step.input_wait_seconds is not None:
                self.add_seconds("input_wait", step.input_wait_seconds)

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Time outside steps; a phase without a metric of its own counts as pause."""
        phase = phase if phase in _TIMES else "pause"
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def values(self) -> dict[str, Number]:
        """The totals under the keys of `flopwatch.metrics`."""
        return {
            "total/steps": self.steps,
            **{f"total/{name}": total for name, total in self.totals.items()},
            **{f"time/{phase}_seconds": seconds for phase, seconds in self.seconds.items()},
        }

    def to_json(self) -> dict[str, Any]:
        return {"steps": self.steps, "totals": dict(self.totals), "seconds": dict(self.seconds)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Ledger":
        return cls(int(state["steps"]), dict(state["totals"]), dict(state["seconds"]))
