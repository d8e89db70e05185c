"""What `flopwatch sweep` does: reads the matrix, and runs, shows or stops its trials."""

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click

from flopwatch.cli import print_error
from flopwatch.cli.streams import lasting_output
from flopwatch.cli.trials.sweep_attach import attach_or_stop, run_detached
from flopwatch.cli.trials.sweep_screens import CommandScreen, print_dry_run, print_preflight
from flopwatch.cli.trials.tracking import refuse_unusable, tracked
from flopwatch.errors import InputError
from flopwatch.records.repeats import RepeatPolicy
from flopwatch.sweep.engines.local import check_gpus
from flopwatch.sweep.engines.protocol import Engine, load_engine
from flopwatch.sweep.folder import FolderGoneError, held_folder
from flopwatch.sweep.preflight import preflight_trials
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import (
    OVER_BUDGET,
    STOPPED,
    Plan,
    exit_status,
    failed_before,
    make_plan,
    retry_policy,
    trials_left,
)
from flopwatch.sweep.spec.matrix import Matrix, expand, layered, read_matrix
from flopwatch.sweep.spec.names import check_names
from flopwatch.sweep.spec.parsing import parse_overrides
from flopwatch.sweep.start import run_sweep
from flopwatch.text import one_line, plural

_QUICK = {"models": "tiny", "batch_sizes": [2], "seq_lens": [64], "steps": 3, "warmup_steps": 1, "batch": None}


def run_command(words: list[str] | None, output: Path | None, **given: Any) -> None:
    """Do what the flags of `flopwatch sweep` ask for."""
    if words and words[0] in ("attach", "stop"):
        attach_or_stop(words)
        return
    matrix = _matrix(words or [], _flags(given), quick=given["quick"])
    specs = expand(matrix)
    check_names(specs, with_modules=not given["no_preflight"])
    retries = retry_policy(matrix.retries, matrix.retry_on)
    engine = _engine(given["engine"], given["engine_option"] or [], given["jobs"], given["gpu_ids"])
    output = output or Path("flopwatch-quick" if given["quick"] else "flopwatch-sweep")
    repeats = RepeatPolicy(matrix.until, matrix.max_repeats)
    chosen = {"only": given["only"], "limit": given["limit"], "engine": engine.name, "repeats": repeats}
    plan = partial(make_plan, output, specs, **chosen)
    if given["dry_run"]:
        print_dry_run(plan(), output)
        return
    if given["only_preflight"]:
        with held_folder(output):
            preflight_trials(output, plan().todo, print_preflight)
        return
    refuse_unusable(given["wandb"], given["mlflow"])
    if given["detach"]:
        plan()  # shows errors of the input here, because in the background they would be in a log file
        run_detached(output)
        return
    seed = None if given["in_order"] else given["order_seed"]
    with lasting_output(), tracked(output, given["wandb"], given["mlflow"]):
        try:
            planned, counts, stop = run_sweep(
                output,
                partial(plan, shuffle_seed=seed),
                engine,
                CommandScreen(),
                with_preflight=not given["no_preflight"],
                retries=retries,
                repeats=repeats,
                budget_seconds=matrix.budget,
            )
        except FolderGoneError as error:
            print_error(str(error))
            raise SystemExit(1) from None
        _print_next_steps(output, planned, counts, stop)


def _flags(given: dict[str, Any]) -> dict[str, Any]:
    """The values of the given flags that describe the matrix, by the names of the settings in a YAML file."""
    limits = {"memory": given["memory"], "wall_seconds": given["timeout"], "no_progress_seconds": given["no_progress"]}
    trainers: list[Any] = given["trainers"].split(",") if given["trainers"] else []
    flags = {name: given[name] for name in Matrix.model_fields if name in given} | {
        "trainers": [*trainers, *([{"command": given["command"]}] if given["command"] else [])] or None,
        "gpus": given["gpus_per_trial"],
        "trace": False if given["no_trace"] else None,
        "limits": _given(limits) or None,
    }
    return _given(flags)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


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
    """Print which command to run next, and exit with the status of the sweep."""
    click.echo(f"Next: flopwatch report {one_line(shlex.quote(str(output)))}")
    if before := failed_before(plan):
        click.echo(f"{plural(before, 'trial')} failed in an earlier run; run them again with: --only failed")
    status = exit_status(plan, counts, was_stopped=stop.finish or stop.kill, is_over_budget=stop.is_over_budget)
    if status in (STOPPED, OVER_BUDGET):
        why = "The budget is used up: " if status == OVER_BUDGET else ""
        click.echo(f"{why}{plural(trials_left(plan, counts), 'trial')} left; run the same command again to resume.")
    if status:
        raise SystemExit(status)
