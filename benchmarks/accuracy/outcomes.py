"""What a tool said about an architecture, and how far that is from the truth."""

from dataclasses import dataclass
from typing import Literal

Grade = Literal["exact", "near", "off", "wrong", "none"]

NEAR = 0.05
OFF = 0.25


@dataclass(frozen=True)
class Outcome:
    """One tool on one architecture: a count for the whole training step, or the reason there is none."""

    flops: int | None
    reason: str = ""
    applies: bool = True
    """False where a rule says nothing about such a model, which is not the same as failing."""


Results = dict[str, dict[str, Outcome]]
"""By tool, then by architecture."""


def relative_error(flops: int, truth_flops: int) -> float:
    return (flops - truth_flops) / truth_flops


def grade(outcome: Outcome, truth_flops: int) -> Grade:
    if outcome.flops is None:
        return "none"
    if outcome.flops == truth_flops:
        return "exact"
    error = abs(relative_error(outcome.flops, truth_flops))
    if error <= NEAR:
        return "near"
    return "off" if error <= OFF else "wrong"


def cell_text(outcome: Outcome, truth_flops: int) -> str:
    """Per cent of error between half and double the truth, a ratio beyond; `exact` only when equal to the FLOP."""
    if outcome.flops is None:
        return "fails" if outcome.applies else "n/a"
    if outcome.flops == truth_flops:
        return "exact"
    if outcome.flops == 0:
        return "0"
    ratio = outcome.flops / truth_flops
    if ratio >= 2:
        return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"
    if ratio < 0.5:
        return f"{ratio:.2g}x"
    return _percent_text(100 * (ratio - 1))


def _percent_text(error_percent: float) -> str:
    if abs(error_percent) < 0.1:  # a rounded 0.0 would read like exact
        return f"{error_percent:+.1g} %"
    return f"{error_percent:+.0f} %" if abs(error_percent) >= 9.95 else f"{error_percent:+.1f} %"
