"""How a trial of several processes ended: as the process that ended first, and said of which one it was. Pure."""

from dataclasses import replace
from typing import Any

from flopwatch.plain_text import first_line
from flopwatch.sweep.classify import Ending
from flopwatch.sweep.first_cause import JobEnd, RankEnd
from flopwatch.trial_records import Outcome


def with_first_cause(ending: Ending, job: JobEnd) -> Ending:
    """The facts of the process that ended the others, in place of those of torchrun, which only reports them."""
    if job.first is None:
        return replace(ending, oom_kills=ending.oom_kills + job.oom_kills)
    status = job.first.status
    return replace(
        ending,
        exit_code=status if status is not None and status >= 0 else None,
        signal_number=-status if status is not None and status < 0 else None,
        exception=ending.exception if job.first.exception is not None else None,
        oom_kills=ending.oom_kills + job.oom_kills,
        has_finished=False,
    )


def of_job(ended: tuple[Outcome, str], job: JobEnd, ending: Ending) -> tuple[Outcome, str]:
    """The outcome with what only the nodes know."""
    outcome, reason = ended
    if ending.own_kill is not None:
        return ended
    if outcome == "ok":
        return outcome, f"{reason} ({_who(job.first)})" if job.first is not None else reason
    if job.first is not None:
        return outcome, f"{_who(job.first)}: {reason}"
    if job.is_mute:
        return outcome, f"torchrun on the first node: {reason}"
    if job.lost:
        return "lost", job.lost
    return (
        ("error", f"its processes could not be brought together: {first_line(job.error, 300)}") if job.error else ended
    )


def job_evidence(job: JobEnd) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if job.first is not None:
        found |= {"rank": job.first.rank, "rank_host": job.first.host}
    if job.lost_host:
        found["host"] = job.lost_host
    if job.error:
        found["torchrun"] = job.error
    return found


def _who(end: RankEnd) -> str:
    return f"rank {end.rank} on {end.host}"
