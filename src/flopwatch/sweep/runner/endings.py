"""Decides when a trial is over and what its result is.

A supervisor is the process that runs one trial and writes the trial's result. After the engine has reported the end of
a supervisor, its result may still be invisible, because a network file system may show the files of another host up to
a minute late. Therefore a trial counts as lost only after that time, and only if the supervisor's claim is void.
"""

import errno
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from flopwatch.files import read_object, tail
from flopwatch.records.trial import TrialResult
from flopwatch.records.trial_files import STARTED, log_file
from flopwatch.sweep.claim import trial_claim, visible_seconds
from flopwatch.sweep.engines.protocol import Ended, ending_from_evidence, outcome_known_to_engine
from flopwatch.sweep.folder import Trial, listed_attempts, own_result
from flopwatch.sweep.host.processes import kill_marked
from flopwatch.sweep.supervisor.build_result import with_finished_steps

TRANSIENT = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE),  # something is full
    *(errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO),  # a network file system
)
"""Errors that may disappear without a change to the sweep."""
_LATEST_UNIX_TIME = 1e11  # more than 3,000 years from now: a later time means that the file is damaged


class Endings:
    """Keeps ended trials until their results are visible in the sweep's folder, or certain to be missing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[str, Ended] = {}
        self._deadlines: dict[str, float] = {}

    def certain(self, ended: Iterable[Ended], running: Mapping[str, Trial], *, is_patient: bool = True) -> list[Ended]:
        """Keep the trials that the engine has just reported as ended. Return all kept trials whose outcome is certain.

        If `is_patient` is False, because the sweep is being cancelled, return all kept trials.
        """
        for end in ended:
            if end.name in running:
                self._ended.setdefault(end.name, end)
        certain = [name for name in self._ended if not is_patient or self.is_over(running[name])]
        return [self._ended.pop(name) for name in certain]

    def is_over(self, trial: Trial) -> bool:
        """Whether the trial's result is visible, or it is certain that no supervisor runs the trial or will run it."""
        deadline = self._deadlines.setdefault(trial.name, self._clock() + visible_seconds())
        if own_result(trial.sweep, trial.name) is None:
            claim = trial_claim(trial.folder)
            holder = claim.holder()
            if holder.may_be_alive:
                return False
            may_come = not (holder.is_here or holder.is_withdrawn)  # from another host, whose files become visible late
            try:
                if may_come and not holder.facts:
                    # Now no supervisor can start the trial, unless one on another host has done so already.
                    may_come = not claim.withdraw()
            except OSError as error:  # a full disk: it is not certain yet that the trial cannot start
                if error.errno not in TRANSIENT:
                    raise
                return False
            if may_come and self._clock() <= deadline:
                return False
        del self._deadlines[trial.name]
        return True


def result_of(trial: Trial, ended: Ended, *, is_cancelled: bool) -> TrialResult:
    """Return the supervisor's result, corrected by what the engine knows, such as that Slurm preempted the job."""
    result = own_result(trial.sweep, trial.name) or _result_without_supervisor(trial, ended.evidence)
    if result.outcome == "cancelled" and not is_cancelled and (better := outcome_known_to_engine(ended.evidence)):
        evidence = {**result.evidence, **ended.evidence}
        result = replace(result, outcome=better[0], reason=better[1], evidence=evidence)
    result = with_finished_steps(result, trial.folder)
    return replace(result, earlier_attempts=result.earlier_attempts or trial.earlier_attempts)


def _result_without_supervisor(trial: Trial, evidence: Mapping[str, Any]) -> TrialResult:
    """Kill remaining processes of a trial whose supervisor wrote no result, and make a result from the evidence."""
    kill_marked(trial.folder.resolve())
    outcome, reason = ending_from_evidence(evidence)
    began = read_object(trial.folder / STARTED).get("unix_time")
    return TrialResult(
        trial.name,
        trial.key,
        trial.spec,
        outcome,
        reason,
        dict(evidence),
        unix_time=began if isinstance(began, int | float) and 0 < began < _LATEST_UNIX_TIME else None,
        log_tail=tail(log_file(trial.sweep, trial.name)),
        earlier_attempts=listed_attempts(trial.sweep, trial.name, trial.key),
    )
