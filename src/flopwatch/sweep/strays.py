"""Finds and kills processes of a trial that have cleared their environment. Standard library only."""

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from flopwatch.files import read_object, write_json
from flopwatch.process import start_ticks
from flopwatch.records.trial_files import STRAYS
from flopwatch.sweep.claims import is_alive_here, own_identity
from flopwatch.sweep.host.processes import is_marked


class Strays:
    """Lists the processes of a trial that have cleared their environment in `strays.json`.

    If the supervisor and its guard are killed together, such processes have neither a parent nor a mark of the trial.
    """

    def __init__(self, trial_dir: Path) -> None:
        self._trial_dir = trial_dir
        self._pids: Sequence[int] = ()
        self._listed: dict[int, int | None] = {}

    def note(self, pids: Sequence[int]) -> None:
        """Update the file if one of these processes, which the last search found, is not marked."""
        if pids is self._pids:
            return
        self._pids = pids
        found = {pid: start_ticks(pid) for pid in pids if is_marked(pid, self._trial_dir) is False}
        if found != self._listed:
            self._listed = found
            with contextlib.suppress(OSError):
                write_json(self._trial_dir / STRAYS, {**own_identity(), "processes": list(found.items())})


def kill_strays(trial_dir: Path) -> None:
    """Kill the processes in `strays.json` that still run on this host."""
    content = read_object(trial_dir / STRAYS)
    listed = content.get("processes")
    for entry in listed if isinstance(listed, list) else ():
        with contextlib.suppress(OSError, ValueError, TypeError, OverflowError):
            pid, ticks = entry
            if is_alive_here({**content, "pid": pid, "start_ticks": ticks}) and pid > 1:
                os.kill(pid, signal.SIGKILL)
