"""The monitor's output: records for the sinks, and notices for the user.

A notice has a level, a code, and a message that says what happened and what to do next; each code is sent once.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flopwatch.errors import InputError, MissingDependencyError
from flopwatch.files import is_full_disk
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.what_ran import what_ran
from flopwatch.records.run import Level, Notice, Record, RunStart, Summary
from flopwatch.sinks.jsonl import JsonlSink
from flopwatch.sinks.protocol import Sink
from flopwatch.sinks.thread import SinkThread, build_sinks
from flopwatch.text import first_line

if TYPE_CHECKING:
    from flopwatch.sinks.console import ConsoleSink

Notify = Callable[[Level, str, str], None]
"""A function that takes a level, a code and a message, and sends only the first message of each code."""


class NoticeText(NamedTuple):
    """A notice without its step. Each `code` is sent once; a suffix as in `sink_failed:csv` allows one per sink."""

    level: Level
    code: str
    message: str


_INFOS = {
    "input_wait_unknown": "the input wait is not known, because micro-batches are fetched inside the step; a "
    "TrainingMonitor measures it: `for batch in monitor.batches(loader)`, or `with monitor.input_wait():` around your "
    "own function that fetches",
    "work_between_steps": "the model was called without gradients between two steps. The {seconds:.3g} s between them "
    "are part of the step time, and their input wait is unknown. If this is evaluation, put it into "
    '`with monitor.phase("eval")`',
    "stalled": "some steps took {seconds:.3g} s longer than typical ones; this time is counted as stalled "
    "(time/stall_seconds). If these steps fetch batches, it may be input wait that was not measured. If the loop has a "
    'TrainingMonitor and evaluates or saves inside of steps, put that into `with monitor.phase("eval")`. Other work on '
    "the machine is a frequent cause too",
    "totals_estimated": "the run continues at step {first_step}, in the middle of a logged window of several ranks. "
    "The tokens and FLOPs of the window's earlier steps are estimated from this rank's share; to make them exact, call "
    "monitor.state_dict() on every rank when you save",
    "not_exact": "the FLOPs of these steps are not exact: {reasons}",
    "counting_time_unknown": "the time in steps includes an unknown time for counting FLOPs, because all {steps} timed "
    "steps were counted as they ran. In a longer run most steps are not counted, and show how long a step takes alone",
    "measured_peak_not_used": "`flopwatch peak --measure` has measured {rate} on this device, but with low confidence, "
    "because its repetitions differ by 20 % or more. So it does not show how much of the peak can be reached; measure "
    "again while nothing else runs, with `flopwatch peak --measure --measure-again`",
    "not_causal": "attention causal was asked for, but the model ran no fused attention. Plain matrix products show no "
    "mask, so all pairs of positions are counted, and the FLOPs are those of attention full",
    "every_step_counted": "count: every slows down every step, so step times, rates and MFU are those of slower steps; "
    "leave it out to see what the training does alone",
    "optimizer_products": "the optimizer itself computes matrix products, {flops:,} FLOPs in a counted step; neither "
    "the model's FLOPs nor the executed FLOPs include them",
}
_WARNINGS = {
    "mfu_above_peak": "MFU is {percent:.1f} %, more than the device can do, so the peak of {peak.flops_per_s:.4g} "
    "FLOP/s ({peak.device}, {peak.dtype}, {peak.source}) is wrong for this training; pass dtype=, or the dense peak as "
    "peak_flops_per_s=312e12 (--peak-tflops 312) if it is 312 TFLOP/s",
    "step_logged_twice": "step {step} was logged twice, and both count as optimizer steps. With gradient "
    "accumulation, pass each batch to micro_batch() and log the step once, after optimizer.step()",
    "folder_in_use": "process {pid} is writing the log of another run in {output_dir}, so the rows of both runs are "
    "mixed there; give each run an output_dir of its own, or close the first monitor before the second starts",
    "time_outside_steps": "{seconds:.3g} s passed between two steps, far longer than usual. This is counted as time "
    "outside steps (time/outside_seconds), not as input wait. To name it, mark it with a TrainingMonitor: "
    '`with monitor.phase("checkpoint")` around saving, `for batch in monitor.batches(loader)` for the data',
    "log_not_resumed": "the totals start at 0, because those in {log} cannot be read: {why}",
    "steps_lost": "the log ends at step {last_step} and the run continues at step {first_step}, so the totals lack the "
    "steps in between; save monitor.state_dict() with your checkpoint and load it",
    "state_is_behind": "state_dict() was not called on all ranks, or some ranks are late, so the saved totals end with "
    "the last window that all ranks have sent; call state_dict() on every rank to save them up to this step",
    "ranks_unknown": "there are {world_size} ranks, but torch.distributed was not initialised before the first step, "
    "so all numbers are those of rank {rank} only; call torch.distributed.init_process_group before the first step",
    "ranks_lost": "from now on all numbers are those of rank {rank} only: {why}",
    "ranks_missing": "{missing} of {world_size} ranks sent no numbers for this window, so the row has those of the "
    "logging rank only, and the totals lack the missing ranks; ranks/reporting shows the number of ranks in each row",
    "ranks_late": "other ranks had not closed their monitor {seconds:.0f} s after this one, so the last window lacks "
    "their numbers; close the monitor on every rank when the training ends",
    "device_late": "the device had not finished the last {steps} steps {seconds:g} s after the end of the run, so no "
    "number includes them",
    "flops_unknown": "the FLOPs of this model could not be counted: {why}. Pass as batch= what the model is called "
    "with, or pass flops_fn=..., which returns the FLOPs of a batch",
    "coverage_below_1": "{percent:.3g} % of the matmul-like op calls have no formula, so MFU is a lower bound: "
    "{notes}. Add a formula with flopwatch.register_formula",
}


def notice(code: str, **facts: Any) -> NoticeText:
    """The notice of a code whose text is in the tables above, with these facts in it; an exception in one line."""
    level: Level = "info" if code in _INFOS else "warning"
    said = {name: first_line(fact) if isinstance(fact, BaseException) else fact for name, fact in facts.items()}
    return NoticeText(level, code, (_INFOS.get(code) or _WARNINGS[code]).format(**said))


def _warning(code: str, message: str) -> NoticeText:
    return NoticeText("warning", code, message)


def not_a_model(model: object) -> str:
    got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    return f"model= must be the torch.nn.Module that is trained, got {got}, so there will be no FLOPs and no MFU"


def nothing_to_count(*, has_model: bool, has_batch: bool, is_counted: bool = False) -> NoticeText:
    """Make one notice about a missing model, a missing batch, or both. FLOPs that are counted live need no batch."""
    of_model = "model= to TrainingMonitor (or call set_model)"
    of_batch = "batch= to step() or log_step(), or each one to micro_batch()"
    missing = [*([] if has_model else [of_model]), *([] if has_batch else [of_batch])]
    what = " and no ".join([*([] if has_model else ["model"]), *([] if has_batch else ["batch"])])
    effects = [*([] if has_batch else ["no tokens per second"]), *([] if is_counted else ["no FLOPs and no MFU"])]
    return _warning(
        "no_batch" if has_model else "no_model",
        f"no {what} was given, so there will be {', '.join(effects)}; pass {', and '.join(missing)}",
    )


def not_readable(name: str) -> NoticeText:
    if name == "batch":
        return _warning(
            "batch_reused",
            "the training wrote into a batch's tensors after log_step, so some steps of one window have no tokens and "
            "no FLOPs; later batches are read during log_step",
        )
    return _warning(
        f"not_readable:{name}",
        f"{name} was written into after log_step, is not a single number, or is spread over ranks, so it is "
        f"left out; pass {name}.detach().clone(), a number, or {name}.full_tensor()",
    )


def ranks_absent(ranks: Sequence[int]) -> NoticeText:
    return _warning(
        "ranks_absent",
        f"no monitor of {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} joined this run before "
        "it ended, so the totals lack them; create the same monitors on every rank, in the same order and with "
        "the same logging_rank",
    )


def rows_in_doubt(steps: Sequence[tuple[int, int]], shown: str) -> NoticeText:
    ranges = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in steps[:8])
    more = f" and {len(steps) - 8} more ranges" if len(steps) > 8 else ""
    noun = "step" if steps[0][0] == steps[-1][1] else "steps"
    return _warning(
        f"rows_in_doubt:{steps[0][0]}:{steps[-1][1]}",
        f"the FLOPs of {noun} {ranges}{more} may be wrong, and their rows are not called exact any longer: {shown}",
    )


def repeated_weights(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"the model is tensor parallel, but {shown} is not divided, so that its products, which every rank may run "
        "alike, are counted on each; divide it too, or read MFU as an upper bound"
    )


def doubt_of_rank(rank: int) -> str:
    return f"on rank {rank}, a counted step ran other FLOPs than equal calls had run until then"


def peak_unknown(dtype: str, why: str) -> NoticeText:
    # The texts about unknown peaks name the argument of `peak_flops`, which the monitor calls by another name.
    why = why.replace("override_flops_per_s=...", "peak_flops_per_s=... (`flopwatch run --peak-tflops ...`)")
    why = " ".join(why.replace("override_flops_per_s", "peak_flops_per_s").split()).rstrip(".")
    if why.startswith("The peak"):  # a wrong dtype= or peak is to be corrected instead
        why += "; or give it afterwards, such as `flopwatch why --peak-tflops 312`"
    why = why[0].lower() + why[1:]
    return _warning("peak_unknown", f"there will be no MFU for {dtype}: {why}")


_log = logging.getLogger("flopwatch")
_LEVELS: Mapping[Level, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
CLOSE_SECONDS = 30.0
"""How long the end of a run waits for all sinks together."""
_FLUSH_SECONDS = 5.0


class Outlets:
    """Sends records to the sinks, with one thread per sink. Records wait until `start` has sent the `RunStart` record.

    Attributes:
        failed_parts: Parts of the monitor that were switched off, each with its first error.
    """

    def __init__(self, sinks: Sequence[Sink], *, is_quiet: bool = False, console: "ConsoleSink | None" = None) -> None:
        self._is_quiet = is_quiet
        self._console = console
        for sink in sinks:
            if hasattr(sink, "tell"):
                sink.tell = partial(self.notify, "warning", f"sink:{sink.name}")
        self._early: list[Record] = []
        self._has_started = self._has_only_log = False
        self._notices: Counter[str] = Counter()
        self.failed_parts: dict[str, str] = {}
        self._threads = [SinkThread(sink, self._sink_failed) for sink in sinks]

    @property
    def cpu_seconds(self) -> float:
        return sum(thread.cpu_seconds for thread in self._threads)

    def start(self, start: RunStart) -> None:
        self._has_started = True
        for record in (start, *self._early):
            self.send(record)
        self._early.clear()

    def print_no_rows(self) -> None:
        """Leave the lines of rows to a framework, which prints its own."""
        if self._console is not None:
            self._console.shows_rows = False

    def send(self, record: Record) -> None:
        """Queue a record for every sink; never blocks."""
        if not self._has_started:
            self._early.append(record)
            return
        for thread in self._threads:
            if not thread.put(record) and thread.failed is None and not thread.is_closing:
                self.notify(
                    "warning",
                    f"rows_dropped:{thread.name}",
                    f"the sink {thread.name} is too slow, so some rows are not sent to it; the local log has all rows",
                    step=getattr(record, "step", None),
                )

    def send_to_log(self, record: Record) -> None:
        """Queue a record for the local log only; the local log is the first sink."""
        if self._has_started and self._threads:
            self._threads[0].put(record)

    def notify(
        self,
        level: Level,
        code: str,
        message: str,
        *,
        step: int | None = None,
        doubted: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Send a notice to the process's `logging` and to every sink, once per code.

        The local log gets every notice with `doubted`, the ranges of steps whose rows it must no longer call exact.
        """
        notice = Notice(step, level, code.partition(":")[0], message, tuple(doubted))
        self._notices[code] += 1
        if self._notices[code] > 1:
            if doubted:
                self.send_to_log(notice)
            return
        if not self._is_quiet or level == "error":
            _log.log(_LEVELS[level], "flopwatch: %s", message)
        self.send(notice)

    def flush_log(self) -> None:
        """Wait until the local log contains all records so far, but at most `_FLUSH_SECONDS`."""
        if self._threads and not self._threads[0].flush(_FLUSH_SECONDS):
            late = f"the local log could not be written within {_FLUSH_SECONDS:.0f} s, so it lacks the newest records"
            self.notify("warning", "log_is_behind", late)

    def close(self, of_session: Summary) -> Summary:
        """Close all sinks. The local log is closed last, so that its summary contains failures of other sinks."""
        if not self._threads:
            return self._with_failures(of_session)
        deadline = time.monotonic() + CLOSE_SECONDS
        first, *others = self._threads
        for thread in others:
            thread.put(self._with_failures(of_session))
        for thread in others:
            if not thread.close(max(0.1, deadline - time.monotonic())) and thread.failed is None:
                self.failed_parts[thread.name] = "the sink did not close in time, so its last records are lost"
        self._has_only_log = True
        summary = self._with_failures(of_session)
        first.put(summary)
        if not first.close(max(1.0, deadline - time.monotonic())):
            sys.stderr.write("flopwatch: the last records of the local log could not be written in time\n")
        return summary

    def _with_failures(self, summary: Summary) -> Summary:
        return replace(
            summary,
            unix_time=time.time(),
            notices=dict(self._notices),
            failed_parts=dict(self.failed_parts),
            dropped_rows={thread.name: thread.dropped_rows for thread in self._threads if thread.dropped_rows},
        )

    def _sink_failed(self, name: str, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {first_line(error)}"
        self.failed_parts[name] = reason
        message = f"the sink {name} failed and is switched off, the training goes on: {reason}"
        if isinstance(error, MissingDependencyError):
            message = f"the sink {name} is not used: {first_line(error)}"
        if name == JsonlSink.name and isinstance(error, OSError):
            message = (
                f"the run's log cannot be written ({first_line(error)}); pass an output_dir that can be written to"
            )
            if is_full_disk(error):
                message = f"the disk was full until the end of the run: {error.filename}: {error.strerror}"
        if self._has_only_log and is_full_disk(error):  # under `flopwatch run`, only a sink would show a notice
            sys.stderr.write(f"flopwatch: {message}\n")
            return
        self.notify("error", f"sink_failed:{name}", message)


def open_outlets(config: MonitorConfig, output_dir: Path, log_path: Path, wanted: Sequence[str | Sink]) -> Outlets:
    """Open the local log and the configured sinks; a sink that cannot be opened is reported and left out."""
    sinks: list[Sink] = []
    failures: dict[str, str] = {}
    for want in wanted:
        try:
            made, reasons = build_sinks([want], output_dir, config.sink_options)
        except InputError as error:
            if config.strict:
                raise
            made, reasons = [], {str(want): str(error)}
        if reasons and config.strict:
            raise InputError("; ".join(f"the sink {name} cannot be used: {why}" for name, why in reasons.items()))
        sinks += made
        failures |= reasons
    has_console = any(getattr(want, "name", want) == "console" for want in wanted)
    console = None if config.quiet or has_console else _default_console()
    describe = what_ran if config.log_what_ran else None
    log = JsonlSink(log_path, config.local_log_every, config.local_log_seconds, describe=describe)
    outlets = Outlets([log, *sinks, *([] if console is None else [console])], console=console)
    for name, reason in failures.items():
        outlets.failed_parts.setdefault(name, reason)
        message = f"the sink {name!r} is not used: {reason}"
        outlets.notify("error", f"sink_failed:{name}", message)
    return outlets


def _default_console() -> "ConsoleSink | None":
    """Lines on stderr, so that what the training prints stays as it is; None in a process without stderr."""
    from flopwatch.sinks.console import ConsoleSink  # imports rich, which a quiet training does not need

    return None if sys.stderr is None else ConsoleSink(sys.stderr, is_plain=True)


def json_ready(value: Any) -> Any:
    """Convert a configuration to values that JSON can hold."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else repr(value)
