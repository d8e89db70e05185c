"""What `flopwatch sweep` prints: a line for each trial that ended, a table of those that run, the dry run.

`flopwatch watch DIR` prints the same of a sweep that another process runs.
"""

import contextlib
import re
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flopwatch.cli import say
from flopwatch.cli.streams import lasting_output
from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.numbers import byte_size, duration, percent, step_time
from flopwatch.present import document as doc
from flopwatch.present.terminal import STYLES, print_document
from flopwatch.records.trial import UNSETTLED, TrialResult
from flopwatch.report.cells import outcome_class
from flopwatch.sweep.folder import Trial
from flopwatch.sweep.progress import read_progress
from flopwatch.sweep.runner.observing import Follower, Observer, RunnerState, Stop
from flopwatch.sweep.runner.plan import GREEN, Plan
from flopwatch.text import one_line, plural

_MOST_RUNNING = 12
_LONGEST_LINE = 1000
_LOOK_EVERY_SECONDS = 0.5


def outcome_cell(outcome: str, detail: str = "") -> doc.Cell:
    return doc.Cell(one_line(outcome, 40), outcome_class(outcome), detail)


@contextlib.contextmanager
def shown_sweep(plan: Plan) -> Iterator[tuple[Observer, Stop]]:
    """The observer that shows a sweep of this process, and the `Stop` that Ctrl-C sets."""
    stop, said, console = Stop(), list[str](), Console(highlight=False)
    with _interrupts(stop, said):
        progress = Progress(plan, _printer(console), lambda: _stopping(stop), said)
        with _drawn(progress, console):
            yield progress, stop


def _stopping(stop: Stop) -> str:
    words = {
        "kill": "ending running trials",
        "finish": "finishing running trials; Ctrl-C again ends them",
        "budget": "the time budget is used up; finishing running trials",
    }
    return words.get(stop.why, "")


