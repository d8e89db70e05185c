"""What `flopwatch sweep` does: reads the matrix, and runs, shows or stops its trials, also those of another process."""

import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from flopwatch.cli import print_error, say
from flopwatch.cli.streams import lasting_output
from flopwatch.cli.trials.sweep_screens import (
    CommandScreen,
    LiveTable,
    PlainLines,
    print_dry_run,
    print_line,
    print_preflight,
)
from flopwatch.errors import InputError
from flopwatch.records.sweep_results import is_sweep_folder
from flopwatch.records.trial_files import RUNNER_LOG
from flopwatch.sweep.engines.local import check_gpus
from flopwatch.sweep.engines.protocol import Engine, load_engine
from flopwatch.sweep.folder import FolderGoneError, held_folder
from flopwatch.sweep.preflight import preflight_trials
from flopwatch.sweep.runner.observing import Follower, Stop, find_runner
from flopwatch.sweep.runner.plan import (
    GREEN,
    OVER_BUDGET,
    STOPPED,
    Plan,
    exit_status,
    failed_before,
    make_plan,
    trials_left,
)
from flopwatch.sweep.spec.matrix import Matrix, layered, read_matrix
from flopwatch.sweep.spec.parsing import parse_overrides
from flopwatch.sweep.start import checked, run_sweep
from flopwatch.text import one_line, plain, plural

_QUICK = {"models": "tiny", "batch_sizes": [2], "seq_lens": [64], "steps": 3, "warmup_steps": 1, "batch": None}
_LOOK_EVERY_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0


def run_command(words: list[str] | None, output: Path | None, **given: Any) -> None:
    if words and words[0] in ("attach", "stop"):
        _attach_or_stop(words)
        return
    matrix = _matrix(words or [], _flags(given), quick=given["quick"])
    specs, rules = checked(matrix, with_modules=not given["no_preflight"])
    engine = _engine(given["engine"], given["engine_option"] or [], given["jobs"], given["gpu_ids"])
    output = output or Path("flopwatch-quick" if given["quick"] else "flopwatch-sweep")
    chosen = {"only": given["only"], "limit": given["limit"], "engine": engine.name, "repeats": rules["repeats"]}
    plan = partial(make_plan, output, specs, **chosen)
    if given["dry_run"]:
        print_dry_run(plan(), output)
        return
    if given["only_preflight"]:
        with held_folder(output):
            preflight_trials(output, plan().todo, print_preflight)
        return
    if given["detach"]:
        plan()  # shows errors of the input here, because in the background they would be in a log file
        _run_detached(output)
        return
    planned = partial(plan, shuffle_seed=None if given["in_order"] else given["order_seed"])
    with_preflight = not given["no_preflight"]
    with lasting_output():
        try:
            result = run_sweep(output, planned, engine, CommandScreen(), with_preflight=with_preflight, **rules)
        except FolderGoneError as error:
            print_error(str(error))
            raise SystemExit(1) from None
        _print_next_steps(output, *result)


def _flags(given: dict[str, Any]) -> dict[str, Any]:
    """The values of the given flags that describe the matrix, by the names of the settings in a YAML file."""
    limits = {"memory": given["memory"], "wall_seconds": given["timeout"], "no_progress_seconds": given["no_progress"]}
    trainers: list[Any] = given["trainers"].split(",") if given["trainers"] else []
    flags = {name: given[name] for name in Matrix.model_fields if name in given} | {
        "trainers": [*trainers, *([{"command": given["command"]}] if given["command"] is not None else [])] or None,
        "gpus": given["gpus_per_trial"],
        "trace": False if given["no_trace"] else None,
        "limits": {name: limit for name, limit in limits.items() if limit is not None} or None,
    }
    return {name: value for name, value in flags.items() if value is not None}


def _matrix(words: list[str], flags: dict[str, Any], *, quick: bool) -> Matrix:
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise InputError(f"name only one YAML file, got {', '.join(files)}; write settings as batch_size=1,2,4")
    overrides = parse_overrides([word for word in words if "=" in word])
    return read_matrix(Path(files[0]) if files else None, layered(overrides, flags, _QUICK if quick else {}))


def _engine(name: str, options: list[str], jobs: int, gpus: str | None) -> Engine:
    settings = parse_overrides(options)
    if name == "local":
        named = [gpu.strip() for gpu in gpus.split(",")] if gpus else None
        check_gpus(named or ())
        settings |= {"jobs": jobs, "gpus": named}
    return load_engine(name, settings)


