"""Watches the trainings of this process: with the integration of their framework, or with hooks of torch."""

import atexit
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwatch.automatic.script import when_imported
from flopwatch.clock import note_cells
from flopwatch.guard import Guard
from flopwatch.language import _
from flopwatch.present.notebook import html_table
from flopwatch.process import is_switched_off
from flopwatch.random_state import same_random_states

if TYPE_CHECKING:
    from flopwatch.automatic.watcher import Watcher
    from flopwatch.monitor.config import MonitorConfig
    from flopwatch.monitor.training_monitor import TrainingMonitor

RUNS_FOLDER = "flopwatch-runs"

_active: "WatchedProcess | None" = None


def watch(output_dir: str | Path | None = None, *, quiet: bool = False, **monitor_options: Any) -> "WatchedProcess":
    """Monitor every training of this process from now on, without further changes of its code.

    Call it at the top of a script or in the first cell of a notebook. A step ends when the optimizer has stepped, which
    also shows which model is trained. With several optimizers, the first step is not measured. Trainings with the
    Hugging Face `Trainer` and Lightning are measured by the callbacks of flopwatch. A script that uses
    `TrainingMonitor` itself is left to that monitor.

    Args:
        output_dir: The run's folder; by default a new folder in `flopwatch-runs`.
        quiet: True prints no lines to stderr.
        monitor_options: As for `flopwatch.TrainingMonitor`, such as `log_every=`, `sinks=`, `peak_flops_per_s=`.

    Example:
        >>> import flopwatch, tempfile, torch
        >>> watched = flopwatch.watch(tempfile.mkdtemp(), quiet=True)
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for _ in range(4):
        ...     model(torch.randn(4, 8)).sum().backward()
        ...     optimizer.step()
        >>> watched.stop()
        >>> watched.monitor.summary.values["total/model_flops"]  # of 4 steps
        4096
    """
    global _active
    if _active is not None:
        _active.stop()
    _active = WatchedProcess(output_dir, quiet, monitor_options)
    if not is_switched_off():
        _active.start()
    return _active


