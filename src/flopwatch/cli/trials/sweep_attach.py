"""`flopwatch sweep attach DIR` and `flopwatch sweep stop DIR`: a sweep that another process runs, seen and stopped."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live

from flopwatch.cli.output import lasting_output
from flopwatch.cli.quantities import plural
from flopwatch.cli.trials.sweep_screens import LiveTable, PlainLines, print_line
from flopwatch.errors import InputError
from flopwatch.records.reading import plain
from flopwatch.records.sweep_results import is_sweep_folder
from flopwatch.records.trial import TrialResult
from flopwatch.records.trial_files import RUNNER_LOG
from flopwatch.sweep.folder import held_folder
from flopwatch.sweep.runner.decisions import GREEN
from flopwatch.sweep.runner.observing import Follower, RunnerState, Stop, is_alive, is_here, read_runner

_LOOK_EVERY_SECONDS = 0.5


def attach_or_stop(words: list[str]) -> None:
    """What `flopwatch sweep attach DIR` and `flopwatch sweep stop DIR` do."""
    if len(words) > 2:
        raise InputError(f"`flopwatch sweep {words[0]}` takes one folder, got {', '.join(words[1:])}")
    sweep = Path(words[1] if len(words) == 2 else "flopwatch-sweep")
    if not is_sweep_folder(sweep):
        raise InputError(f"{sweep} is not the folder of a sweep; name the folder that --output named")
    (attach if words[0] == "attach" else stop)(sweep)


def stop(sweep: Path) -> None:
    """A Ctrl-C for the runner, wherever its terminal is."""
    state = read_runner(sweep)
    if state is None or is_alive(state) is False:
        raise InputError(f"nothing runs the sweep in {sweep}; the command that began it goes on with it")
    if not is_here(state):
        command = f"flopwatch sweep stop {shlex.quote(str(sweep.resolve()))}"
        raise InputError(f"the sweep in {sweep} is run by process {state.pid} on {state.host}; there, say: {command}")
    os.kill(state.pid, signal.SIGINT)
    is_second = state.stopping in ("finish", "kill")
    told = "what runs is ended" if is_second else "what is queued is withdrawn, what runs is finished; again ends it"
    typer.echo(f"Told process {state.pid} to stop: {told}.")


class FollowedTable(LiveTable):
    """The live table of a sweep that somebody else runs."""

    def __init__(self, follower: Follower, sweep: Path) -> None:
        self._stopping = Stop()
        super().__init__(follower.plan, sweep, self._stopping, leave="flopwatch sweep stop again ends it")
        self._counted = {name: result.outcome for name, result in follower.plan.kept.items()}

    def ended(self, result: TrialResult) -> None:
        """A trial that ended before, and was run again, counts once."""
        if (before := self._counted.get(result.name)) is not None:
            self._counts[before] -= 1
        self._counted[result.name] = result.outcome
        super().ended(result)

    def look(self, follower: Follower, state: RunnerState | None) -> None:
        for result in follower.new_results():
            self.ended(result)
        if state is not None:
            stopping, now = state.stopping, self._clock()
            self._stopping.kill, self._stopping.finish = stopping == "kill", stopping in ("finish", "kill")
            self._stopping.is_over_budget = stopping == "budget"
            self._since = {name: now - float(seconds) for name, seconds in (state.running or {}).items()}
        engine_state = state.engine_state if state is not None else "nothing runs it"
        self.ticked(follower.running(state), 0, engine_state)


def attach(sweep: Path) -> None:
    """Show the sweep until it is over; Ctrl-C ends the showing alone."""
    follower, console = Follower(sweep), Console()
    try:
        with lasting_output():
            if console.is_terminal:
                _draw(follower, sweep, console)
            else:
                _print(follower, console)
        _say_how_it_stands(sweep)
    except KeyboardInterrupt:
        folder = shlex.quote(str(sweep))
        typer.echo(f"\nThe sweep goes on. See it again: flopwatch sweep attach {folder}")


def _draw(follower: Follower, sweep: Path, console: Console) -> None:
    table = FollowedTable(follower, sweep)
    with Live(get_renderable=table.drawn, console=console, refresh_per_second=4, transient=False):
        while True:
            state = follower.runner()  # before the results: what ended just before the runner left is seen
            table.look(follower, state)
            if state is None:
                return
            time.sleep(_LOOK_EVERY_SECONDS)


def _print(follower: Follower, console: Console) -> None:
    lines = PlainLines(follower.plan, print_line(console))
    while True:
        state = follower.runner()
        for result in follower.new_results():
            lines.ended(result)
        if state is None:
            return
        lines.ticked(follower.running(state), state.waiting, state.engine_state)
        time.sleep(_LOOK_EVERY_SECONDS)


def _say_how_it_stands(sweep: Path) -> None:
    plan = Follower(sweep).plan
    folder = shlex.quote(str(sweep))
    typer.echo(f"Nothing runs the sweep in {sweep} any more. Next: flopwatch report {folder}")
    if plan.todo:
        typer.echo(f"{plural(len(plan.todo), 'trial')} left; the command that began it goes on.")
    if plan.todo or any(result.outcome not in GREEN for result in plan.kept.values()):
        raise typer.Exit(1)


# `flopwatch sweep ... --detach`: the same command in a session of its own, which no terminal can end.


_PATIENCE_SECONDS = 60.0


def run_detached(sweep: Path) -> None:
    """Start it and leave once it holds the folder, or with its words if it ended at once."""
    with held_folder(sweep):  # made if need be, and free
        pass
    words = [word for word in sys.argv[1:] if word != "--detach"]
    with (sweep / RUNNER_LOG).open("ab") as log:
        said_before = log.tell()
        runner = subprocess.Popen(
            [sys.executable, "-m", "flopwatch", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while runner.poll() is None and not _holds(sweep, runner.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    if runner.returncode:
        with (sweep / RUNNER_LOG).open("rb") as log:
            log.seek(said_before)
            typer.echo(plain(log.read().decode(errors="replace")), nl=False, err=True)
        raise typer.Exit(runner.returncode)
    folder = shlex.quote(str(sweep))
    typer.echo(f"The sweep runs on as process {runner.pid}; what it says is in {sweep / RUNNER_LOG}.")
    typer.echo(f"See it:  flopwatch sweep attach {folder}")
    typer.echo(f"Stop it: flopwatch sweep stop {folder}")


def _holds(sweep: Path, pid: int) -> bool:
    state = read_runner(sweep)
    return state is not None and state.pid == pid