def _print_next_steps(output: Path, plan: Plan, counts: dict[str, int], stop: Stop) -> None:
    say(f"Next: flopwatch report {one_line(shlex.quote(str(output)))}")
    if before := failed_before(plan):
        say(f"{plural(before, 'trial')} failed in an earlier run; run them again with: --only failed")
    status = exit_status(plan, counts, was_stopped=stop.finish or stop.kill, is_over_budget=stop.is_over_budget)
    if status in (STOPPED, OVER_BUDGET):
        why = "The budget is used up: " if status == OVER_BUDGET else ""
        say(f"{why}{plural(trials_left(plan, counts), 'trial')} left; run the same command again to resume.")
    if status:
        raise SystemExit(status)


# Sweeps that run in another process: `flopwatch sweep attach DIR`, `flopwatch sweep stop DIR`, and `--detach`.


def _attach_or_stop(words: list[str]) -> None:
    if len(words) > 2:
        raise InputError(f"`flopwatch sweep {words[0]}` takes one folder, got {', '.join(words[1:])}")
    sweep = Path(words[1] if len(words) == 2 else "flopwatch-sweep")
    if not is_sweep_folder(sweep):
        raise InputError(
            f"{sweep} is not the folder of a sweep; name the folder that the sweep was given with --output"
        )
    (_attach if words[0] == "attach" else _stop)(sweep)


def _stop(sweep: Path) -> None:
    """Send SIGINT, like Ctrl-C, to the process that runs the sweep."""
    if (found := find_runner(sweep)) is None:
        raise InputError(f"no process runs the sweep in {sweep}; to resume it, run the command that started it")
    state, holder = found
    if not holder.is_here:
        command = f"flopwatch sweep stop {shlex.quote(str(sweep.resolve()))}"
        raise InputError(f"the sweep in {sweep} runs as process {state.pid} on {state.host}; run there: {command}")
    os.kill(state.pid, signal.SIGINT)
    is_second = state.stopping in ("finish", "kill")
    effect = "ends running trials" if is_second else "finishes running trials; a second stop ends them"
    say(f"Sent Ctrl-C to process {state.pid}, which {effect}.")


def _attach(sweep: Path) -> None:
    """Show the sweep until it ends. Ctrl-C stops the display, not the sweep."""
    follower, console, folder = Follower(sweep), Console(), shlex.quote(str(sweep))
    try:
        with lasting_output():
            if console.is_terminal:
                table = LiveTable(follower.plan, sweep, Stop(again="a second `flopwatch sweep stop`"))
                with table.live(console):
                    _follow(follower, table)
            else:
                _follow(follower, PlainLines(follower.plan, print_line(console)))
        plan = Follower(sweep).plan
        say(f"No process runs the sweep in {sweep} any more. Next: flopwatch report {folder}")
        if plan.todo:
            say(f"{plural(len(plan.todo), 'trial')} left; to resume the sweep, run the command that started it.")
        if plan.todo or any(result.outcome not in GREEN for result in plan.kept.values()):
            raise SystemExit(1)
    except KeyboardInterrupt:
        say(f"\nThe sweep is still running. Show it again: flopwatch sweep attach {folder}")


def _follow(follower: Follower, screen: LiveTable | PlainLines) -> None:
    state = follower.runner()
    while True:
        for result in follower.new_results():
            screen.ended(result)
        if state is None:
            screen.ticked(follower.running(None), 0, "no process runs this sweep")
            return
        if isinstance(screen, LiveTable):
            screen.take(state)
        screen.ticked(follower.running(state), state.waiting, state.engine_state)
        time.sleep(_LOOK_EVERY_SECONDS)
        state = follower.runner()


def _run_detached(sweep: Path) -> None:
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
    while runner.poll() is None and time.monotonic() < deadline:
        if (found := find_runner(sweep)) is not None and found[0].pid == runner.pid:
            break
        time.sleep(0.05)
    if runner.returncode:
        with (sweep / RUNNER_LOG).open("rb") as log:
            log.seek(said_before)
            click.echo(plain(log.read().decode(errors="replace")), nl=False, err=True)
        raise SystemExit(runner.returncode)
    folder = shlex.quote(str(sweep))
    say(f"The sweep runs in the background as process {runner.pid}; its output is in {sweep / RUNNER_LOG}.")
    say(f"Show it: flopwatch sweep attach {folder}")
    say(f"Stop it: flopwatch sweep stop {folder}")
