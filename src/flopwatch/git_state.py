"""The git commit of a folder, asked in a way that can neither hang nor change anything."""

import os
from typing import Any

_TIMEOUT_SECONDS = 2.0
_COMMAND = (
    *("--no-optional-locks", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch"),
    *("--untracked-files=no", "--ignore-submodules=dirty"),
)
"""No lock is taken, so a commit of the user at the same time does not fail; no program of the repository is started."""


def git_state(folder: str) -> dict[str, Any] | None:
    """The commit of a folder and whether files that git knows were changed since; None if git does not tell it in time.

    Asked in a thread of its own: on a file system that hangs, a process that was killed does not end, and waiting for
    it would hang too.
    """
    if not hasattr(os, "fork") or not hasattr(os, "WNOHANG"):  # as on Windows
        return None
    from threading import Thread

    found: list[dict[str, Any]] = []
    thread = Thread(target=lambda: found.extend(_ask(folder)), name="flopwatch-git", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_SECONDS + 0.5)
    return found[0] if found else None


def _ask(folder: str) -> list[dict[str, Any]]:
    import subprocess

    try:
        done = subprocess.run(
            ["git", "-C", folder, *_COMMAND],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    facts = dict(line[2:].split(" ", 1) for line in done.stdout.splitlines() if line.startswith("# branch."))
    commit = facts.get("branch.oid", "(initial)")
    if done.returncode != 0 or commit == "(initial)":
        return []
    is_dirty = any(not line.startswith("#") for line in done.stdout.splitlines())
    return [{"commit": commit, "branch": facts.get("branch.head"), "dirty": is_dirty}]