class WatchedProcess:
    """The trainings of this process that flopwatch watches; made by `flopwatch.watch`.

    Attributes:
        has_failed: Whether the script has raised, so that a message about a training that was not seen would disturb.
    """

    def __init__(self, output_dir: str | Path | None, is_quiet: bool, monitor_options: Mapping[str, Any]) -> None:
        script = sys.argv[0] if sys.argv and "ipykernel" not in sys.modules else ""
        named = default_output_dir(script if script.endswith(".py") else "training")
        self._output_dir = Path(output_dir or named).absolute()
        self._is_new = "WORLD_SIZE" not in os.environ and not self._output_dir.exists()  # ranks share a folder
        self._is_quiet = is_quiet
        self.has_failed = False
        self._options = dict(monitor_options)
        self.is_on = False
        self._process = os.getpid()
        self._trainings = 0
        self._cancel: list[Callable[[], None]] = []
        self._watcher: Watcher | None = None
        self._callbacks: list[Any] = []

    @property
    def monitor(self) -> "TrainingMonitor | None":
        """The monitor of the newest training; None before its first step has ended."""
        monitors = [callback.monitor for callback in self._callbacks if callback.monitor is not None]
        return monitors[-1] if monitors else self._watcher.monitor if self._watcher is not None else None

    def __repr__(self) -> str:
        return f"watch({str(self._output_dir)!r}: {'no training yet' if self.monitor is None else repr(self.monitor)})"

    def _repr_html_(self) -> str:
        """What a notebook shows if the object is the last line of a cell: the newest training."""
        if self.monitor is not None:
            return self.monitor._repr_html_()
        return html_table(f"{self._output_dir}: no training yet", [])

    def start(self) -> None:
        self.is_on = True
        note_cells()
        self._silence_log()
        # torch imports its compiler for the first optimizer. Our modules need it too, but not earlier: it reads
        # environment variables, which the script may set after it has imported torch.
        actions = {
            "torch": self._watch_optimizers,
            "torch._dynamo": self._start_watcher,
            "transformers.trainer": self._add_to_hugging_face,
        }
        for name, action in actions.items():
            self._cancel.append(when_imported(name, partial(self._guarded, action)))
        atexit.register(self._say_if_nothing_was_seen)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Call `action`; if it fails, report that and let the script run as without flopwatch."""

        def failed(_: str, error: Exception) -> None:
            self.is_on = False
            self._report(error)

        with Guard("watching", failed):
            action()

    def note_failure(self, error: BaseException) -> None:
        """The script has raised this, which ends the process."""
        self.has_failed = True
        if isinstance(error, SystemExit) and self.monitor is not None:
            import_module("flopwatch.monitor.training_monitor").note_exit(self.monitor, error.code)

    def stop(self) -> None:
        """Stop watching: remove all hooks, close the monitor and write its summary."""
        self.is_on = False
        atexit.unregister(self._say_if_nothing_was_seen)
        if self._watcher is not None:
            self._watcher.stop()
        for callback in self._callbacks:
            callback.end()
        while self._cancel:
            self._cancel.pop()()

    def _silence_log(self) -> None:
        """Notices are printed by the console sink, if at all. Logging would print them into the script's own log."""
        log, handler = logging.getLogger("flopwatch"), logging.NullHandler()
        log.addHandler(handler)
        self._cancel += [partial(log.removeHandler, handler), partial(setattr, log, "propagate", log.propagate)]
        log.propagate = False

    def _watch_optimizers(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        def try_again(*_: Any) -> None:
            if self._watcher is None:
                self._guarded(self._start_watcher)

        self._cancel.append(register_optimizer_step_pre_hook(try_again).remove)

    @same_random_states()
    def _start_watcher(self) -> None:
        """Watch for a training. At the first optimizer step this is only a second try, if the first failed."""
        if self._watcher is not None or not self.is_on or os.getpid() != self._process:
            return
        attention = self._options.get("attention") or self._settings().attention
        watcher = import_module("flopwatch.automatic.watcher")
        self._watcher = watcher.Watcher(self._make_monitor, self._report, attention)
        if not self._is_quiet:
            import_module("flopwatch.sinks.console")

    @same_random_states()
    def _make_monitor(self) -> "TrainingMonitor | None":
        from flopwatch.monitor.training_monitor import TrainingMonitor, open_monitors

        if any(callback.monitor is not None for callback in self._callbacks):
            return None
        if open_monitors() and gc.collect() is not None and open_monitors():
            self._print("the script uses flopwatch.TrainingMonitor itself, so `flopwatch run` adds nothing")
            return None
        options = self._monitor_options()
        if options.get("dtype") is None and self._settings().dtype is None:
            options["dtype"] = _precision_of_accelerate()
        return TrainingMonitor(self._next_output_dir(), **options)

    def _next_output_dir(self) -> Path:
        """A folder for each training, because a second training in the same folder would continue the first."""
        self._trainings += 1
        suffix = "" if self._trainings == 1 else f"-{self._trainings}"
        folder = self._output_dir.with_name(self._output_dir.name + suffix)
        if self._is_new:
            try:
                folder.mkdir(parents=True)
            except FileExistsError:  # another process, which started in the same second, has created it
                return self._next_output_dir()
            except OSError:
                pass  # the monitor will report that it cannot write
        return folder

    def _settings(self) -> "MonitorConfig":
        """The settings of the configuration file; the monitor reports mistakes in it."""
        from flopwatch.monitor.config import read_config

        return read_config(self._options.get("config"), self._options.get("preset"))[0]

    def _monitor_options(self) -> dict[str, Any]:
        """The options, with a console on stderr, because stdout is the script's."""
        options, settings = dict(self._options), self._settings()
        wanted = options.get("sinks")
        if wanted is None:  # the list that is passed on would replace that of the file
            wanted = settings.sinks
        wanted = [wanted] if isinstance(wanted, str) else list(wanted)
        options["sinks"] = [sink for sink in wanted if sink != "console"]
        if self._is_quiet or sys.stderr is None or (settings.quiet and "console" not in wanted):
            return {**options, "quiet": True}
        options["sinks"].append(import_module("flopwatch.sinks.console").ConsoleSink("stderr"))
        return options

    def _add_to_hugging_face(self) -> None:
        from transformers import trainer

        class ForTrainer:
            """A `Trainer` creates an object of each class in this list."""

            def __new__(cls) -> Any:
                return self.make_callback("hugging_face")

        trainer.DEFAULT_CALLBACKS.append(ForTrainer)
        self._cancel.append(lambda: trainer.DEFAULT_CALLBACKS.remove(ForTrainer))

    @same_random_states()
    def make_callback(self, framework: str) -> Any:
        """A callback that puts its metrics into the trackers of the framework, such as `report_to` of the `Trainer`."""
        kind = import_module(f"flopwatch.integrations.{framework}").AutomaticCallback
        callback = kind(self._next_output_dir(), **self._monitor_options())
        self._callbacks.append(callback)
        return callback

    def _say_if_nothing_was_seen(self) -> None:
        has_seen = self.monitor is not None or self._callbacks
        if self.is_on and not self.has_failed and not has_seen and os.environ.get("RANK", "0") == "0":
            has_torch = "torch" in sys.modules
            why = "no optimizer step was seen in this process" if has_torch else "the script has not imported torch"
            self._print(f"{why}, so there is nothing to measure; a compiled step() and other processes are not seen")

    def _report(self, error: Exception) -> None:
        self._print(f"cannot watch this training, which goes on without flopwatch: {type(error).__name__}: {error}")

    def _print(self, message: str) -> None:
        if not self._is_quiet and sys.stderr is not None:
            sys.stderr.write(_(f"flopwatch: {message}\n"))


def default_output_dir(script: str) -> Path:
    """A new folder in `flopwatch-runs`, named after the script and the time."""
    name = Path(script).stem if script.endswith(".py") else script.rpartition(".")[2]
    return Path(RUNS_FOLDER) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _precision_of_accelerate() -> str | None:
    """The precision of Accelerate, which autocasts inside `forward`, where a hook on the model cannot see it."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return None
    precision = str(state.AcceleratorState().mixed_precision)
    return precision if precision in ("bf16", "fp16") else None


_STARTED_BY = "FLOPWATCH_STARTED_BY"


def tell_children(output_dir: Path, options: Mapping[str, Any]) -> None:
    """Tell the ranks that Lightning starts with `python` what `flopwatch run` was given."""
    told = {"pid": os.getpid(), "output_dir": output_dir, "options": options}
    os.environ[_STARTED_BY] = json.dumps(told, default=str)


def _watched_as_rank() -> WatchedProcess | None:
    """What watches this process if Lightning has started it as a rank of a training of `flopwatch run`."""
    told = json.loads(os.environ.get(_STARTED_BY, "{}"))
    if told.get("pid") != os.getppid() or "LOCAL_RANK" not in os.environ:
        return None
    watched = WatchedProcess(told["output_dir"], True, told["options"])
    watched.is_on = True  # without hooks, because the callback is all that this rank needs
    return watched


def lightning_callbacks() -> list[Any]:
    """The callback for a Lightning `Trainer`, which asks for it through an entry point; none if nothing is watched."""
    watched = _active or _watched_as_rank()
    return [watched.make_callback("lightning")] if watched is not None and watched.is_on else []
