"""Where trials ran, and whether that makes them hard to compare. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from flopwatch.report.records import Environment
from flopwatch.trial_records import TrialResult

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
