"""Trials whose steps were measured and something of flopwatch's own after them was not. Pure."""

from collections import Counter
from collections.abc import Iterable

from flopwatch.trial_records import TrialResult

_MOST_NAMES = 3


def incomplete_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """One line for each phase and reason: their times and memory count, what is named here is missing."""
    alike: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.outcome == "ok":
            for phase, why in result.measured.not_measured.items():
                alike.setdefault((phase, why), []).append(result.name)
    return tuple(f"{phase} not measured in {_names(names)}: {why}" for (phase, why), names in alike.items())


def host_memory_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Where resident memory stands for what processes hold together, they are not to be compared."""
    counts = Counter(result.measured.memory.host_method for result in results if result.outcome == "ok")
    if not counts["rss"]:
        return ()
    return (
        f"host memory of {counts['rss']:,} of these trials counts what processes share once for each: "
        "their systems do not tell it apart",
    )


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES:,} more"
