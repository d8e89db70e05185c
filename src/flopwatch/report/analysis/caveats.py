"""Why comparisons within a sweep may mislead: mixed environments, doubtful peaks, missing parts, retries. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flopwatch.number_format import percent, plural
from flopwatch.records.plain_text import listed
from flopwatch.records.trial import StepCost, TrialResult
from flopwatch.report.records import Environment

_SHOWN = (
    *("torch", "device", "device_name", "threads", "host", "driver", "cuda", "python", "flopwatch", "opacus", "git"),
    *("cpu", "platform", "os"),
)
# Facts that change time or memory.
_DECISIVE = ("torch", "device", "device_name", "threads", "driver", "cuda", "opacus", "cpu", "flopwatch", "git")


def distinct_environments(results: Iterable[TrialResult]) -> tuple[Environment, ...]:
    """The environments trials ran in, the most common first."""
    seen: Counter[tuple[tuple[str, str], ...]] = Counter()
    for settings, count in _counted(results):
        if settings:
            seen[tuple(settings.items())] += count
    return tuple(Environment(dict(settings), count) for settings, count in seen.most_common())


def _counted(results: Iterable[TrialResult]) -> list[tuple[dict[str, str], int]]:
    """The distinct environments with their number of trials; 10,000 trials usually share one, formatted once."""
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
    """Environment facts in which trials that are compared with each other differ."""
    results = list(results)
    values: dict[str, Counter[str]] = {name: Counter() for name in (*_DECISIVE, "host")}
    for settings, count in _counted(result for result in results if result.outcome == "ok"):
        for name in settings.keys() & values.keys():
            values[name][settings[name]] += count
    mixed = [
        f"compares results of different {name}: {_values(values[name])}" for name in _DECISIVE if len(values[name]) > 1
    ]
    if not mixed and len(values["host"]) > 1:
        mixed = [f"ran on {len(values['host'])} hosts, and even equal hosts may differ by a few percent"]
    return (*mixed, *_mixed_code(results))


def _mixed_code(results: Iterable[TrialResult]) -> list[str]:
    """Trainers, models or scripts of the user that changed during the sweep."""
    versions: dict[str, Counter[str]] = {}
    for result in results:
        sources = result.environment.get("sources")
        if result.outcome == "ok" and isinstance(sources, Mapping):
            for name, digest in sources.items():
                versions.setdefault(str(name), Counter())[str(digest)] += 1
    return [
        f"compares results of different versions of {name}: {_values(digests)}"
        for name, digests in versions.items()
        if len(digests) > 1
    ]


def _values(counts: Counter[str]) -> str:
    return listed([f"{value} ({count:,})" for value, count in counts.most_common()], 3)


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        named = value.get("name") or value.get("model") or value.get("commit")
        return str(named) if named else ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(dict.fromkeys(_as_text(item) for item in value))
    return str(value)


_MOST_OF_PEAK = 1.05
"""A utilisation above this is not noise: the peak does not belong to the device, or the FLOPs not to the step."""


def denominators(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """The peaks that MFU and HFU are shares of, the most common first."""
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
        mixed.append(
            f"{name} of {trial} is {percent(value, decimals=0)}, more than any device can do: its peak is wrong"
        )
    return (*mixed, *_command_notes(results))


def _command_notes(results: Iterable[TrialResult]) -> list[str]:
    """Figures that commands reported and that cannot be right."""
    costs = [(result.name, result.measured.cost) for result in results if result.outcome == "ok"]
    notes = [f"{trial}: {note}" for trial, cost in costs if cost is not None and not cost.peak for note in cost.notes]
    return [*notes[:1], f"{len(notes) - 1:,} more trials reported such figures"] if len(notes) > 1 else notes


def _with_peak(results: Iterable[TrialResult]) -> list[tuple[str, StepCost]]:
    costs = [(result.name, result.measured.cost) for result in results if result.outcome == "ok"]
    return [(trial, cost) for trial, cost in costs if cost is not None and cost.peak]


def _words(peak: Mapping[str, Any]) -> str:
    return f"{peak['flops_per_s'] / 1e12:.4g} TFLOP/s ({peak.get('device')}, {peak.get('dtype')}, {peak.get('kind')})"


def incomplete_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Phases after the steps that could not be measured, by phase and reason. Times and memory are valid."""
    alike: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.outcome == "ok":
            for phase, why in result.measured.not_measured.items():
                alike.setdefault((phase, why), []).append(result.name)
    return tuple(f"{phase} not measured in {listed(names, 3)}: {why}" for (phase, why), names in alike.items())


def host_memory_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """Trials whose host memory is resident memory, which is not comparable with proportional memory."""
    counts = Counter(result.measured.memory.host_method for result in results if result.outcome == "ok")
    if not counts["rss"]:
        return ()
    return (
        f"host memory of {plural(counts['rss'], 'trial')} counts shared pages once per process, because "
        "their systems do not report proportional memory (PSS)",
    )


def retried_warnings(results: Iterable[TrialResult]) -> tuple[str, ...]:
    """One warning for all trials that were retried, and one for each trial whose files stayed on its node."""
    results = list(results)
    retried = [result for result in results if result.earlier_attempts]
    attempts = sum(len(result.earlier_attempts) for result in retried)
    told = [
        f"trials that took more than one attempt ({len(retried):,}, {attempts:,} lost; their files are in earlier/): "
        + listed([result.name for result in retried])
    ]
    left = [(result.name, files) for result in results if (files := _left_on_the_node(result))]
    stayed = [f"files of {name} stayed on their node, too large to be copied: {listed(files)}" for name, files in left]
    return (*(told if retried else ()), *stayed)


def _left_on_the_node(result: TrialResult) -> list[str]:
    found = result.evidence.get("left_on_the_node")
    return [str(path) for path in found] if isinstance(found, list) else []
