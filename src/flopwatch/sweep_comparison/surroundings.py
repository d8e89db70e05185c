"""What differs in where two sweeps ran: versions, devices, hosts, the user's code, the peak of MFU. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flopwatch.plain_text import one_line
from flopwatch.report.denominators import denominators
from flopwatch.report.environments import shown_settings
from flopwatch.sweep_comparison.records import Difference
from flopwatch.trial_records import TrialResult

_MOST_VALUES = 3
_LONGEST_FACT = 300


def environment_differences(a: Sequence[TrialResult], b: Sequence[TrialResult]) -> tuple[Difference, ...]:
    """Facts that have not the same values in both; several values with how many trials have each."""
    in_a, in_b = _facts(a), _facts(b)
    names = dict.fromkeys([*in_a, *in_b])
    return tuple(
        Difference(name, _told(in_a.get(name)), _told(in_b.get(name)))
        for name in names
        if set(in_a.get(name, ())) != set(in_b.get(name, ()))
    )


def _facts(results: Iterable[TrialResult]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    ran = [result for result in results if result.environment]
    for environment, count in _distinct(ran):
        facts = shown_settings(environment)
        sources = environment.get("sources")
        if isinstance(sources, Mapping):
            facts |= {f"code of {name}": str(digest)[:12] for name, digest in sources.items()}
        for name, value in facts.items():
            found.setdefault(one_line(name), Counter())[one_line(value, _LONGEST_FACT)] += count
    if peaks := denominators(ran):
        found["peak of MFU"] = Counter(one_line(words) for words in peaks)
    return found


def _distinct(results: Iterable[TrialResult]) -> list[tuple[Mapping[str, Any], int]]:
    """Most of 10,000 trials ran in the same place, which is put in words once."""
    counts: Counter[str] = Counter()
    examples: dict[str, Mapping[str, Any]] = {}
    for result in results:
        key = repr(result.environment)
        counts[key] += 1
        examples[key] = result.environment
    return [(examples[key], count) for key, count in counts.items()]


def _told(counts: Counter[str] | None) -> str | None:
    if not counts:
        return None
    if len(counts) == 1:
        return next(iter(counts))
    told = [f"{value} ({count:,})" for value, count in counts.most_common(_MOST_VALUES)]
    return ", ".join(told) + (f" and {len(counts) - _MOST_VALUES:,} more" if len(counts) > _MOST_VALUES else "")
