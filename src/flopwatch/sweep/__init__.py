"""Measures a matrix of trainers, batch sizes, lengths and models, each trial in its own process.

`flopwatch.sweep.run(matrix, folder)` does from Python what the command `flopwatch sweep` does. Every supervisor imports
this package, so it loads nothing else until it is used.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwatch.optional import lazy_exports

if TYPE_CHECKING:
    from flopwatch.records.trial import TrialResult, TrialSpec
    from flopwatch.sweep.engines.protocol import Engine
    from flopwatch.sweep.folder import Trial
    from flopwatch.sweep.runner.observing import Observer
    from flopwatch.sweep.trainers.protocol import Trainer

__all__ = ["Engine", "Observer", "Trainer", "TrialResult", "TrialSpec", "run"]

__getattr__ = lazy_exports(
    "flopwatch.sweep",
    {
        "Engine": "flopwatch.sweep.engines.protocol",
        "Observer": "flopwatch.sweep.runner.observing",
        "Trainer": "flopwatch.sweep.trainers.protocol",
        "TrialResult": "flopwatch.records.trial",
        "TrialSpec": "flopwatch.records.trial",
    },
)


def run(
    matrix: Mapping[str, Any] | str | Path,
    folder: str | Path = "flopwatch-sweep",
    *,
    engine: "str | Engine" = "local",
    engine_options: Mapping[str, Any] | None = None,
    only: str | None = None,
    limit: str | None = None,
    order_seed: int | None = 0,
    preflight: bool = True,
    observer: "Observer | None" = None,
) -> "dict[str, TrialResult]":
    """Run a sweep, or what is left of it, and return the results of the matrix by the trials' names.

    Does what the command `flopwatch sweep` does; both resume each other's folders. Ctrl-C ends the running trials.

    Args:
        matrix: The keys of docs/sweep.md as a dict, or the path of a YAML file with them.
        folder: The sweep's folder; an earlier sweep in it is resumed.
        engine: `local`, `ray`, `slurm`, `package.module:Class`, or an engine object.
        engine_options: Arguments of the engine, such as `{"jobs": 2}` or `{"partition": "gpu"}`.
        only: `failed`, `oom` or `missing` runs just those trials.
        limit: A slice of the matrix, such as `20` or `100:200`.
        order_seed: Seed of the order in which trials run; None keeps the order of the matrix.
        preflight: False does not try the trainers on tiny copies of the models first.
        observer: Is called when a trial starts and ends; see `flopwatch.sweep.Observer`.

    Raises:
        InputError: The matrix, an option or the folder cannot be used.

    For example, `run({"trainers": ["standard"], "models": ["tiny"]})["StandardTrainer_bs4_seq512"].outcome` is `'ok'`.
    """
    import warnings

    from flopwatch.records.sweep_results import read_results
    from flopwatch.sweep.engines.protocol import load_engine
    from flopwatch.sweep.folder import held_folder, write_trial_list
    from flopwatch.sweep.runner.observing import Stop, runner_file
    from flopwatch.sweep.runner.plan import make_plan, record_unlisted, retry_policy
    from flopwatch.sweep.runner.run import run_plan
    from flopwatch.sweep.spec.matrix import expand, read_matrix
    from flopwatch.sweep.spec.names import check_names

    asked = read_matrix(None, matrix) if isinstance(matrix, Mapping) else read_matrix(Path(matrix), {})
    specs = expand(asked)
    check_names(specs, with_modules=preflight)
    policy = retry_policy(asked.retries, asked.retry_on)
    where = load_engine(engine, engine_options or {}) if isinstance(engine, str) else engine
    sweep = Path(folder)
    with held_folder(sweep), runner_file(sweep) as noted:
        plan = make_plan(sweep, specs, only=only, limit=limit, shuffle_seed=order_seed, engine=where.name)
        for trouble in plan.troubles:
            warnings.warn(f"{sweep}: {trouble}", stacklevel=2)
        record_unlisted(sweep, plan)
        write_trial_list(sweep, plan.trials, where.name)
        if plan.todo:
            refuse = _why_not(sweep, plan.todo) if preflight else (lambda trial: None)
            stop = Stop()
            seen = noted.passing_to(observer or _Silent(), stop)
            run_plan(plan, where, seen, stop, refuse, retries=policy, budget_seconds=asked.budget)
    results = read_results(sweep)
    return {trial.name: results[trial.name] for trial in plan.trials if trial.name in results}


def _why_not(sweep: Path, trials: "Sequence[Trial]") -> "Callable[[Trial], str | None]":
    """Tries each trainer on a tiny copy of its model; returns why a trial cannot run, or None."""
    from flopwatch.sweep.preflight import refusals, refuse_mistakes, run_preflight

    specs = [trial.spec for trial in trials if trial.spec.trainer != "command"]
    found = run_preflight(sweep, specs) if specs else {}
    refuse_mistakes(found)
    why_not = refusals(found, specs)
    return lambda trial: why_not(trial.spec)


class _Silent:
    """An observer for callers that only want the results."""

    def started(self, trial: "Trial") -> None:
        pass

    def ended(self, result: "TrialResult") -> None:
        pass

    def ticked(self, running: "Mapping[str, Trial]", waiting: int, engine_state: str) -> None:
        pass
