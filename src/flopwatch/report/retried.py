"""What a reader must know of trials that took several attempts, or whose files did not all come back."""

from collections.abc import Iterable

from flopwatch.trial_records import TrialResult

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
