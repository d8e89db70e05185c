"""What `flopwatch trial` and `flopwatch fit` print: progress, results, and outcomes in colour."""

import contextlib
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.status import Status
from rich.text import Text

from flopwatch.numbers import UNKNOWN, byte_size, count, duration, number, percent, step_time
from flopwatch.present import document as doc
from flopwatch.present.terminal import STYLES, print_document
from flopwatch.records.privacy import PrivacySpent
from flopwatch.records.trial import TrialResult
from flopwatch.report.cells import epsilon_text, outcome_class
from flopwatch.sweep.claims import read_progress
from flopwatch.sweep.fit import Found, Probe
from flopwatch.sweep.folder import Trial, folder_of
from flopwatch.sweep.runner.observing import Stop
from flopwatch.text import one_line


def outcome_text(outcome: str) -> Text:
    return Text(one_line(outcome, 40), style=STYLES[outcome_class(outcome)])


def outcome_cell(outcome: str, detail: str = "") -> doc.Cell:
    return doc.Cell(one_line(outcome, 40), outcome_class(outcome), detail)


@contextlib.contextmanager
def phases_shown(named: Callable[[Trial], str], *, quiet: bool) -> Iterator["PhaseStatus"]:
    """Show the phases of trials below a name if stderr is a terminal, and catch SIGINT, SIGTERM and SIGHUP."""
    asked: list[str] = []
    status = PhaseStatus(named, asked, quiet=quiet)
    words = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}

    def note(number: int, frame: object) -> None:
        asked.append(f"stopped by {words[signal.Signals(number)]}")

    before = {number: signal.signal(number, note) for number in words}
    try:
        yield status
    finally:
        status.ended()
        for number, handler in before.items():
            signal.signal(number, handler)


def print_result(result: TrialResult, console: Console | None = None) -> None:
    """Print the measurements of a trial; if it failed, also the reason, its threads' stacks and the end of its log."""
    has_failed = result.outcome != "ok"
    blocks = [doc.Block(text, most_lines=1000) for text in (result.stacks, result.log_tail) if text and has_failed]
    again = [doc.Text(f"run again: {result.command}", "command")] if has_failed else []
    reason = f"({one_line(result.reason, 1000)})" if has_failed else ""
    lead = [doc.Cell(result.name), outcome_cell(result.outcome)]
    section = doc.Section(reason, [doc.Facts(_rows(result)), *blocks, *again], lead=lead)
    print_document(doc.Document("", [section]), console)


def _rows(result: TrialResult) -> list[tuple[str, str]]:
    measured, cost = result.measured, result.measured.cost
    rows = [("model", f"{result.spec.model}, {count(measured.parameters)} parameters" if measured.parameters else "")]
    if times := measured.steps:
        unstable = ", unstable" if times.unstable else ""
        interval = f"{step_time(times.low, digits=4)} to {step_time(times.high, digits=4)}"
        rows.append(
            ("step time", f"{step_time(times.median, digits=4)} (median of {times.count}; {interval}{unstable})")
        )
    if measured.tokens_per_s:
        rows.append(("tokens/s", number(measured.tokens_per_s, digits=4)))
    if measured.memory.peak_bytes:
        rows.append(("memory", byte_size(measured.memory.peak_bytes)))
    if measured.memory.by_phase:
        parts = [f"{phase} {byte_size(size)}" for phase, size in measured.memory.by_phase.items()]
        rows.append(("by phase", ", ".join(parts)))
    if cost is not None and cost.model_flops is not None:
        rows.append(("model FLOPs", f"{cost.model_flops:,}"))
        if cost.hardware_flops is not None:
            rows.append(("hardware FLOPs", f"{cost.hardware_flops:,}"))
    if cost is not None and cost.mfu is not None:
        hfu = f", HFU {percent(cost.hfu)}" if cost.hfu is not None else ""
        peak = f" of the {cost.peak['kind']} peak" if cost.peak else ""
        rows.append(("MFU", f"{percent(cost.mfu)}{hfu}{peak}"))
    if measured.privacy is not None:
        rows.append(("epsilon", _privacy_text(measured.privacy)))
    rows += [("not measured", f"{phase}: {why}") for phase, why in measured.not_measured.items()]
    if result.seconds is not None:
        rows.append(("took", duration(result.seconds)))
    return [row for row in rows if row[1]]


def _privacy_text(spent: PrivacySpent) -> str:
    """Epsilon, with the number of steps, sampling rate and noise that it was calculated for."""
    noise = UNKNOWN if spent.noise_multiplier is None else f"{spent.noise_multiplier:.4g}"
    training = f"{spent.steps:,} steps at sampling rate {spent.sample_rate:.4g}, noise {noise}"
    known = f"{epsilon_text(spent.epsilon)} at delta {spent.delta:.3g} for {training}, by {spent.accountant}"
    return "; ".join(filter(None, [known, spent.note]))


_EDGE = 0.03
"""The memory of a trial differs by up to this share between runs (measured by benchmarks/sweeps/memory.py)."""


