"""Runs a sweep: from Python by `flopwatch.sweep.run`, or by the command `flopwatch sweep`."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from flopwatch.records.sweep_results import read_results
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.sweep.engines.protocol import Engine, load_engine
from flopwatch.sweep.folder import held_folder, refused_on_a_full_disk, write_trial_list
from flopwatch.sweep.runner.observing import Observer, RunnerFile, Stop
from flopwatch.sweep.runner.plan import Plan, make_plan, record_unlisted, retry_policy
from flopwatch.sweep.runner.run import run_plan
from flopwatch.sweep.spec.matrix import Matrix, expand, read_matrix
from flopwatch.sweep.spec.names import check_names


def run(
    matrix: Mapping[str, Any] | str | Path,
    folder: str | Path = "flopwatch-sweep",
    *,
    engine: str | Engine = "local",
    engine_options: Mapping[str, Any] | None = None,
    only: str | None = None,
    limit: str | None = None,
    observer: Observer | None = None,
) -> dict[str, TrialResult]:
    """Run all trials of a matrix that have no result in the folder yet, and return all results by trial name.

    Does what the command `flopwatch sweep` does; each can resume a sweep that the other began. Ctrl-C ends the running
    trials. Your own trainers and models (`module:name`) are found in the current folder, in the folder of the
    script that calls this function, and in those of PYTHONPATH.

    Args:
        matrix: The keys of docs/sweep.md as a dict, or the path of a YAML file with them.
        folder: The sweep's folder; an earlier sweep in it is resumed.
        engine: `local`, `ray`, `slurm`, `package.module:Class`, or an engine object.
        engine_options: Arguments of the engine, such as `{"jobs": 2}` or `{"partition": "gpu"}`.
        only: `failed`, `oom` or `missing` runs just those trials.
        limit: A slice of the matrix, such as `20` or `100:200`.
        observer: Its methods are called when a trial starts and ends; see `flopwatch.sweep.Observer`.

    Raises:
        InputError: The matrix, an option or the folder cannot be used.

    For example, `run({"trainer": "standard", "model": "tiny"})["StandardTrainer_bs4_seq512"].outcome` is `'ok'`.
    """
    asked = read_matrix(None, matrix) if isinstance(matrix, Mapping) else read_matrix(Path(matrix), {})
    specs, rules = checked(asked)
    where = load_engine(engine, engine_options or {}) if isinstance(engine, str) else engine
    sweep = Path(folder)
    planned = partial(make_plan, sweep, specs, only=only, limit=limit, engine=where.name)

    def warn(text: str) -> None:
        warnings.warn(f"{sweep}: {text}", stacklevel=4)  # the warning names the line that called this function

    with _modules_of_the_script():
        plan, _, _ = run_sweep(sweep, planned, where, warn, lambda plan: nullcontext((observer, Stop())), **rules)
    results = read_results(sweep)
    return {trial.name: results[trial.name] for trial in plan.trials if trial.name in results}


@contextmanager
def _modules_of_the_script() -> Iterator[None]:
    """Let the processes of the trials import what the calling script can import from its own folder."""
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if script is None or getattr(main, "__spec__", None) is not None:  # a notebook, a shell, or `python -m module`
        yield
        return
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(Path(script).resolve().parent)]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def checked(matrix: Matrix) -> tuple[list[TrialSpec], dict[str, Any]]:
    """The trials of a matrix, and the arguments `retries` and `budget_seconds` of `run_plan`."""
    specs = expand(matrix)
    check_names(specs)
    return specs, {"retries": retry_policy(matrix.retries, matrix.retry_on), "budget_seconds": matrix.budget}


def run_sweep(
    sweep: Path,
    planned: Callable[[], Plan],
    engine: Engine,
    warn: Callable[[str], None],
    shown: Callable[[Plan], AbstractContextManager[tuple[Observer | None, Stop]]],
    **rules: Any,
) -> tuple[Plan, dict[str, int], Stop]:
    """Run a sweep in its folder; return its plan, the number of trials by outcome, and the `Stop` of `shown`.

    `planned` returns the plan. It is called once no other process can run a sweep in the folder. `shown` gives the
    observer and a `Stop` that can end the sweep early. `rules` are what `checked` returns beside the trials.
    """
    with held_folder(sweep), RunnerFile(sweep) as state_file:
        plan = planned()
        for trouble in plan.troubles:
            warn(trouble)
        with refused_on_a_full_disk(sweep):
            record_unlisted(sweep, plan)
            write_trial_list(sweep, plan.trials, engine.name)
        with shown(plan) as (observer, stop):
            seen = state_file.passing_to(observer, stop)
            counts = run_plan(plan, engine, seen, stop, **rules) if plan.todo else {}
    return plan, counts, stop
