"""What the exit status of a sweep says: 0 exactly when nothing that was asked for went wrong."""

from collections.abc import Mapping

from flopwatch.sweep.plan import Plan
from flopwatch.trial_records import UNSETTLED

GREEN = ("ok", "oom_device", "oom_host", "oom_inferred", "unsupported", "skipped")
"""Measured, out of memory (a limit that was found), or by rule not run. Everything else is red, known or not."""

DONE, FAILED, STOPPED = 0, 1, 130
OVER_BUDGET = 75
"""EX_TEMPFAIL of sysexits.h: the same command goes on."""


def exit_status(plan: Plan, counts: Mapping[str, int], *, was_stopped: bool, is_over_budget: bool = False) -> int:
    """0, 1 when a trial failed now or in an earlier run of this folder, 130 when it was stopped with trials left.

    75 when its time was used up with trials left.

    Args:
        plan: What was asked for.
        counts: How the trials that were to run ended.
        was_stopped: By Ctrl-C.
        is_over_budget: Nothing new was started after the time it was given.
    """
    if was_stopped and trials_left(plan, counts):
        return STOPPED  # as a shell says of what Ctrl-C ended: `sweep && report` stops here
    if is_over_budget and trials_left(plan, counts):
        return OVER_BUDGET
    is_red = trials_left(plan, counts) or any(outcome not in GREEN for outcome, count in counts.items() if count)
    return FAILED if is_red or failed_before(plan) or _of_a_newer_version(plan) else DONE


def trials_left(plan: Plan, counts: Mapping[str, int]) -> int:
    """Trials that were to run and have not come to an end."""
    return len(plan.todo) - sum(count for outcome, count in counts.items() if outcome not in UNSETTLED)


def failed_before(plan: Plan) -> int:
    """Trials asked for that failed in an earlier run and were not run again."""
    return sum(plan.kept[name].outcome not in GREEN for name in plan.asked if name in plan.kept)


def _of_a_newer_version(plan: Plan) -> bool:
    """Their ends cannot be read, so nobody knows whether they are green."""
    return any(name in plan.newer for name in plan.asked)
