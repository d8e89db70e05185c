"""Is a trial that ended tried again? Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from flopwatch.errors import InputError
from flopwatch.sweep.attempts import Attempt
from flopwatch.trial_records import FAILED, Outcome, TrialResult

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

        >>> from flopwatch.trial_records import TrialSpec
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
