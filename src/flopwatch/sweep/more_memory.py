"""The same sweep with more memory: what fitted stands, what was out of memory may run again with the new limit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flopwatch.sweep.engines.protocol import Trial
from flopwatch.trial_records import OUT_OF_MEMORY, TrialResult, TrialSpec


@dataclass(frozen=True, slots=True)
class Adapted:
    """Attributes:
    trials: As asked for; those whose end no larger limit would change have the limit they ended under.
    raised: Names of trials that were out of memory under a smaller limit.
    """

    trials: tuple[Trial, ...]
    raised: frozenset[str] = frozenset()


def adapted_to_limits(
    trials: Sequence[Trial],
    earlier: Mapping[str, TrialResult],
    unsettled: Sequence[str],
    key_of: Callable[[TrialSpec], str],
) -> Adapted:
    """Compare the limits asked for with those of earlier ends.

    Args:
        trials: The matrix.
        earlier: The newest end of each.
        unsettled: Outcomes that say nothing, after which a trial runs again anyway.
        key_of: The content key of a configuration.
    """
    raised = []
    found = []
    for trial in trials:
        result = earlier.get(trial.name)
        if result is not None and result.outcome not in unsettled and _differs_by_more_memory(trial.spec, result.spec):
            if result.outcome in OUT_OF_MEMORY:
                raised.append(trial.name)
            else:
                limits = replace(trial.spec.limits, memory_bytes=result.spec.limits.memory_bytes)
                spec = replace(trial.spec, limits=limits)
                trial = replace(trial, spec=spec, key=key_of(spec))
        found.append(trial)
    return Adapted(tuple(found), frozenset(raised))


def _differs_by_more_memory(now: TrialSpec, before: TrialSpec) -> bool:
    """By nothing else, and by more: with less, nobody knows whether it still fits."""
    new, old = now.limits.memory_bytes, before.limits.memory_bytes
    if old is None or (new is not None and new <= old):
        return False
    return now.measured_settings() == {**before.measured_settings(), "memory_bytes": new}
