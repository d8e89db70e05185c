"""Where trials ran, and whether that makes them hard to compare. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flopwatch.records.trial import StepCost, TrialResult
from flopwatch.report.records import Environment

_SHOWN = (
    *("torch", "device", "device_name", "threads", "host", "driver", "cuda", "python", "flopwatch", "opacus", "git"),
    *("cpu", "platform", "os"),
)
# A difference in one of these changes time or memory.
_DECISIVE = ("torch", "device", "device_name", "threads", "driver", "cuda", "opacus", "cpu", "flopwatch", "git")


def distinct_environments(results: Iterable[TrialResult]) -> tuple[Environment, ...]:
    """The most used first."""
    seen: Counter[tuple[tuple[str, str], ...]] = Counter()
    for settings, count in _counted(results):
        if settings:
            seen[tuple(settings.items())] += count
    return tuple(Environment(dict(settings), count) for settings, count in seen.most_common())


def _counted(results: Iterable[TrialResult]) -> list[tuple[dict[str, str], int]]:
    """What differs, with how many trials have it; most of 10,000 have the same, which is put in words once."""
    counts: Counter[str] = Counter()
    examples: dict[str, Mapping[str, Any]] = {}
    for result in results:
        key = repr([result.environment.get(name) for name in _SHOWN])
        counts[key] += 1
        examples[key] = result.environment
    return [(shown_settings(examples[key]), count) for key, count in counts.items()]


def shown_settings(environment: Mapping[str, Any]) -> dict[str, str]:
    return {name: _as_text(environment[name]) for name in _SHOWN if environment.get(name) not in (None, "", {})}


def mixed_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """What differs between trials that are compared with each other."""
    results = list(results)
    values: dict[str, Counter[str]] = {name: Counter() for name in (*_DECISIVE, "host")}
    for settings, count in _counted(result for result in results if result.outcome == "ok"):
        for name in settings.keys() & values.keys():
            values[name][settings[name]] += count
    mixed = [
        f"compares results of different {name}: {_told(values[name])}" for name in _DECISIVE if len(values[name]) > 1
    ]
    if not mixed and len(values["host"]) > 1:
        mixed = [f"ran on {len(values['host'])} hosts; equal ones may still differ by a few percent"]
    return (*mixed, *_mixed_code(results))


def _mixed_code(results: Iterable[TrialResult]) -> list[str]:
    """The user's own trainer, model or script in several versions."""
    versions: dict[str, Counter[str]] = {}
    for result in results:
        sources = result.environment.get("sources")
        if result.outcome == "ok" and isinstance(sources, Mapping):
            for name, digest in sources.items():
                versions.setdefault(str(name), Counter())[str(digest)] += 1
    return [
        f"compares results of different versions of {name}: {_told(digests)}"
        for name, digests in versions.items()
        if len(digests) > 1
    ]


def _told(counts: Counter[str]) -> str:
    told = [f"{value} ({count})" for value, count in counts.most_common(3)]
    return ", ".join(told) + (", ..." if len(counts) > 3 else "")


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        named = value.get("name") or value.get("model") or value.get("commit")
        return str(named) if named else ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(dict.fromkeys(_as_text(item) for item in value))
    return str(value)


# What MFU and HFU are shares of, and when that cannot be right. Pure.


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


# Trials whose steps were measured and something of flopwatch's own after them was not. Pure.


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


# What a reader must know of trials that took several attempts, or whose files did not all come back.


_MOST_RETRIED_NAMES = 5


def retried_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """One sentence for all trials that were lost and tried again, one for each whose files stayed on a node."""
    results = list(results)
    retried = [result for result in results if result.earlier_attempts]
    attempts = sum(len(result.earlier_attempts) for result in retried)
    told = [
        f"trials that took more than one attempt ({len(retried):,}, {attempts:,} lost; what they left is in earlier/): "
        + _first_names([result.name for result in retried])
    ]
    left = [(result.name, files) for result in results if (files := _left_on_the_node(result))]
    stayed = [
        f"files of {name} stayed on their node, too large to travel: {_first_names(files)}" for name, files in left
    ]
    return (*(told if retried else ()), *stayed)


def _left_on_the_node(result: TrialResult) -> list[str]:
    found = result.evidence.get("left_on_the_node")
    return [str(path) for path in found] if isinstance(found, list) else []


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_RETRIED_NAMES} more" if len(names) > _MOST_RETRIED_NAMES else ""
    return ", ".join(names[:_MOST_RETRIED_NAMES]) + more
