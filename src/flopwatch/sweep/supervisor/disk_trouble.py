"""Corrects the result of a trial whose files were deleted while it ran, or whose disk was full."""

import os
from dataclasses import replace
from pathlib import Path

from flopwatch.records.trial import TrialResult
from flopwatch.records.trial_files import log_file

_DOUBTED = ("error", "crash", "timeout", "hang")  # these would blame the trainer


SWEEPS_FOLDER = "the sweep's folder"


def deleted_places(sweep: Path, name: str, claim_handle: int, sweep_handle: int) -> tuple[str, ...]:
    """Return names of the folders and files that were deleted while the trial ran, for the result's reason.

    The handles are those of the trial's `started.json` and of the sweep's folder, which may have been made again.
    """
    if not sweep.is_dir() or not os.path.samestat(os.stat(sweep), os.fstat(sweep_handle)):
        return (SWEEPS_FOLDER,)
    try:
        is_folder_gone = os.fstat(claim_handle).st_nlink == 0  # A deleted file has no links.
    except OSError:  # A network file system raises ESTALE for a deleted file.
        is_folder_gone = True
    is_log_gone = not os.path.lexists(log_file(sweep, name))
    return (*(("its folder",) if is_folder_gone else ()), *(("its log",) if is_log_gone else ()))


def with_deletions(result: TrialResult, places: tuple[str, ...]) -> TrialResult:
    """Add the deleted files and folders to the result's reason. If the trial's folder is gone, `ok` becomes `error`."""
    if not places:
        return result
    what = " and ".join(places) + (" were" if len(places) > 1 else " was")
    evidence = {**result.evidence, "deleted_while_it_ran": list(places)}
    if places == ("its log",) or result.outcome not in ("ok", "error"):
        return replace(result, reason=f"{result.reason}; {what} deleted while it ran", evidence=evidence)
    reason = f"{what} deleted while it ran, so what it measured could not be kept ({result.reason})"
    return replace(result, outcome="error", reason=reason, evidence=evidence)


def with_full_disk(result: TrialResult, why: str) -> TrialResult:
    """Add to the result that the disk was full. A failure counts as `lost` then, because the disk may have caused it.

    Args:
        result: The result.
        why: The system's message about the full disk; empty if the disk was not full.
    """
    if not why:
        return result
    evidence = {**result.evidence, "full_disk": why}
    if result.outcome not in _DOUBTED:
        return replace(result, evidence=evidence)
    reason = f"the disk of the sweep's folder was full ({why}) while it ran: {result.reason}"
    return replace(result, outcome="lost", reason=reason, evidence=evidence)
