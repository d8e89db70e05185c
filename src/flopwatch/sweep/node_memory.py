"""Host memory of the processes on a further node of a trial, followed as the supervisor follows those on its own."""

import os
import threading
import time
from pathlib import Path
from typing import Any

from flopwatch.sweep import process_tree
from flopwatch.sweep.assemble import AFTER_THE_STEPS, of_rank
from flopwatch.sweep.heartbeat import FILE, read_progress
from flopwatch.sweep.tree_memory import HostPeak, TreeMemory

_TICK_SECONDS = 0.2


class NodeMemory:
    """Looks several times a second, in a thread beside torchrun, and ends processes that hold more than they may.

    Args:
        trial_dir: The trial's folder.
        rank: The first process of this node, whose heartbeat says where the trial is.
        limit_bytes: What the node's processes may hold together; None is no limit.
    """

    def __init__(self, trial_dir: Path, rank: int, limit_bytes: int | None) -> None:
        self._trial_dir, self._file, self._limit_bytes = trial_dir, of_rank(FILE, rank), limit_bytes
        self._memory = TreeMemory(limit_bytes)
        self._steps_peak = HostPeak()
        self.over_limit: dict[str, Any] | None = None

    def start(self) -> None:
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while self.over_limit is None:
            time.sleep(_TICK_SECONDS)
            self._memory.look()
            if read_progress(self._trial_dir, self._file).phase not in AFTER_THE_STEPS:
                self._steps_peak = self._memory.peak
            if held := self._memory.over_limit_bytes():
                self.over_limit = self._told(held)
                process_tree.kill_descendants(os.getpid())

    def _told(self, held: int) -> dict[str, Any]:
        most = (self._limit_bytes or 0) / 2**20
        said = f"its processes held {held / 2**20:,.0f} MiB together, its limit is {most:,.0f} MiB"
        return {"type": "HostLimitError", "message": said, "outcome": "oom_host", "unix_time": time.time()}

    def report(self) -> dict[str, Any]:
        return {"host_bytes": self._steps_peak.bytes, "host_method": self._steps_peak.method}
