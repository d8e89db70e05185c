"""What a person sees while a sweep runs: a live table on a terminal, a line per ended trial elsewhere."""

import contextlib
import re
import signal
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flopwatch.cli.outcome_style import outcome_text
from flopwatch.cli.output import PatientLines
from flopwatch.cli.quantities import bytes_text, count_text, duration, flop_rate, percent, plural, step_seconds
from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.records.reading import one_line
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.sweep.claims import read_progress
from flopwatch.sweep.folder import Trial, folder_of
from flopwatch.sweep.preflight import PreflightResult
from flopwatch.sweep.runner.observing import Observer, Stop
from flopwatch.sweep.runner.plan import Plan

_LAST_ENDED = 6
_MOST_RUNNING = 12
_LONGEST_LINE = 1000


@contextlib.contextmanager
def watched(plan: Plan, output: Path, console: Console | None = None) -> Iterator[tuple[Observer, Stop]]:
    """An observer that draws, and a `Stop` that Ctrl-C sets."""
    console = console or Console()
    stop = Stop()
    if not console.is_terminal:
        lines = PatientLines(print_line(console))
        with contextlib.closing(lines), _interrupts(stop, lines):
            yield PlainLines(plan, lines), stop
        return
    table = LiveTable(plan, output, stop)
    with (
        _interrupts(stop, print_line(console)),
        Live(get_renderable=table.drawn, console=console, refresh_per_second=4, transient=False),
    ):
        yield table, stop


