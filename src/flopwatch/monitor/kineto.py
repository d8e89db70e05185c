"""A few steps under torch's profiler, on request: one compressed trace that ui.perfetto.dev opens.

Shapes are recorded, stacks and memory are not: with them a trace of five steps has been seen to take 4 GB.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flopwatch.monitor.environment import rank_and_world_size

_MOST_STEPS = 10


class TraceCapture:
    """Off until asked; then profiles so many steps, writes them, and is off again.

    Attributes:
        is_on: Asked for on every step.
        last_path: The newest trace.
    """

    def __init__(self, folder: Path, tell: Callable[..., None]) -> None:
        self._folder = folder
        self._tell = tell
        self._profiler: Any = None
        self._left = 0
        self.is_on = False
        self.last_path: Path | None = None

    def ask(self, steps: int) -> None:
        self._left = max(1, min(steps, _MOST_STEPS))
        self.is_on = True

    def step_ended(self, step: int) -> None:
        """Start with the step that comes next; stop after the last that was asked for."""
        if self._profiler is None:
            self._start()
            return
        self._left -= 1
        if self._left <= 0:
            self.stop(step)

    def stop(self, step: int = 0) -> None:
        profiler, self._profiler = self._profiler, None
        self.is_on = False
        if profiler is None:
            return
        profiler.stop()
        rank, _ = rank_and_world_size()
        path = self._folder / f"step{step}_rank{rank}.pt.trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        self.last_path = path
        self._tell("info", f"trace_written:{path.name}", f"trace written to {path}; open it at https://ui.perfetto.dev")

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()
        if not torch.distributed.is_initialized():  # torch adds it itself in a process group
            rank, world_size = rank_and_world_size()
            self._profiler.add_metadata_json("distributedInfo", json.dumps({"rank": rank, "world_size": world_size}))
