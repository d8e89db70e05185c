"""What `flopwatch sweep` prints: a live table or one line per trial, the dry run, and the preflight."""

import contextlib
import re
import signal
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flopwatch.cli import say
from flopwatch.cli.streams import PatientLines
from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.numbers import byte_size, count, duration, flops, percent, step_time
from flopwatch.present import document as doc
from flopwatch.present.terminal import STYLES, print_document
from flopwatch.records.trial import UNSETTLED, TrialResult
from flopwatch.report.cells import outcome_class
from flopwatch.sweep.folder import Trial
from flopwatch.sweep.preflight import PreflightResult
from flopwatch.sweep.progress import read_progress
from flopwatch.sweep.runner.observing import Observer, RunnerState, Stop
from flopwatch.sweep.runner.plan import Plan
from flopwatch.sweep.start import Screen
from flopwatch.text import one_line, plural

_LAST_ENDED = 6
_MOST_RUNNING = 12
_LONGEST_LINE = 1000


def outcome_text(outcome: str) -> Text:
    return Text(one_line(outcome, 40), style=STYLES[outcome_class(outcome)])


def outcome_cell(outcome: str, detail: str = "") -> doc.Cell:
    return doc.Cell(one_line(outcome, 40), outcome_class(outcome), detail)


class CommandScreen(Screen):
    def warn(self, sweep: Path, text: str) -> None:
        say(one_line(f"warning: {text}", 1000), err=True)

    def show_preflight(self, found: Mapping[Any, PreflightResult]) -> None:
        print_preflight(found)

    @contextlib.contextmanager
    def watch(self, sweep: Path, plan: Plan) -> Iterator[tuple[Observer | None, Stop]]:
        console, stop = Console(), Stop()
        if not console.is_terminal:
            lines = PatientLines(print_line(console))
            with contextlib.closing(lines), _interrupts(stop, lines):
                yield PlainLines(plan, lines), stop
            return
        table = LiveTable(plan, sweep, stop)
        with _interrupts(stop, print_line(console)), table.live(console):
            yield table, stop