@contextlib.contextmanager
def _interrupts(stop: Stop, said: list[str]) -> Iterator[None]:
    """Handle signals: the first Ctrl-C finishes running trials, the second and SIGTERM end them, SIGHUP is ignored.

    A handler prints nothing itself, because it may interrupt a line that is being printed.
    """

    def note(number: int, frame: object) -> None:
        stop.finish, stop.kill = True, stop.finish or number == signal.SIGTERM
        said.append(_stopping(stop))

    # A closed terminal sends SIGHUP. An empty function ignores it, because trial processes would inherit SIG_IGN.
    handlers = {signal.SIGINT: note, signal.SIGTERM: note, signal.SIGHUP: lambda number, frame: None}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    before[signal.SIGINT] = signal.default_int_handler  # what runs after the trials handles KeyboardInterrupt
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _printer(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(Text(line), soft_wrap=True)


def _drawn(progress: "Progress", console: Console) -> contextlib.AbstractContextManager[object]:
    """On a terminal, the running trials below the lines."""
    if not console.is_terminal:
        return contextlib.nullcontext()
    return Live(get_renderable=progress.drawn, console=console, refresh_per_second=4, transient=True)


class Progress:
    """Prints a line for each trial that ends, and why nothing proceeds; `drawn` shows the trials that run.

    `said` are lines that signals wait to have printed.
    """

    def __init__(
        self,
        plan: Plan,
        say_line: Callable[[str], object],
        stopping: Callable[[], str] = str,
        said: list[str] | None = None,
        clock: Clock = monotonic_seconds,
    ) -> None:
        self.say, self._stopping, self._said, self._clock = say_line, stopping, [] if said is None else said, clock
        self._total = len(plan.trials)
        self._outcomes: dict[str, str] = {name: result.outcome for name, result in plan.kept.items()}
        self._began, self._ran, self._tried_again = clock(), 0, 0
        self._since: dict[str, float] = {}
        self._running: Mapping[str, Trial] = {}
        self._engine_state = self._waiting_for = ""
        if plan.kept:
            say_line(f"{len(plan.kept)} of {self._total} trials already have results, {len(plan.todo)} to run")

    def started(self, trial: Trial) -> None:
        self._since[trial.name] = self._clock()

    def ended(self, result: TrialResult) -> None:
        self._since.pop(result.name, None)
        self._outcomes[result.name] = result.outcome
        self._ran += result.seconds is not None
        self.say(f"[{len(self._outcomes):>{len(str(self._total))}}/{self._total}] {_ending(result)}")

    def tries_again(self, lost: TrialResult, retry: int, most: int) -> None:
        self._since.pop(lost.name, None)
        self._tried_again += 1
        self.say(f"{_ending(lost)}; retrying ({retry} of {most})")

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        """Print why nothing proceeds, because a sweep that waits for devices or space would otherwise seem to hang."""
        while self._said:
            self.say(self._said.pop(0))
        self._running, self._engine_state = dict(running), engine_state
        is_stuck = any(words in engine_state for words in ("waiting: ", "not answered"))
        waiting_for = engine_state if is_stuck or (not running and engine_state.startswith("waiting")) else ""
        without_numbers = re.sub(r"[0-9]+", "", waiting_for)
        if waiting_for and without_numbers != self._waiting_for:
            self.say(one_line(waiting_for, _LONGEST_LINE))
        self._waiting_for = without_numbers or self._waiting_for

    def take(self, seconds_since: Mapping[str, float]) -> None:
        """Take over from `runner.json` for how many seconds each trial has been running."""
        self._since = {name: self._clock() - float(seconds) for name, seconds in seconds_since.items()}

    def drawn(self) -> Group | Text:
        """The table, or a message if drawing fails, because an exception in rich's thread would end the display."""
        try:
            return Group(self._table(), self._summary())
        except Exception as error:  # noqa: BLE001 - see above
            return Text(one_line(f"the table cannot be drawn ({type(error).__name__}: {error})", _LONGEST_LINE))

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for name, trial in list(self._running.items())[:_MOST_RUNNING]:
            seconds = self._clock() - self._since.get(name, self._began)
            cells = (one_line(name, _LONGEST_LINE), *_phase_and_step(trial), duration(seconds, rough=True))
            table.add_row(*map(Text, cells))
        if len(self._running) > _MOST_RUNNING:
            table.add_row(Text(f"and {len(self._running) - _MOST_RUNNING} more", style="dim"))
        return table

    def _summary(self) -> Text:
        text = Text(f"{len(self._outcomes)} of {self._total}   ")
        for outcome, amount in Counter(self._outcomes.values()).items():
            text.append(one_line(outcome, 40), style=STYLES[outcome_class(outcome)]).append(f" {amount}   ")
        parts = [self._stopping() or one_line(self._engine_state, _LONGEST_LINE)]
        if self._tried_again:
            parts.append(f"{self._tried_again} retried")
        left = self._total - len(self._outcomes)
        if self._ran and left:  # estimated by the mean time per trial
            seconds = (self._clock() - self._began) / self._ran * left
            parts.append(f"about {duration(seconds, rough=True)} left")
        return text.append("   ".join(filter(None, parts)), style="dim")


def _phase_and_step(trial: Trial) -> tuple[str, str]:
    if trial.spec.trainer == "command":
        return "run", ""
    progress = read_progress(trial.folder)
    total = {"warmup": trial.spec.warmup_steps, "measure": trial.spec.steps}.get(progress.phase)
    step = "" if progress.step is None or total is None else f"{progress.step + 1}/{total}"
    return progress.phase, step


def _ending(result: TrialResult) -> str:
    name, measured = one_line(result.name, _LONGEST_LINE), result.measured
    if result.outcome != "ok":
        return f"{name} {one_line(f'{result.outcome}: {result.reason}', _LONGEST_LINE)}"
    mfu = measured.cost.mfu if measured.cost else None
    parts = [
        f"{step_time(measured.steps.median)} a step" if measured.steps else "",
        byte_size(measured.memory.peak_bytes) if measured.memory.peak_bytes else "",
        f"MFU {percent(mfu)}" if mfu is not None else "",
        f"not measured: {', '.join(measured.not_measured)}" if measured.not_measured else "",
    ]
    return f"{name} ok  {', '.join(filter(None, parts))}"


def watch_sweep(sweep: Path, *, once: bool) -> None:
    """Show a sweep that another process runs, until it ends. Ctrl-C stops the display, not the sweep."""
    follower, folder, console = Follower(sweep), shlex.quote(str(sweep)), Console(highlight=False)
    if follower.jobs_wait:
        say(follower.jobs_wait)
    try:
        with lasting_output():
            progress = Progress(follower.plan, _printer(console), follower.stopping)
            state = _follow(follower, progress, console, once=once)
    except KeyboardInterrupt:
        say(f"\nThe sweep is still running. Show it again: flopwatch watch {folder}")
        return
    if state is not None:
        running = plural(state.running_count, "trial")
        say(f"{running} running on {state.host} (pid {state.pid}), {state.waiting} waiting. {state.engine_state}")
        return
    plan = Follower(sweep).plan
    say(f"No process runs the sweep in {sweep}. Next: flopwatch report {folder}")
    if plan.todo:
        say(f"{plural(len(plan.todo), 'trial')} left; to resume the sweep, run the command that started it.")
    if plan.todo or any(result.outcome not in GREEN for result in plan.kept.values()):
        raise SystemExit(1)


def _follow(follower: Follower, progress: "Progress", console: Console, *, once: bool) -> RunnerState | None:
    """Show the sweep until no process runs it, or once; return what its runner said last, None if there is none."""
    with _drawn(progress, console):
        while (state := follower.runner()) is not None:
            for result in follower.new_results():
                progress.ended(result)
            progress.take(state.running or {})
            progress.ticked(follower.running(state), state.waiting, state.engine_state)
            if once:
                break
            time.sleep(_LOOK_EVERY_SECONDS)
        for result in follower.new_results():
            progress.ended(result)
    return state


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
        doc.Grid(("trial", "model", "state"), list(map(cells, plan.trials)), most=doc.Most(60, 60, 60)),
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
