"""`flopwatch sweep`: every configuration of a matrix in a process of its own."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from flopwatch.sweep.engines.protocol import Engine
    from flopwatch.sweep.folder import Trial
    from flopwatch.sweep.runner.decisions import RetryPolicy
    from flopwatch.sweep.runner.observing import Stop
    from flopwatch.sweep.runner.plan import Plan
    from flopwatch.sweep.spec.matrix import Matrix

_QUICK = {"models": "tiny", "batch_sizes": [2], "seq_lens": [64], "steps": 3, "warmup_steps": 1, "batch": None}


def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A YAML file, and settings such as batch_size=1,2,4.", metavar="[FILE] [KEY=VALUE]..."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The sweep's folder; an earlier one is resumed. Default: flopwatch-sweep."),
    ] = None,
    trainers: Annotated[str | None, typer.Option(help="standard,dpsgd,ghost,fast or package.module:Class.")] = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Such as 4,8.")] = None,
    seq_lens: Annotated[str | None, typer.Option(help="Such as 512,1024.")] = None,
    models: Annotated[
        str | None,
        typer.Option("--models", "--model-size", help="tiny, small, medium, 1b; a config.json; module:function."),
    ] = None,
    dtypes: Annotated[str | None, typer.Option(help="fp32,bf16.")] = None,
    command: Annotated[
        str | None, typer.Option(help="A shell command as the trainer: 'python t.py --bs {batch_size}'.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Measured steps of each trial.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave out, such as 'trainer=ghost seq_len>=1024'.")] = None,
    memory: Annotated[str | None, typer.Option(help="Host memory of each trial, such as 4GiB.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds a trial may take. Default: 3600.")] = None,
    no_progress: Annotated[float | None, typer.Option(help="Seconds without a step. Default: 600.")] = None,
    engine: Annotated[str, typer.Option(help="local, ray or slurm.")] = "local",
    engine_option: Annotated[
        list[str] | None, typer.Option(help="Such as partition=gpu, address=10.0.0.1:6379.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Trials at once on a machine without GPUs.")] = 1,
    gpus: Annotated[
        str | None, typer.Option(help="Numbers of the GPUs to use, such as 0,1; 2 is the third one. Default: all.")
    ] = None,
    gpus_per_trial: Annotated[float | None, typer.Option(help="A fraction shares one GPU.")] = None,
    only: Annotated[str | None, typer.Option(help="failed, oom or missing: run just those.")] = None,
    limit: Annotated[str | None, typer.Option(help="A slice of the matrix: 20, or 100:200.")] = None,
    retries: Annotated[
        int | None, typer.Option(help="How often a lost or preempted trial is tried again. Default: 2.")
    ] = None,
    retry_on: Annotated[
        str | None, typer.Option(help="Try these again too: error,crash,timeout,hang. Default: none.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Start nothing new after this time, such as 8h or 90m; what runs is finished.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run on in the background; see `flopwatch sweep attach DIR`.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the order trials run in.")] = 0,
    in_order: Annotated[bool, typer.Option("--in-order", help="Run in the order of the matrix.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="The same trainers on a tiny model first: a minute's test.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the matrix and the predicted time; run nothing.")
    ] = False,
    only_preflight: Annotated[
        bool, typer.Option("--only-preflight", help="Say which trainer can train which model, count FLOPs, and stop.")
    ] = False,
    no_preflight: Annotated[
        bool, typer.Option("--no-preflight", help="Do not try the pairs on tiny copies first.")
    ] = False,
    no_trace: Annotated[bool, typer.Option("--no-trace", help="Record no Kineto traces.")] = False,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Log each trial to W&B as it ends, as a run of its own.")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(metavar="EXPERIMENT", help="Log each trial to MLflow as it ends, as a run of its own.")
    ] = None,
) -> None:
    """Measure every configuration of a matrix, each in its own process; run it again to resume.

    Ctrl-C once withdraws what is queued and finishes what runs, twice ends it. `flopwatch sweep attach DIR` shows a
    sweep that runs elsewhere, `flopwatch sweep stop DIR` is Ctrl-C for it.
    """
    if words and words[0] in ("attach", "stop"):
        from flopwatch.cli.trials.sweep_attach import attach_or_stop

        attach_or_stop(words)
        return
    from flopwatch.cli.output import lasting_output
    from flopwatch.sweep.runner.decisions import retry_policy
    from flopwatch.sweep.spec.matrix import expand
    from flopwatch.sweep.spec.names import check_names

    flags: dict[str, Any] = {
        "trainers": _trainers(trainers, command),
        "batch_sizes": batch_sizes,
        "seq_lens": seq_lens,
        "models": models,
        "dtypes": dtypes,
        "steps": steps,
        "gpus": gpus_per_trial,
        "exclude": exclude or None,
        "trace": False if no_trace else None,
        "limits": _limits(memory, timeout, no_progress),
        "retries": retries,
        "retry_on": retry_on,
        "budget": budget,
    }
    matrix = _matrix(words or [], {key: value for key, value in flags.items() if value is not None}, quick=quick)
    specs = expand(matrix)
    check_names(specs, with_modules=not no_preflight)
    policy = retry_policy(matrix.retries, matrix.retry_on)
    placed = _engine(engine, engine_option or [], jobs, gpus)
    output = output or Path("flopwatch-quick" if quick else "flopwatch-sweep")
    if dry_run:
        from flopwatch.cli.trials.sweep_screens import print_dry_run
        from flopwatch.sweep.runner.plan import make_plan

        plan = make_plan(output, specs, only=only, limit=limit, shuffle_seed=None, engine=engine)
        print_dry_run(plan, output)
        return
    if only_preflight:
        from flopwatch.sweep.folder import held_folder
        from flopwatch.sweep.runner.plan import make_plan

        with held_folder(output):
            _preflight(output, make_plan(output, specs, only=only, limit=limit, engine=engine))
        return
    from flopwatch.cli.trials.tracking import refuse_unusable, tracked

    refuse_unusable(wandb, mlflow)
    if detach:
        from flopwatch.cli.trials.sweep_attach import run_detached
        from flopwatch.sweep.runner.plan import make_plan

        make_plan(output, specs, only=only, limit=limit, engine=engine)  # what is refused is told here, not in a log
        run_detached(output)
        return
    with lasting_output(), tracked(output, wandb, mlflow):
        _run(
            output,
            specs,
            placed,
            only,
            limit,
            None if in_order else seed,
            with_preflight=not no_preflight,
            retries=policy,
            budget_seconds=matrix.budget,
        )


def _trainers(trainers: str | None, command: str | None) -> list[Any] | None:
    named: list[Any] = trainers.split(",") if trainers else []
    return [*named, {"command": command}] if command else named or None


def _limits(memory: str | None, timeout: float | None, no_progress: float | None) -> dict[str, Any] | None:
    given = {"memory": memory, "wall_seconds": timeout, "no_progress_seconds": no_progress}
    return {key: value for key, value in given.items() if value is not None} or None


def _matrix(words: list[str], flags: dict[str, Any], *, quick: bool) -> "Matrix":
    from flopwatch.errors import InputError
    from flopwatch.sweep.spec.matrix import layered, read_matrix
    from flopwatch.sweep.spec.parsing import parse_overrides

    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise InputError(f"one YAML file at a time, got {', '.join(files)}; settings are written as batch_size=1,2,4")
    overrides = parse_overrides([word for word in words if "=" in word])
    return read_matrix(Path(files[0]) if files else None, layered(overrides, flags, _QUICK if quick else {}))


def _engine(name: str, options: list[str], jobs: int, gpus: str | None) -> "Engine":
    from flopwatch.sweep.engines.protocol import load_engine
    from flopwatch.sweep.engines.slots import check_gpus
    from flopwatch.sweep.spec.parsing import parse_overrides

    settings = parse_overrides(options)
    if name == "local":
        named = [gpu.strip() for gpu in gpus.split(",")] if gpus else None
        check_gpus(named or ())
        settings |= {"jobs": jobs, "gpus": named}
    return load_engine(name, settings)


def _run(
    output: Path,
    specs: list[Any],
    engine: "Engine",
    only: str | None,
    limit: str | None,
    shuffle_seed: int | None,
    *,
    with_preflight: bool,
    retries: "RetryPolicy",
    budget_seconds: float | None,
) -> None:
    from flopwatch.cli.trials.sweep_screens import watched
    from flopwatch.records.reading import one_line
    from flopwatch.sweep.folder import held_folder, write_trial_list
    from flopwatch.sweep.runner.observing import runner_file
    from flopwatch.sweep.runner.plan import make_plan, record_unlisted
    from flopwatch.sweep.runner.run import run_plan

    with held_folder(output), runner_file(output) as noted:
        plan = make_plan(output, specs, only=only, limit=limit, shuffle_seed=shuffle_seed, engine=engine.name)
        for trouble in plan.troubles:
            typer.echo(one_line(f"warning: {trouble}", 1000), err=True)
        record_unlisted(output, plan)
        write_trial_list(output, plan.trials, engine.name)
        refuse = _preflight(output, plan) if with_preflight and plan.todo else (lambda trial: None)
        with watched(plan, output) as (observer, stop):
            seen = noted.before(observer, stop)
            limits: dict[str, Any] = {"retries": retries, "budget_seconds": budget_seconds}
            counts = run_plan(plan, engine, seen, stop, refuse, **limits) if plan.todo else {}
    _say_what_next(output, plan, counts, stop)


def _preflight(output: Path, plan: "Plan") -> "Callable[[Trial], str | None]":
    from flopwatch.cli.trials.sweep_screens import print_preflight
    from flopwatch.sweep.preflight import refusals, refuse_mistakes, run_preflight

    will_run = {trial.name for trial in plan.todo}
    specs = [trial.spec for trial in plan.trials if trial.name in will_run and trial.spec.trainer != "command"]
    found = run_preflight(output, specs) if specs else {}
    print_preflight(found)
    refuse_mistakes(found)
    why_not = refusals(found, specs)
    return lambda trial: why_not(trial.spec)


def _say_what_next(output: Path, plan: "Plan", counts: dict[str, int], stop: "Stop") -> None:
    import shlex

    from flopwatch.cli.quantities import plural
    from flopwatch.records.reading import one_line
    from flopwatch.sweep.runner.decisions import OVER_BUDGET, STOPPED, exit_status, failed_before, trials_left

    typer.echo(f"Next: flopwatch report {one_line(shlex.quote(str(output)))}")
    if before := failed_before(plan):
        typer.echo(f"{plural(before, 'trial')} failed in an earlier run; --only failed runs them again.")
    status = exit_status(plan, counts, was_stopped=stop.finish or stop.kill, is_over_budget=stop.is_over_budget)
    if status in (STOPPED, OVER_BUDGET):
        why = "The budget is used up: " if status == OVER_BUDGET else ""
        typer.echo(f"{why}{plural(trials_left(plan, counts), 'trial')} left; the same command goes on.")
    if status:
        raise typer.Exit(status)