def print_line(console: Console) -> Any:
    return lambda text: console.print(Text(text), highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _interrupts(stop: Stop, say: Any) -> Iterator[None]:
    """Handle signals: the first Ctrl-C finishes running trials, the second and SIGTERM end them, SIGHUP is ignored."""

    def note(number: int, frame: object) -> None:
        stop.finish, stop.kill = True, stop.finish or number == signal.SIGTERM
        if not sys.stdout.isatty():
            say("ending running trials" if stop.kill else "finishing running trials; Ctrl-C again ends them")

    # A closed terminal sends SIGHUP. An empty function ignores it, because trial processes would inherit SIG_IGN.
    handlers = {signal.SIGINT: note, signal.SIGTERM: note, signal.SIGHUP: lambda number, frame: None}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    before[signal.SIGINT] = signal.default_int_handler  # what runs after the trials handles KeyboardInterrupt
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class PlainLines:
    def __init__(self, plan: Plan, say: Any) -> None:
        self._say = say
        self._total, self._done = len(plan.trials), len(plan.kept)
        self._waiting_for = ""
        if plan.kept:
            say(f"{len(plan.kept)} of {len(plan.trials)} trials already have results, {len(plan.todo)} to run")

    def started(self, trial: Trial) -> None:
        pass

    def ended(self, result: TrialResult) -> None:
        self._done += 1
        self._say(f"[{self._done:>{len(str(self._total))}}/{self._total}] {_ending(result)}")

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None:
        self._say(f"{_ending(lost)}; retrying ({retry} of {most})")

    def repeats(self, result: TrialResult, repeat: int, most: int) -> None:
        self._say(f"{_ending(result)}; its interval is too wide, so it is repeated ({repeat} of at most {most})")

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        """Print why nothing proceeds, because a sweep that waits for devices or space would otherwise seem to hang."""
        is_stuck = any(words in engine_state for words in ("waiting: ", "held back", "not answered"))
        waiting_for = engine_state if is_stuck or (not running and engine_state.startswith("waiting")) else ""
        without_numbers = re.sub(r"[0-9]+", "", waiting_for)
        if waiting_for and without_numbers != self._waiting_for:
            self._say(one_line(waiting_for, _LONGEST_LINE))
        self._waiting_for = without_numbers or self._waiting_for


class LiveTable:
    """A live table of running trials and of those that ended last, with counts by outcome and the time left."""

    def __init__(self, plan: Plan, output: Path, stop: Stop, clock: Clock = monotonic_seconds) -> None:
        self._plan, self._output, self._stop, self._clock = plan, output, stop, clock
        self._began, self._tried_again = clock(), 0
        self._since: dict[str, float] = {}
        self._running: Mapping[str, Trial] = {}
        self._engine_state = ""
        self._outcomes: dict[str, str] = {name: result.outcome for name, result in plan.kept.items()}
        self._ran = 0
        self._last: deque[TrialResult] = deque(maxlen=_LAST_ENDED)

    def started(self, trial: Trial) -> None:
        self._since[trial.name] = self._clock()

    def ended(self, result: TrialResult) -> None:
        self._since.pop(result.name, None)
        self._outcomes[result.name] = result.outcome
        self._ran += result.seconds is not None
        self._last.append(result)

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        self._running, self._engine_state = dict(running), engine_state

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None:
        self._since.pop(lost.name, None)
        self._tried_again += 1

    def repeats(self, result: TrialResult, repeat: int, most: int) -> None:
        self._since.pop(result.name, None)

    def take(self, state: RunnerState) -> None:
        self._stop.kill, self._stop.finish = state.stopping == "kill", state.stopping in ("finish", "kill")
        self._stop.is_over_budget = state.stopping == "budget"
        now = self._clock()
        self._since = {name: now - float(seconds) for name, seconds in (state.running or {}).items()}

    def live(self, console: Console) -> Live:
        return Live(get_renderable=self.drawn, console=console, refresh_per_second=4, transient=False)

    def drawn(self) -> Group | Text:
        """The table, or a message if drawing fails, because an exception in rich's thread would end the display."""
        try:
            return self.render()
        except Exception as error:  # noqa: BLE001 - see above
            return Text(one_line(f"the table cannot be drawn ({type(error).__name__}: {error})", _LONGEST_LINE))

    def render(self) -> Group:
        done = ProgressBar(total=len(self._plan.trials), completed=len(self._outcomes))
        # ProgressBar ends without a line break. Without padding, the next line would be drawn over it.
        return Group(self._header(), Padding(done, (0, 0, 1, 0)), *self._tables(), self._footer())

    def _header(self) -> Text:
        done, total = len(self._outcomes), len(self._plan.trials)
        name, so_far = one_line(str(self._output), _LONGEST_LINE), f"{done} of {total}"
        text = Text.assemble(("sweep ", "bold"), name, f"   {so_far}   ")
        for outcome, amount in Counter(self._outcomes.values()).items():
            text.append_text(outcome_text(outcome)).append(f" {amount}   ")
        return text

    def _tables(self) -> list[Table]:
        running = _table("running", "phase", to_the_right=("step", "for"))
        for name, trial in list(self._running.items())[:_MOST_RUNNING]:
            phase, step = _progress(trial)
            seconds = self._clock() - self._since.get(name, self._began)
            words = (Text(one_line(word, _LONGEST_LINE)) for word in (name, phase))
            running.add_row(*words, step, duration(seconds, rough=True))
        hidden = len(self._running) - _MOST_RUNNING
        if hidden > 0:
            running.add_row(Text(f"and {hidden} more", style="dim"))
        ended = _table("ended", "outcome", to_the_right=("step time", "memory", "MFU"))
        for result in self._last:
            ended.add_row(Text(one_line(result.name, _LONGEST_LINE)), outcome_text(result.outcome), *_figures(result))
        return [table for table in (running, ended) if table.row_count]

    def _footer(self) -> Text:
        if self._stop.kill:
            return Text("ending running trials", style="bold")
        if self._stop.finish:
            return Text(f"finishing running trials; {self._stop.again} ends them", style="bold")
        if self._stop.is_over_budget:
            return Text("the time budget is used up; finishing running trials", style="bold")
        parts = [one_line(self._engine_state, _LONGEST_LINE)]
        if self._tried_again:
            parts.append(f"{self._tried_again} retried")
        left = len(self._plan.trials) - len(self._outcomes)
        if self._ran and left:  # estimated by the mean time per trial
            seconds = (self._clock() - self._began) / self._ran * left
            parts.append(f"about {duration(seconds, rough=True)} left")
        return Text("   ".join(filter(None, parts)), style="dim")


def _table(*columns: str, to_the_right: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in (*columns, *to_the_right):
        table.add_column(column, justify="right" if column in to_the_right else "left", no_wrap=True)
    return table


def _progress(trial: Trial) -> tuple[str, str]:
    if trial.spec.trainer == "command":
        return "run", ""
    progress = read_progress(trial.folder)
    total = {"warmup": trial.spec.warmup_steps, "measure": trial.spec.steps}.get(progress.phase)
    step = "" if progress.step is None or total is None else f"{progress.step + 1}/{total}"
    return progress.phase, step


def _figures(result: TrialResult) -> tuple[str, str, str]:
    measured = result.measured
    mfu = measured.cost.mfu if measured.cost else None
    return (
        step_time(measured.steps.median) if measured.steps else "",
        byte_size(measured.memory.peak_bytes) if measured.memory.peak_bytes else "",
        percent(mfu) if mfu is not None else "",
    )


def _ending(result: TrialResult) -> str:
    name = one_line(result.name, _LONGEST_LINE)
    if result.outcome != "ok":
        return f"{name} {one_line(f'{result.outcome}: {result.reason}', _LONGEST_LINE)}"
    seconds, memory, mfu = _figures(result)
    parts = [f"{seconds} a step" if seconds else "", memory, f"MFU {mfu}" if mfu else ""]
    parts.append(f"not measured: {', '.join(result.measured.not_measured)}" if result.measured.not_measured else "")
    return f"{name} ok  {', '.join(filter(None, parts))}"


def print_dry_run(plan: Plan, output: Path, console: Console | None = None) -> None:
    todo = {trial.name for trial in plan.todo}

    def cells(trial: Trial) -> tuple[doc.Cell | str, ...]:
        kept = plan.kept.get(trial.name)
        left = "written by a newer flopwatch" if trial.name in plan.newer else "left out"
        state = "will run" if trial.name in todo else outcome_cell(kept.outcome) if kept else left
        names = (trial.name, one_line(trial.spec.model, 200))
        return *(doc.Cell(name) for name in names), state

    trials = plural(len(plan.trials), "trial")
    parts: list[doc.Part] = [
        doc.Grid(("trial", "model", "state"), doc.Lazy(plan.trials, cells), most=doc.Most(60, 60, 60)),
        doc.Text(f"{trials}, {len(plan.todo)} to run in {output}. {_prediction(plan)}"),
        *(doc.Text(one_line(f"warning: {trouble}", 1000)) for trouble in plan.troubles),
    ]
    print_document(doc.Document("", parts, have_all={}), console)


def _prediction(plan: Plan) -> str:
    """A sentence about how long the sweep will take, estimated from similar trials with a result in this folder."""
    if not plan.todo:
        return "No trial is left to run."
    times: dict[tuple[str, str], list[float]] = {}
    for result in plan.kept.values():
        if result.seconds is not None and result.outcome not in UNSETTLED:
            times.setdefault((result.spec.trainer, result.spec.model), []).append(result.seconds)
    usual = {kind: median(seconds) for kind, seconds in times.items()}
    kinds = [(trial.spec.trainer, trial.spec.model) for trial in plan.todo]
    known = [usual[kind] for kind in kinds if kind in usual]
    if not known:
        return "The time can be estimated after the first trials."
    total = sum(known) / len(known) * len(kinds)
    counted = sum(len(times[kind]) for kind in set(kinds) & set(times))
    source = f"estimated from {plural(counted, 'trial')} in this folder, of any batch size and length"
    return f"About {duration(total, rough=True)} if they run one after the other ({source})."


def print_preflight(found: Mapping[Any, PreflightResult]) -> None:
    for result in found.values():
        mark = "ok  " if result.supported and result.tried else "?   " if result.supported else "no  "
        facts = [f"{count(result.parameters)} parameters"] if result.parameters else []
        if result.model_flops is not None:
            facts.append(f"{flops(result.model_flops)} a step of {result.batch_size} x {result.seq_len}")
        facts += [f"{percent(share)} {way}" for way, share in result.shares.items()]
        detail = f": {result.reason}" if result.reason else f" ({', '.join(facts)})" if facts else ""
        say(f"preflight {mark}{one_line(f'{result.trainer} on {result.model}{detail}', _LONGEST_LINE)}")