class PhaseStatus:
    """The observer of `phases_shown`. Once `asked` has a reason, its `stop` ends the running trials."""

    def __init__(self, named: Callable[[Trial], str], asked: Sequence[str], *, quiet: bool) -> None:
        self._named, self._asked, self.stop = named, asked, Stop()
        console = Console(stderr=True)
        self._status: Status | None = None if quiet or not console.is_terminal else console.status("")

    def started(self, trial: Trial) -> None:
        if self._status is not None:
            self._status.update(Text(f"{one_line(self._named(trial))}: start"))
            self._status.start()

    def ended(self, result: TrialResult | None = None) -> None:
        if self._status is not None:
            self._status.stop()

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        self.stop.kill = bool(self._asked)
        if self._status is not None:
            words = [f"{self._named(trial)}: {read_progress(folder_of(trial)).text}" for trial in running.values()]
            self._status.update(Text(one_line(", ".join(words) or engine_state, 200)))

    def why_stopped(self, trial: Trial) -> str | None:
        """Show the phase of the trial; return the reason to end it, or None before a signal."""
        self.ticked({trial.name: trial}, 0, "")
        return self._asked[0] if self._asked else None


def probe_line(probe: Probe) -> str:
    """The result of the trial with one batch size, in one line.

    >>> probe_line(Probe(8, True, "ok", "", 512 << 20, samples_per_s=102.34))
    'batch 8: ok, 512 MiB, 102 samples/s'
    """
    if probe.fits is None:
        return one_line(f"batch {probe.batch_size}: {probe.outcome}: {probe.reason}", 1000)
    parts = [f"batch {probe.batch_size}: {probe.outcome}{', barely fits' if probe.is_bare else ''}"]
    if probe.fits and probe.peak_bytes is not None:
        parts.append(byte_size(probe.peak_bytes))
    if probe.samples_per_s is not None and probe.fits:
        parts.append(f"{number(probe.samples_per_s)} samples/s")
    return ", ".join(parts)


def print_found(found: Found, max_batch: int, console: Console | None = None) -> None:
    columns: tuple[doc.Column | str, ...] = (*doc.numbers("batch", "memory", "step time", "samples/s"), "outcome")
    rows = [
        (*_figures(probe), outcome_cell(probe.outcome, "(barely fits)" if probe.is_bare else ""))
        for probe in sorted(found.probes, key=lambda probe: probe.batch_size)
    ]
    said = [doc.Text(one_line(sentence, 1000)) for sentence in sentences(found, max_batch)]
    print_document(doc.Document("", [doc.Table(columns, rows), *said]), console)


def _figures(probe: Probe) -> tuple[str, str, str, str]:
    """Batch size, memory, step time and samples/s; the last three are empty if the batch did not fit."""
    return (
        str(probe.batch_size),
        byte_size(probe.peak_bytes) if probe.peak_bytes is not None and probe.fits else "",
        step_time(probe.step_seconds) if probe.step_seconds is not None and probe.fits else "",
        number(probe.samples_per_s) if probe.samples_per_s is not None and probe.fits else "",
    )


def sentences(found: Found, max_batch: int) -> list[str]:
    """The result of the search: the largest batch size that fits, and the fastest one."""
    said = [f"The search stopped at {found.stopped}."] if found.stopped else []
    if found.largest is None:
        return (
            [*said, f"No batch fits: even a batch of 1 runs out of memory{_limit(found)}."]
            if found.too_large == 1
            else said
        )
    said += [_largest(found, max_batch), *_edge(found)]
    rate = next((probe.samples_per_s for probe in found.probes if probe.batch_size == found.fastest), None)
    if rate is not None:
        same = f" ({found.as_fast} is not measurably faster)" if found.as_fast is not None else ""
        said.append(f"Fastest: {found.fastest}, {number(rate)} samples/s{same}.")
    return said


def _largest(found: Found, max_batch: int) -> str:
    barely = next((", barely" for probe in found.probes if probe.batch_size == found.largest and probe.is_bare), "")
    if not found.is_largest_known:
        beyond = f"; {found.too_large} does not" if found.too_large is not None else ""
        return f"Largest batch seen to fit{barely}: {found.largest}{beyond}. The search is not finished."
    if found.too_large is None:
        return f"No limit found up to {max_batch}: a batch of {found.largest} fits{barely}."
    return f"Largest batch that fits{barely}: {found.largest} ({found.too_large} does not{_limit(found, '; ')})."


def _edge(found: Found) -> list[str]:
    """A warning if the largest batch may not always fit, because memory varies a little between runs; else empty."""
    lucky = [
        probe.batch_size for probe in found.probes if probe.fits and probe.batch_size > (found.too_large or math.inf)
    ]
    if lucky:
        return [f"The limit varies between trials: a batch of {max(lucky)} fitted, although {found.too_large} did not."]
    largest = next((probe for probe in found.probes if probe.batch_size == found.largest), None)
    is_on_host = any(probe.outcome == "oom_host" for probe in found.probes)
    if not is_on_host or largest is None or largest.peak_bytes is None or not largest.capacity_bytes:
        return []
    used = largest.peak_bytes / largest.capacity_bytes
    if used < 1 - _EDGE:
        return []
    return [
        f"That batch uses {percent(used)} of the limit and may fail next time: memory varies by up to 3 % between runs."
    ]


def _limit(found: Found, before: str = ": ") -> str:
    """The memory limit as text; empty if unknown, for example if no trial fitted on an accelerator."""
    known = [probe.capacity_bytes for probe in found.probes if probe.capacity_bytes is not None]
    on_device = any(probe.outcome == "oom_device" for probe in found.probes)
    return f"{before}{byte_size(known[0])} {'of the device' if on_device else 'limit'}" if known else ""
