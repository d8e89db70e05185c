"""Is a trial that ended tried again? Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flopwatch.errors import InputError
from flopwatch.records.trial import AFTER_THE_STEPS, FAILED, UNSETTLED, Outcome, TrialResult, TrialSpec
from flopwatch.sweep.attempts import Attempt
from flopwatch.sweep.folder import Trial
from flopwatch.sweep.runner.plan import Plan

LOST: tuple[Outcome, ...] = ("lost",)
"""What says nothing about the configuration: a node failed, a job was preempted, a supervisor vanished."""

_NOT_THE_NODE = ("PREEMPTED", "REVOKED")
"""Ends that Slurm decided on; the node is as good as any."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Attributes:
    most: How often a trial is tried again at most.
    outcomes: Ends that are tried again; those of the trainer itself only if asked for.
    """

    most: int = 2
    outcomes: tuple[Outcome, ...] = LOST

    def tries_again(self, result: TrialResult, earlier: int, *, is_stopping: bool = False) -> bool:
        """True when this end is followed by another attempt.

        >>> from flopwatch.records.trial import TrialSpec
        >>> lost = TrialResult("t", "key", TrialSpec("standard", "tiny", 1, 1), "lost")
        >>> RetryPolicy(most=2).tries_again(lost, earlier=1), RetryPolicy(most=2).tries_again(lost, earlier=2)
        (True, False)
        """
        return not is_stopping and result.outcome in self.outcomes and earlier < self.most


DEFAULT_POLICY = RetryPolicy()


def retry_policy(most: int, also: Sequence[str] = ()) -> RetryPolicy:
    """What is lost, and whatever else a user names.

    >>> retry_policy(3, ["error", "crash"]).outcomes
    ('lost', 'crash', 'error')
    """
    allowed = [outcome for outcome in FAILED if outcome != "invalid"]
    if unknown := [word for word in also if word not in allowed]:
        raise InputError(f"--retry-on takes {', '.join(allowed)}; got {', '.join(unknown)}")
    return RetryPolicy(most, tuple(dict.fromkeys((*LOST, *(outcome for outcome in allowed if outcome in also)))))


def hosts_to_avoid(attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """The node of the last attempt, unless it is innocent. One only: with every node excluded nothing could run.

    >>> hosts_to_avoid([{"host": "n1"}, {"host": "n2", "state": "NODE_FAIL"}]), hosts_to_avoid([])
    (('n2',), ())
    """
    if not attempts or attempts[-1].get("state") in _NOT_THE_NODE:
        return ()
    host = attempts[-1].get("host")
    return (host,) if isinstance(host, str) and host else ()


# Out of memory is monotone: what did not fit will not fit with a larger batch or longer samples.


def is_larger(spec: TrialSpec, failed: TrialSpec) -> bool:
    """True when it needs at least as much memory as the one that failed: same but for a larger batch or length.

    >>> is_larger(TrialSpec("ghost", "1b", 8, 512), TrialSpec("ghost", "1b", 4, 512))
    True
    """
    if spec.batch_size < failed.batch_size or spec.seq_len < failed.seq_len:
        return False
    same = replace(spec, batch_size=failed.batch_size, seq_len=failed.seq_len)
    return spec != failed and same.measured_settings() == failed.measured_settings()


def proves_too_large(result: TrialResult) -> bool:
    """Whether larger ones would run out of memory too. Ray ends whom it finds on a full node, and that may be a
    small trial beside a large one; what comes after the steps is flopwatch's own.
    """
    is_its_own = result.outcome in ("oom_device", "oom_host") and "error" not in result.evidence
    return is_its_own and result.phase not in AFTER_THE_STEPS


def inferred_result(trial: Trial, failures: Sequence[TrialResult]) -> TrialResult | None:
    """The result of a trial that need not run; None when it must."""
    for failure in failures:
        if is_larger(trial.spec, failure.spec):
            return TrialResult(
                name=trial.name,
                key=trial.key,
                spec=trial.spec,
                outcome="oom_inferred",
                reason=f"not run: {failure.name} was out of memory already",
                evidence={"from": failure.name, "outcome": failure.outcome},
            )
    return None


# What the exit status of a sweep says: 0 exactly when nothing that was asked for went wrong.


GREEN = ("ok", "oom_device", "oom_host", "oom_inferred", "unsupported", "skipped")
"""Measured, out of memory (a limit that was found), or by rule not run. Everything else is red, known or not."""

DONE, SOME_FAILED, STOPPED = 0, 1, 130
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
    return SOME_FAILED if is_red or failed_before(plan) or _of_a_newer_version(plan) else DONE


def trials_left(plan: Plan, counts: Mapping[str, int]) -> int:
    """Trials that were to run and have not come to an end."""
    return len(plan.todo) - sum(count for outcome, count in counts.items() if outcome not in UNSETTLED)


def failed_before(plan: Plan) -> int:
    """Trials asked for that failed in an earlier run and were not run again."""
    return sum(plan.kept[name].outcome not in GREEN for name in plan.asked if name in plan.kept)


def _of_a_newer_version(plan: Plan) -> bool:
    """Their ends cannot be read, so nobody knows whether they are green."""
    return any(name in plan.newer for name in plan.asked)
