"""A trial run again by hand never replaces a good result by a worse one."""

import shutil
from pathlib import Path

from flopwatch.sweep.attempts import put_aside
from flopwatch.trial_files import log_file, run_folder, trial_folder
from flopwatch.trial_records import UNSETTLED, TrialResult


def is_worse(new: TrialResult, earlier: TrialResult | None) -> bool:
    """Whether the earlier result says more: it was measured and the new one is not, or the new one says nothing."""
    if earlier is None or earlier.outcome in UNSETTLED:
        return False
    return new.outcome in UNSETTLED or (earlier.outcome == "ok" and new.outcome != "ok")


def put_back(sweep: Path, name: str, earlier: str) -> str:
    """Let the earlier attempt have its place again; returns where the new one was put.

    Args:
        sweep: Its folder.
        name: Of the trial.
        earlier: Where `put_aside` put the earlier attempt, within the sweep's folder.
    """
    place = put_aside(sweep, name)
    source, target = sweep / earlier, trial_folder(sweep, name)
    source.rename(target)
    for kept, home in ((target / "log.txt", log_file(sweep, name)), (target / "run", run_folder(sweep, name))):
        if kept.exists() and not home.exists():
            shutil.move(kept, home)
    return place
