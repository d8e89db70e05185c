"""Worker processes with a time limit per architecture: one that crashes or hangs takes nothing else with it.

The limit is processor time, so that a busy machine gives the same rows; one that hangs without computing is ended after
a multiple of it.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from select import select

from zoo.specimen import Outcome

Task = tuple[str, str]
_TASKS_PER_PROCESS = 80
"""Models leave modules, caches and compiled patterns behind; a fresh process now and then keeps memory small."""
_WAITING_PER_LIMIT = 20
_HERE = str(Path(__file__).parents[1])


class Worker:
    """A process that is started when needed and replaced when it ends."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._process: subprocess.Popen[str] | None = None
        self._tasks_done = 0

    def examine(self, task: Task) -> Outcome:
        if self._tasks_done % _TASKS_PER_PROCESS == 0:
            self.close()
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(" ".join(task) + "\n")
        process.stdin.flush()
        ready, _, _ = select([process.stdout], [], [], self._limit_s * _WAITING_PER_LIMIT)
        line = process.stdout.readline() if ready else ""
        self._tasks_done += 1
        if line:
            return Outcome.from_json(json.loads(line))
        ended_by_limit = not ready or process.wait() == -signal.SIGXCPU
        self.close()
        reason = f"not done after {self._limit_s:.0f} s" if ended_by_limit else "the process died"
        return Outcome(task[1], task[0], error=reason)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # waits, and closes the pipes
            self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "zoo.worker", str(self._limit_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if os.environ.get("ZOO_DEBUG") else subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([_HERE, *sys.path])},
            )
        return self._process


def outcomes(tasks: list[Task], workers: int, limit_s: float) -> Iterator[Outcome]:
    """The rows as they are done."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def work() -> None:
        worker = Worker(limit_s)
        try:
            while True:
                done.put(worker.examine(waiting.get_nowait()))
        except queue.Empty:
            worker.close()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, len(tasks)))]
    for thread in threads:
        thread.start()
    for _ in tasks:
        yield done.get()
