"""Out of memory is monotone: what did not fit will not fit with a larger batch or longer samples."""

from collections.abc import Sequence
from dataclasses import replace

from flopwatch.sweep.assemble import AFTER_THE_STEPS
from flopwatch.sweep.engines.protocol import Trial
from flopwatch.trial_records import TrialResult, TrialSpec


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


def inferred(trial: Trial, failures: Sequence[TrialResult]) -> TrialResult | None:
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
