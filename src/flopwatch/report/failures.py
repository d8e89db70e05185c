"""Trials that did not run to their end, grouped by cause. Pure."""

import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flopwatch.report.advice import advice_for
from flopwatch.report.columns import place_key, trainer_name
from flopwatch.report.records import Failure
from flopwatch.trial_records import TrialResult

LOG_LINES = 15
# What needs a person first; an out-of-memory is a result, and what was not tried comes last.
_URGENCY = (
    "crash",
    "hang",
    "timeout",
    "error",
    "lost",
    "invalid",
    "cancelled",
    "oom_host",
    "oom_device",
    "unsupported",
)
_NOT_A_FAILURE = ("ok", "oom_inferred", "skipped")


def group_failures(results: Iterable[TrialResult], largest_ok: Mapping[tuple[Any, ...], int]) -> tuple[Failure, ...]:
    """By cause, the ones to look at first, then by count.

    Args:
        results: Of the sweep.
        largest_ok: The largest batch that ran by `place_key`, for the advice.
    """
    alike: dict[tuple[str, str], list[TrialResult]] = defaultdict(list)
    for result in results:
        if result.outcome not in _NOT_A_FAILURE:
            alike[str(result.outcome), cause_of(result)].append(result)
    failures = [_failure(cause, members, largest_ok) for (_, cause), members in alike.items()]
    return tuple(sorted(failures, key=lambda failure: (_urgency(failure.outcome), -failure.count, failure.cause)))


def cause_of(result: TrialResult) -> str:
    """The strongest thing known; those whose log also tells of memory are kept apart, for what to do may differ."""
    hint = "; its log tells of memory" if result.evidence.get("hint") else ""
    return _cause(result) + hint


def _cause(result: TrialResult) -> str:
    """Exception, signal, exit code, the scheduler's word, or the reason in words."""
    evidence = result.evidence
    exception = evidence.get("exception")
    if result.outcome in ("timeout", "hang", "cancelled"):  # our own kill: its signal says nothing
        return f"in phase {result.phase}"
    if isinstance(exception, Mapping) and exception.get("type"):
        return normalised(f"{exception['type']}: {exception.get('message') or ''}").rstrip(": ")
    if isinstance(exception, str) and exception:
        return normalised(exception)
    if result.outcome == "oom_host" and result.reason:  # its SIGKILL is the kernel's, the reason says so
        return normalised(result.reason)
    if evidence.get("signal"):
        return signal_name(evidence["signal"])
    if result.outcome in ("error", "oom_host") and evidence.get("exit_code") is not None:
        return f"exit code {evidence['exit_code']}"
    if evidence.get("state"):
        return normalised(str(evidence["state"]))
    return normalised(result.reason) or "no reason given"


def normalised(message: str) -> str:
    """The first line without what differs from trial to trial.

    >>> normalised("tried to allocate 2.50 GiB at 0x7f3a in /home/me/a.py, line 3")
    'tried to allocate N GiB at ADDRESS in PATH, line N'
    """
    line = (message.strip().splitlines() or [""])[0][:300]
    line = re.sub(r"\b0x[0-9a-fA-F]+\b", "ADDRESS", line)
    line = re.sub(r"(?<![\w.])(?:~|\.{1,2})?/[^\s'\",;:)]+|\b[A-Za-z]:\\[^\s'\",;)]+", "PATH", line)
    return re.sub(r"(?<![A-Za-z_0-9])\d+(?:[.,]\d+)*", "N", line)


def signal_name(value: Any) -> str:
    """Of a number or a name.

    >>> signal_name(9), signal_name("SIGSEGV")
    ('SIGKILL', 'SIGSEGV')
    """
    if isinstance(value, int) and value in {int(known) for known in signal.Signals}:
        return signal.Signals(value).name
    return value if isinstance(value, str) else f"signal {value}"


def last_lines(text: str, count: int = LOG_LINES) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])


def _failure(cause: str, members: Sequence[TrialResult], largest_ok: Mapping[tuple[Any, ...], int]) -> Failure:
    # One with a log says more than one without.
    example = next((member for member in members if member.log_tail or member.stacks), members[0])
    return Failure(
        outcome=str(example.outcome),
        cause=cause,
        count=len(members),
        trials=tuple(member.name for member in members),
        by_trainer=dict(Counter(trainer_name(member.spec) for member in members).most_common()),
        example=example.name,
        reason=example.reason,
        phase=example.phase,
        step=example.step,
        evidence=dict(example.evidence),
        command=example.command,
        log_tail=last_lines(example.log_tail),
        stacks=example.stacks,
        advice=advice_for(example, _cause(example), largest_ok.get(place_key(example.spec))),
    )


def _urgency(outcome: str) -> int:
    return _URGENCY.index(outcome) if outcome in _URGENCY else len(_URGENCY)
