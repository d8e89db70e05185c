"""Takes a profiler trace of a few steps, on request of the training or from outside."""

import gc
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from flopwatch.guard import Guard
from flopwatch.language import Said
from flopwatch.runs.traces.files import MOST_STEPS, TraceRequests, trace_name
from flopwatch.runs.traces.split import OUTSIDE, OWN_ENTRY
from flopwatch.text import first_line


class TraceCapture:
    """Runs a few steps under torch's profiler on request, and writes one compressed trace file for ui.perfetto.dev."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        device_type: Callable[[], str],
        notify: Callable[..., None],
        *,
        strict: bool,
    ) -> None:
        self._folder = folder
        self._ranks = {"rank": rank, "world_size": world_size}
        self._device_type = device_type
        self._notify, self._strict = notify, strict
        self._requests = TraceRequests(folder)
        self._look: threading.Event | None = None
        self._profiler: Any = None
        self._mark = ExitStack()
        self._wanted = self._done = 0

    @property
    def is_on(self) -> bool:
        """Whether a trace was requested or is being recorded."""
        return self._wanted > 0

    def ask(self, steps: int) -> None:
        if self._profiler is None:
            self._wanted = max(1, min(steps, MOST_STEPS))

    def look_for_request(self) -> None:
        """Let a thread look for a request from outside, such as one of `flopwatch trace`.

        The training's thread does not look itself, because a file server that does not answer must not stop it.
        """
        if self._requests.is_closed:
            return
        if self._look is None:
            look = self._look = threading.Event()
            ask = weakref.WeakMethod(self.ask, lambda _: look.set())  # the thread does not keep the run alive
            args = (self._requests, look, ask)
            threading.Thread(target=_answer_requests, args=args, name="flopwatch-trace", daemon=True).start()
        self._look.set()

    def close(self, step: int) -> None:
        """Take no more requests, and write the trace that is being recorded, if there is one."""
        self._requests.is_closed = True
        if self._look is not None:
            self._look.set()
        self._wanted = 0
        if self._profiler is None:
            return
        if not self._done:
            self._give_up(step, Said("the run ended before the first traced step"))
            return
        with self._reported(step):
            self._finish(step)

    def step_ended(self, step: int) -> None:
        """Start the profiler before the next step, or stop it after the last requested step."""
        with self._reported(step):
            if self._profiler is None:
                self._start(step)
                return
            self._done += 1
            if self._done >= self._wanted:
                self._finish(step)
            else:
                self._mark_step(step + 1)

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """A context for an evaluation or another phase: a trace that is recorded meanwhile marks its time."""
        with nullcontext() if self._profiler is None else torch.profiler.record_function(OUTSIDE):
            yield

    def interrupted(self, step: int) -> None:
        """Give up the trace that is being recorded, because time that belongs to no step is in it without a mark."""
        if self._profiler is not None:
            self._give_up(step, Said("an evaluation or a checkpoint took place between the traced steps; ask again"))

    def _finish(self, step: int) -> None:
        _wait_for_device()
        self._mark.close()
        if _is_profiling(self._profiler):
            self._give_up(
                step, Said("another profiler of this process was started meanwhile; ask again when it has ended")
            )
            return
        self._wanted = 0
        profiler, self._profiler = self._profiler, None
        # Readers need the number of steps, because after an early end there is one more mark, of an unfinished step.
        profiler.add_metadata_json(OWN_ENTRY, json.dumps({"steps": self._done, "device": self._device_type()}))
        profiler.stop()
        path = self._folder / trace_name(step, self._ranks["rank"])
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{os.getpid()}.{path.name}")  # a reader never sees half a file
        try:
            profiler.export_chrome_trace(str(beside))
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
        told = Said("trace written to {path}; open it at https://ui.perfetto.dev", path=path)
        self._notify("info", f"trace_written:{path.name}", told)

    def _start(self, step: int) -> None:
        if _is_profiling():
            self._give_up(step, Said("another profiler of this process is active; ask again when it has ended"))
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        _wait_for_device()
        # Stacks and memory are not recorded, because with them a trace of five steps took 4 GB.
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profiler.start()
        if not torch.distributed.is_initialized():  # with a process group, torch adds this metadata itself
            self._profiler.add_metadata_json("distributedInfo", json.dumps(self._ranks))
        self._done = 0
        self._mark_step(step + 1)

    def _mark_step(self, step: int) -> None:
        """End the mark of the step before, and begin that of this one."""
        self._mark.close()
        # The name is the one that torch's own schedules write, so that other tools find the steps too.
        self._mark.enter_context(torch.profiler.record_function(f"ProfilerStep#{step}"))

    def _reported(self, step: int) -> Guard:
        """An error ends the trace and is reported; it does not reach the training, except with the setting `strict`."""

        def failed(_: str, error: Exception) -> None:
            self._give_up(step, f"{type(error).__name__}: {first_line(error)}")
            if self._strict:
                raise error

        return Guard("trace", failed)

    def _give_up(self, step: int, why: str) -> None:
        profiler, self._profiler = self._profiler, None
        self._mark.pop_all()
        self._wanted = 0
        # All profilers share one session of torch. If another profiler has taken it over, stopping ours would empty it.
        if profiler is not None and not _is_profiling(profiler):
            failures: list[str] = []
            with Guard("trace", lambda _, error: failures.append(first_line(error))):
                profiler.stop()
            for failure in failures:
                why = Said("{why} (and the profiler cannot be stopped: {failure})", why=why, failure=failure)
        self._notify(
            "warning", f"trace_not_taken:{step}", Said("no trace was taken, the training goes on: {why}", why=why)
        )


def _answer_requests(
    requests: TraceRequests, look: threading.Event, answer: "weakref.WeakMethod[Callable[[int], None]]"
) -> None:
    while True:
        look.wait()
        look.clear()
        if requests.is_closed or answer() is None:
            return
        steps = requests.new_steps()
        ask = answer()
        if steps is not None and ask is not None:
            ask(steps)
        del ask


def _wait_for_device() -> None:
    """Wait until the device is idle, so that only its work of the traced steps lies between their marks."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _is_profiling(own: Any = None) -> bool:
    """Whether a profiler other than `own` is active. Torch's own answer is private, so its profilers are looked for."""
    kind, ours = torch.autograd.profiler.profile, getattr(own, "profiler", None)
    found = [each for each in gc.get_objects() if type(each) is kind and each is not ours]
    return any(getattr(each, "entered", False) and getattr(each, "kineto_results", None) is None for each in found)