def print_line(console: Console) -> Any:
    return lambda text: console.print(Text(text), highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _interrupts(stop: Stop, say: Any) -> Iterator[None]:
    """Ctrl-C once finishes what runs; twice, or SIGTERM, ends it. A terminal that goes away ends nothing."""

    def note(number: int, frame: object) -> None:
        stop.finish, stop.kill = True, stop.finish or number == signal.SIGTERM
        if not sys.stdout.isatty():
            say("ending what runs" if stop.kill else "finishing what runs; Ctrl-C again ends it")

    # A terminal that is closed sends SIGHUP; a function and not SIG_IGN, which the trials' processes would inherit.
    handlers = {signal.SIGINT: note, signal.SIGTERM: note, signal.SIGHUP: lambda number, frame: None}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class PlainLines:
    """A line for each trial that ended."""

    def __init__(self, plan: Plan, say: Any) -> None:
        self._say = say
        self._total, self._done = len(plan.trials), len(plan.kept)
        self._waiting_for = ""
        if plan.kept:
            say(f"{len(plan.kept)} of {len(plan.trials)} trials are done already, {len(plan.todo)} to run")

    def started(self, trial: Trial) -> None:
        pass

    def ended(self, result: TrialResult) -> None:
        self._done += 1
        name = one_line(result.name, _LONGEST_LINE)
        self._say(f"[{self._done:>{len(str(self._total))}}/{self._total}] {name} {_one_line(result)}")

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None:
        self._say(f"{one_line(lost.name, _LONGEST_LINE)} {_one_line(lost)}; trying again ({retry} of {most})")

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        """Silence while another sweep holds the slots, or while Slurm takes no jobs, would look like a hang."""
        is_stuck = "held back" in engine_state or "not answered" in engine_state
        worth_telling = engine_state if is_stuck or (not running and engine_state.startswith("waiting")) else ""
        without_numbers = re.sub(r"[0-9]+", "", worth_telling)
        if worth_telling and without_numbers != self._waiting_for:
            self._say(one_line(worth_telling, _LONGEST_LINE))
        self._waiting_for = without_numbers or self._waiting_for


class LiveTable:
    """Running trials with phase and step, the last that ended, counts by outcome, and the time left."""

    def __init__(
        self,
        plan: Plan,
        output: Path,
        stop: Stop,
        clock: Clock = monotonic_seconds,
        leave: str = "Ctrl-C again ends it",
    ) -> None:
        self._plan, self._output, self._stop, self._clock = plan, output, stop, clock
        self._leave, self._tried_again = leave, 0
        self._began = clock()
        self._since: dict[str, float] = {}
        self._running: Mapping[str, Trial] = {}
        self._engine_state = ""
        self._counts: dict[str, int] = {}
        self._ran = 0
        self._last: deque[TrialResult] = deque(maxlen=_LAST_ENDED)
        for result in plan.kept.values():
            self._counts[result.outcome] = self._counts.get(result.outcome, 0) + 1

    def started(self, trial: Trial) -> None:
        self._since[trial.name] = self._clock()

    def ended(self, result: TrialResult) -> None:
        self._since.pop(result.name, None)
        self._counts[result.outcome] = self._counts.get(result.outcome, 0) + 1
        self._ran += result.seconds is not None
        self._last.append(result)

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        self._running, self._engine_state = dict(running), engine_state

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None:
        self._since.pop(lost.name, None)
        self._tried_again += 1

    def drawn(self) -> Group | Text:
        """As `render`, and a sentence where that fails: it is called by a thread of rich, whose end would be ours."""
        try:
            return self.render()
        except Exception as error:
            return Text(one_line(f"the table cannot be drawn ({type(error).__name__}: {error})", _LONGEST_LINE))

    def render(self) -> Group:
        return Group(self._header(), self._bar(), *self._tables(), self._footer())

    def _header(self) -> Text:
        done, total = sum(self._counts.values()), len(self._plan.trials)
        text = Text.assemble(("sweep ", "bold"), one_line(str(self._output), _LONGEST_LINE), f"   {done} of {total}   ")
        for outcome, count in self._counts.items():
            text.append_text(outcome_text(outcome)).append(f" {count}   ")
        return text

    def _bar(self) -> Padding:
        # A bare bar ends no line, and would swallow the next.
        return Padding(ProgressBar(total=len(self._plan.trials), completed=sum(self._counts.values())), (0, 0, 1, 0))

    def _tables(self) -> list[Table]:
        running = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("running", "phase", "step", "for"):
            running.add_column(column, justify="right" if column in ("step", "for") else "left", no_wrap=True)
        for name, trial in list(self._running.items())[:_MOST_RUNNING]:
            phase, step = _progress(trial)
            running.add_row(
                _cell(name), _cell(phase), step, duration(self._clock() - self._since.get(name, self._began))
            )
        hidden = len(self._running) - _MOST_RUNNING
        if hidden > 0:
            running.add_row(Text(f"and {hidden} more", style="dim"))
        ended = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("ended", "outcome", "step time", "memory", "MFU"):
            ended.add_column(
                column, justify="right" if column in ("step time", "memory", "MFU") else "left", no_wrap=True
            )
        for result in self._last:
            ended.add_row(_cell(result.name), outcome_text(result.outcome), *_figures(result))
        return [table for table in (running, ended) if table.row_count]

    def _footer(self) -> Text:
        if self._stop.kill:
            return Text("ending what runs", style="bold")
        if self._stop.finish:
            return Text(f"finishing what runs; {self._leave}", style="bold")
        if self._stop.is_over_budget:
            return Text("the budget is used up: finishing what runs", style="bold")
        left = self._seconds_left()
        parts = [
            one_line(self._engine_state, _LONGEST_LINE),
            f"{self._tried_again} tried again" if self._tried_again else "",
            f"about {duration(left)} left" if left is not None else "",
        ]
        return Text("   ".join(part for part in parts if part), style="dim")

    def _seconds_left(self) -> float | None:
        """By the pace of the trials that ran; None before the first."""
        left = len(self._plan.trials) - sum(self._counts.values())
        return (self._clock() - self._began) / self._ran * left if self._ran and left else None


def _cell(text: str) -> Text:
    return Text(one_line(text, _LONGEST_LINE))


def _progress(trial: Trial) -> tuple[str, str]:
    if trial.spec.trainer == "command":
        return "run", ""
    progress = read_progress(folder_of(trial))
    total = {"warmup": trial.spec.warmup_steps, "measure": trial.spec.steps}.get(progress.phase)
    step = "" if progress.step is None or total is None else f"{progress.step + 1}/{total}"
    return progress.phase, step


def _figures(result: TrialResult) -> tuple[str, str, str]:
    measured = result.measured
    mfu = measured.cost.mfu if measured.cost else None
    return (
        step_seconds(measured.steps.median) if measured.steps else "",
        bytes_text(measured.memory.peak_bytes) if measured.memory.peak_bytes else "",
        f"{100 * mfu:.3g} %" if mfu is not None else "",
    )


def _one_line(result: TrialResult) -> str:
    if result.outcome != "ok":
        return one_line(f"{result.outcome}: {result.reason}", _LONGEST_LINE)
    seconds, memory, mfu = _figures(result)
    parts = [f"{seconds} a step" if seconds else "", memory, f"MFU {mfu}" if mfu else ""]
    parts.append(f"not measured: {', '.join(result.measured.not_measured)}" if result.measured.not_measured else "")
    return f"ok  {', '.join(part for part in parts if part)}"


# `flopwatch sweep --dry-run`: the matrix, what of it is done, and how long the rest may take.


_MOST_ROWS = 60


def print_dry_run(plan: Plan, output: Path, console: Console | None = None) -> None:
    console = console or Console()
    todo = {trial.name for trial in plan.todo}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("trial", "model", "state"):
        table.add_column(column, no_wrap=column == "trial")
    for trial in plan.trials[:_MOST_ROWS]:
        kept = plan.kept.get(trial.name)
        left = "written by a newer flopwatch" if trial.name in plan.newer else "left out"
        state = "will run" if trial.name in todo else outcome_text(kept.outcome) if kept else left
        table.add_row(Text(one_line(trial.name)), Text(one_line(trial.spec.model, 200)), state)
    console.print(table)
    if len(plan.trials) > _MOST_ROWS:
        console.print(f"and {len(plan.trials) - _MOST_ROWS} more", style="dim")
    folder = one_line(str(output))
    console.print(
        Text(f"{plural(len(plan.trials), 'trial')}, {len(plan.todo)} to run in {folder}. {_prediction(plan)}")
    )
    _tell_troubles(plan, console)


def _tell_troubles(plan: Plan, console: Console) -> None:
    for trouble in plan.troubles:
        console.print(Text(one_line(f"warning: {trouble}", 1000)), soft_wrap=True)


def _prediction(plan: Plan) -> str:
    """From trials like these that ran here before; without one nobody can say."""
    seconds = [_like(plan, trial.spec) for trial in plan.todo]
    known = [value for value in seconds if value is not None]
    if not plan.todo:
        return "Nothing to do."
    if not known:
        return "How long it takes is known after the first trials."
    total = sum(known) / len(known) * len(seconds)
    return f"About {duration(total)}, one after the other (from {len(plan.kept)} trials that ran here)."


def _like(plan: Plan, spec: TrialSpec) -> float | None:
    """Median time of the trials with the same trainer and model."""
    times = [
        result.seconds
        for result in plan.kept.values()
        if result.seconds is not None and (result.spec.trainer, result.spec.model) == (spec.trainer, spec.model)
    ]
    return median(times) if times else None


# What the preflight found, in a few lines.


_LONGEST = 1000


def print_preflight(found: Mapping[Any, PreflightResult]) -> None:
    """One line for each pair: can it run, and which way do its layers go."""
    for result in found.values():
        mark = "ok  " if result.supported and result.tried else "?   " if result.supported else "no  "
        typer.echo(f"preflight {mark}{one_line(f'{result.trainer} on {result.model}{_detail(result)}', _LONGEST)}")


def _detail(result: PreflightResult) -> str:
    if result.reason:
        return f": {result.reason}"
    parts = [f"{count_text(result.parameters)} parameters"] if result.parameters else []
    if result.model_flops is not None:
        parts.append(
            f"{flop_rate(result.model_flops).removesuffix('/s')} a step of {result.batch_size} x {result.seq_len}"
        )
    parts += [f"{percent(100 * share)} {way}" for way, share in result.shares.items()]
    return f" ({', '.join(parts)})" if parts else ""
