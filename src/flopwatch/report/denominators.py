"""What MFU and HFU are shares of, and when that cannot be right. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flopwatch.trial_records import StepCost, TrialResult

_MOST_OF_PEAK = 1.05
"""Above it the peak is not that of the device, or the FLOPs are not those of the step."""


def denominators(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """The peaks in words, the most used first."""
    found = Counter(_words(cost.peak or {}) for _, cost in _with_peak(results))
    return tuple(words for words, _ in found.most_common())


def peak_warnings(results: Sequence[TrialResult]) -> tuple[str, ...]:
    different = denominators(results)
    mixed = [f"MFU and HFU are shares of different peaks: {'; '.join(different)}"] if len(different) > 1 else []
    above = [
        (trial, name, value)
        for trial, cost in _with_peak(results)
        for name, value in (("MFU", cost.mfu), ("HFU", cost.hfu))
        if value is not None and value > _MOST_OF_PEAK
    ]
    if above:
        trial, name, value = max(above, key=lambda one: one[2])
        mixed.append(f"{name} of {trial} is {100 * value:.0f} %, more than the device can do: the peak is not its own")
    return (*mixed, *_told_notes(results))


def _told_notes(results: Iterable[TrialResult]) -> list[str]:
    """What a command reported and cannot be."""
    costs = [(result.name, result.measured.cost) for result in results if result.outcome == "ok"]
    told = [f"{trial}: {note}" for trial, cost in costs if cost is not None and not cost.peak for note in cost.notes]
    return [*told[:1], f"{len(told) - 1} more such reports of commands"] if len(told) > 1 else told


def _with_peak(results: Iterable[TrialResult]) -> list[tuple[str, StepCost]]:
    costs = [(result.name, result.measured.cost) for result in results if result.outcome == "ok"]
    return [(trial, cost) for trial, cost in costs if cost is not None and cost.peak]


def _words(peak: Mapping[str, Any]) -> str:
    return f"{peak['flops_per_s'] / 1e12:.4g} TFLOP/s ({peak.get('device')}, {peak.get('dtype')}, {peak.get('kind')})"
