"""What a trial deleted while it ran: its folder, its log, the whole sweep. Told, and its end is kept all the same."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from flopwatch.trial_files import log_file, trial_folder, write_json
from flopwatch.trial_records import TrialResult


def deleted_places(sweep: Path, name: str, claim: int) -> tuple[str, ...]:
    """Of a trial that has ended, in words.

    Args:
        sweep: The sweep's folder.
        name: The trial.
        claim: Its `started.json`, open: a file without a name was deleted, one that was moved still has one.
    """
    if not sweep.is_dir():
        return ("the sweep's folder",)
    try:
        is_folder_gone = os.fstat(claim).st_nlink == 0
    except OSError:  # a network's file system knows it no longer
        is_folder_gone = True
    is_log_gone = not os.path.lexists(log_file(sweep, name))
    return (*(("its folder",) if is_folder_gone else ()), *(("its log",) if is_log_gone else ()))


def told_deleted(result: TrialResult, places: tuple[str, ...]) -> TrialResult:
    """The result with what was deleted in it. A trial without its files has no measurement, whatever it says."""
    if not places:
        return result
    what = " and ".join(places) + (" were" if len(places) > 1 else " was")
    evidence = {**result.evidence, "deleted_while_it_ran": list(places)}
    if places == ("its log",) or result.outcome not in ("ok", "error"):
        return replace(result, reason=f"{result.reason}; {what} deleted while it ran", evidence=evidence)
    reason = f"it ran, and {what} deleted while it did, so that what it measured could not be kept ({result.reason})"
    return replace(result, outcome="error", reason=reason, evidence=evidence)


def restore_folder(sweep: Path, name: str, spec: dict[str, Any]) -> None:
    """A place for the result, and the `spec.json` that its command names."""
    folder = trial_folder(sweep, name)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "spec.json", spec)
