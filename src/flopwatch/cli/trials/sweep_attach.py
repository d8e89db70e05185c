"""Sweeps that run in another process: `flopwatch sweep attach DIR`, `flopwatch sweep stop DIR`, and `--detach`."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
from rich.console import Console

from flopwatch.cli.streams import lasting_output
from flopwatch.cli.trials.sweep_screens import LiveTable, PlainLines, print_line
from flopwatch.errors import InputError
from flopwatch.records.sweep_results import is_sweep_folder
from flopwatch.records.trial import TrialResult
from flopwatch.records.trial_files import RUNNER_LOG
from flopwatch.sweep.folder import held_folder
from flopwatch.sweep.runner.observing import Follower, RunnerState, Stop, is_alive, is_here, read_runner
from flopwatch.sweep.runner.plan import GREEN
from flopwatch.text import plain, plural

_LOOK_EVERY_SECONDS = 0.5


def attach_or_stop(words: list[str]) -> None:
    """Run `flopwatch sweep attach DIR` or `flopwatch sweep stop DIR`; the folder is flopwatch-sweep by default."""
    if len(words) > 2:
        raise InputError(f"`flopwatch sweep {words[0]}` takes one folder, got {', '.join(words[1:])}")
    sweep = Path(words[1] if len(words) == 2 else "flopwatch-sweep")
    if not is_sweep_folder(sweep):
        raise InputError(
            f"{sweep} is not the folder of a sweep; name the folder that the sweep was given with --output"
        )
    (attach if words[0] == "attach" else stop)(sweep)


def stop(sweep: Path) -> None:
    """Send SIGINT, like Ctrl-C, to the process that runs the sweep."""
    state = read_runner(sweep)
    if state is None or is_alive(state) is False:
        raise InputError(f"no process runs the sweep in {sweep}; to resume it, run the command that started it")
    if not is_here(state):
        command = f"flopwatch sweep stop {shlex.quote(str(sweep.resolve()))}"
        raise InputError(f"the sweep in {sweep} runs as process {state.pid} on {state.host}; run there: {command}")
    os.kill(state.pid, signal.SIGINT)
    is_second = state.stopping in ("finish", "kill")
    effect = "ends running trials" if is_second else "finishes running trials; a second stop ends them"
    click.echo(f"Sent Ctrl-C to process {state.pid}, which {effect}.")


class FollowedTable(LiveTable):
    """The live table of a sweep that another process runs."""

    def __init__(self, follower: Follower, sweep: Path) -> None:
        self._stopping = Stop()
        super().__init__(follower.plan, sweep, self._stopping, leave="a second `flopwatch sweep stop` ends them")
        self._counted = {name: result.outcome for name, result in follower.plan.kept.items()}

    def ended(self, result: TrialResult) -> None:
        """Count only the newest result of a trial that ran several times."""
        if (before := self._counted.get(result.name)) is not None:
            self._counts[before] -= 1
        self._counted[result.name] = result.outcome
        super().ended(result)

    def take(self, state: RunnerState) -> None:
        """Show what the runner says about itself."""
        stopping, now = state.stopping, self._clock()
        self._stopping.kill, self._stopping.finish = stopping == "kill", stopping in ("finish", "kill")
        self._stopping.is_over_budget = stopping == "budget"
        self._since = {name: now - float(seconds) for name, seconds in (state.running or {}).items()}


def attach(sweep: Path) -> None:
    """Show the sweep until it ends. Ctrl-C stops the display, not the sweep."""
    follower, console = Follower(sweep), Console()
    try:
        with lasting_output():
            if console.is_terminal:
                table = FollowedTable(follower, sweep)
                with table.live(console):
                    _follow(follower, table)
            else:
                _follow(follower, PlainLines(follower.plan, print_line(console)))
        _print_state(sweep)
    except KeyboardInterrupt:
        folder = shlex.quote(str(sweep))
        click.echo(f"\nThe sweep is still running. Show it again: flopwatch sweep attach {folder}")


def _follow(follower: Follower, screen: FollowedTable | PlainLines) -> None:
    """Show the sweep until its runner ends, and then the last results."""
    state = follower.runner()
    while True:
        for result in follower.new_results():
            screen.ended(result)
        if state is None:
            screen.ticked(follower.running(None), 0, "no process runs this sweep")
            return
        if isinstance(screen, FollowedTable):
            screen.take(state)
        screen.ticked(follower.running(state), state.waiting, state.engine_state)
        time.sleep(_LOOK_EVERY_SECONDS)
        state = follower.runner()


def _print_state(sweep: Path) -> None:
    plan = Follower(sweep).plan
    folder = shlex.quote(str(sweep))
    click.echo(f"No process runs the sweep in {sweep} any more. Next: flopwatch report {folder}")
    if plan.todo:
        click.echo(f"{plural(len(plan.todo), 'trial')} left; to resume the sweep, run the command that started it.")
    if plan.todo or any(result.outcome not in GREEN for result in plan.kept.values()):
        raise SystemExit(1)


_PATIENCE_SECONDS = 60.0


def run_detached(sweep: Path) -> None:
    """Start the same command without `--detach` in a new session, so that closing the terminal does not end it.

    Returns when the new process has locked the folder. If it fails first, prints its output and exits with its status.
    """
    with held_folder(sweep):  # creates the folder, or raises if another process has locked it
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
            click.echo(plain(log.read().decode(errors="replace")), nl=False, err=True)
        raise SystemExit(runner.returncode)
    folder = shlex.quote(str(sweep))
    click.echo(f"The sweep runs in the background as process {runner.pid}; its output is in {sweep / RUNNER_LOG}.")
    click.echo(f"Show it: flopwatch sweep attach {folder}")
    click.echo(f"Stop it: flopwatch sweep stop {folder}")


def _holds(sweep: Path, pid: int) -> bool:
    state = read_runner(sweep)
    return state is not None and state.pid == pid
