"""One trial on the screen: where it is, and what came of it."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flopwatch.cli.outcome_style import outcome_text
from flopwatch.cli.quantities import bytes_text, count_text, duration, short_number, step_seconds
from flopwatch.plain_text import one_line, plain
from flopwatch.report.privacy import epsilon_text
from flopwatch.sweep.engines.protocol import Trial
from flopwatch.sweep.heartbeat import read_progress
from flopwatch.sweep.plan import folder_of
from flopwatch.trial_records import PrivacySpent, TrialResult


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], str | None]]:
    """Ctrl-C, or whoever else asks this process to end, becomes a reason to stop: nothing may be left behind."""
    asked: list[str] = []
    words = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}

    def note(number: int, frame: object) -> None:
        asked.append(f"stopped by {words[signal.Signals(number)]}")

    before = {number: signal.signal(number, note) for number in words}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def phases_shown(folder: Path, trial: Trial, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A spinner with the phase, on a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda: None
        return
    with console.status(Text(f"{one_line(trial.name)}: start")) as status:
        yield lambda: status.update(Text(one_line(f"{trial.name}: {read_progress(folder_of(trial)).text}", 200)))


def print_result(result: TrialResult, console: Console | None = None) -> None:
    """What was measured, and why it ended if not by itself."""
    console = console or Console()
    console.print(Text(one_line(result.name)), style="bold", end="  ")
    reason = f"({one_line(result.reason, 1000)})" if result.outcome != "ok" else ""
    console.print(outcome_text(result.outcome), Text(reason), highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in _rows(result):
        table.add_row(name, Text(one_line(value)))
    console.print(table, highlight=False)
    if result.outcome != "ok":
        for text in (result.stacks, result.log_tail):
            if text:
                typer.echo(plain(text).rstrip())
        typer.echo(f"again: {one_line(result.command)}")


def _rows(result: TrialResult) -> list[tuple[str, str]]:
    measured, cost = result.measured, result.measured.cost
    rows = [
        ("model", f"{result.spec.model}, {count_text(measured.parameters)} parameters" if measured.parameters else "")
    ]
    if times := measured.steps:
        unstable = ", unstable" if times.unstable else ""
        interval = f"{step_seconds(times.low)} to {step_seconds(times.high)}"
        rows.append(("step time", f"{step_seconds(times.median)} (median of {times.count}; {interval}{unstable})"))
    if measured.tokens_per_s:
        rows.append(("tokens/s", short_number(measured.tokens_per_s)))
    if measured.memory.peak_bytes:
        rows.append(("memory", bytes_text(measured.memory.peak_bytes)))
    if measured.memory.by_phase:
        parts = [f"{phase} {bytes_text(size)}" for phase, size in measured.memory.by_phase.items()]
        rows.append(("by phase", ", ".join(parts)))
    if cost is not None and cost.model_flops is not None:
        rows.append(("model FLOPs", f"{cost.model_flops:,}"))
        if cost.hardware_flops is not None:
            rows.append(("hardware FLOPs", f"{cost.hardware_flops:,}"))
    if cost is not None and cost.mfu is not None:
        hfu = f", HFU {100 * cost.hfu:.3g} %" if cost.hfu is not None else ""
        peak = f" of the {cost.peak['kind']} peak" if cost.peak else ""
        rows.append(("MFU", f"{100 * cost.mfu:.3g} %{hfu}{peak}"))
    if measured.privacy is not None:
        rows.append(("epsilon", _privacy_text(measured.privacy)))
    rows += [("not measured", f"{phase}: {why}") for phase, why in measured.not_measured.items()]
    if result.seconds is not None:
        rows.append(("took", duration(result.seconds)))
    return [row for row in rows if row[1]]


def _privacy_text(spent: PrivacySpent) -> str:
    """Epsilon with what it is for, and what a reader must know."""
    training = f"{spent.steps:,} steps at sampling rate {spent.sample_rate:.4g}, noise {spent.noise_multiplier:.4g}"
    known = f"{epsilon_text(spent.epsilon)} at delta {spent.delta:.3g} for {training}, by {spent.accountant}"
    return "; ".join(filter(None, [known, spent.note]))
