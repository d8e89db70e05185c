"""`flopwatch sweep`: runs every trial of a matrix in a separate process."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from flopwatch.cli import argument, flag
from flopwatch.cli.trials.trial import COMMAND_HELP, MODEL_HELP
from flopwatch.errors import InputError

if TYPE_CHECKING:
    from flopwatch.records.repeats import RepeatPolicy
    from flopwatch.records.trial import TrialSpec
    from flopwatch.sweep.engines.protocol import Engine
    from flopwatch.sweep.runner.observing import Stop
    from flopwatch.sweep.runner.plan import Plan, RetryPolicy
    from flopwatch.sweep.spec.matrix import Matrix

_QUICK = {"models": "tiny", "batch_sizes": [2], "seq_lens": [64], "steps": 3, "warmup_steps": 1, "batch": None}


def sweep(
    words: Annotated[
        list[str] | None,
        argument(
            "A YAML file that describes the matrix, and settings such as batch_size=1,2,4. 'attach DIR' shows and "
            "'stop DIR' stops a running sweep.",
            "[FILE] [KEY=VALUE]...",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        flag("Folder of the sweep. A sweep already in it is resumed. Default: flopwatch-sweep.", "--output", "-o"),
    ] = None,
    # The matrix.
    trainers: Annotated[str | None, flag("Trainers: standard, dpsgd, ghost, fast or package.module:Class.")] = None,
    batch_sizes: Annotated[str | None, flag("Batch sizes, such as 4,8.")] = None,
    seq_lens: Annotated[str | None, flag("Sequence lengths, such as 512,1024.")] = None,
    models: Annotated[str | None, flag(MODEL_HELP, "--models", "--model-size")] = None,
    dtypes: Annotated[str | None, flag("Compute types, such as fp32,bf16.")] = None,
    command: Annotated[str | None, flag(COMMAND_HELP)] = None,
    steps: Annotated[int | None, flag("Measured steps of each trial.")] = None,
    exclude: Annotated[list[str] | None, flag("Leave out trials, such as 'trainer=ghost seq_len>=1024'.")] = None,
    # The limits of a trial.
    memory: Annotated[str | None, flag("Limit of host memory for each trial, such as 4GiB.")] = None,
    timeout: Annotated[float | None, flag("End a trial after this many seconds. Default: 3600.")] = None,
    no_progress: Annotated[
        float | None, flag("End a trial that finishes no step for this many seconds. Default: 600.")
    ] = None,
    # Where trials run.
    engine: Annotated[str, flag("Where trials run: local, ray or slurm.")] = "local",
    engine_option: Annotated[list[str] | None, flag("An option of the engine, such as partition=gpu.")] = None,
    jobs: Annotated[int, flag("How many trials run at once on a machine without GPUs.")] = 1,
    gpu_ids: Annotated[str | None, flag("Indices of the GPUs to use, such as 0,1. Default: all.", "--gpu-ids")] = None,
    gpus_per_trial: Annotated[float | None, flag("GPUs of each trial; with 0.5, two trials share one GPU.")] = None,
    # Which trials run, in which order, and for how long.
    only: Annotated[str | None, flag("Run only these trials: failed, oom or missing.")] = None,
    limit: Annotated[str | None, flag("Run a part of the matrix: 20 (the first 20 trials), or 100:200.")] = None,
    retries: Annotated[int | None, flag("Retries of a trial that was lost or preempted. Default: 2.")] = None,
    retry_on: Annotated[str | None, flag("Outcomes to retry besides 'lost': error,crash,timeout,hang.")] = None,
    until: Annotated[
        str | None, flag("Repeat trials until the interval of the step time is at most this wide, such as 5%.")
    ] = None,
    max_repeats: Annotated[int | None, flag("Repeats of a trial with --until. Default: 5.")] = None,
    budget: Annotated[str | None, flag("Start no new trial after this time, such as 8h or 90m.")] = None,
    detach: Annotated[bool, flag("Run in the background; `flopwatch sweep attach` shows it.", "--detach")] = False,
    order_seed: Annotated[int, flag("Seed of the random order in which trials run.", "--order-seed")] = 0,
    in_order: Annotated[bool, flag("Run trials in the order of the matrix.", "--in-order")] = False,
    # Checks before the sweep, traces, and tracking services.
    quick: Annotated[bool, flag("Run each trainer on a tiny model for 3 steps; about a minute.", "--quick")] = False,
    dry_run: Annotated[bool, flag("Show the trials and the predicted time; run nothing.", "--dry-run")] = False,
    only_preflight: Annotated[bool, flag("Only show which trainer supports which model.", "--only-preflight")] = False,
    no_preflight: Annotated[bool, flag("Do not try trainers on a tiny model first.", "--no-preflight")] = False,
    no_trace: Annotated[bool, flag("Record no Kineto traces.", "--no-trace")] = False,
    wandb: Annotated[str | None, flag("Log each trial to W&B when it ends.", metavar="PROJECT")] = None,
    mlflow: Annotated[str | None, flag("Log each trial to MLflow when it ends.", metavar="EXPERIMENT")] = None,
) -> None:
    """Measure every trial of a matrix, each in its own process. Run the same command again to resume.

    The first Ctrl-C finishes running trials and starts no more; the second ends running trials. `flopwatch sweep
    attach DIR` shows a sweep that runs in another terminal, `flopwatch sweep stop DIR` sends it a Ctrl-C.
    """
    given = locals()  # a dict of all flags, because `_read` would otherwise need each of them as an argument
    if words and words[0] in ("attach", "stop"):
        from flopwatch.cli.trials.sweep_attach import attach_or_stop

        attach_or_stop(words)
        return
    request = _read(given)
    if dry_run:
        from flopwatch.cli.trials.sweep_screens import print_dry_run

        print_dry_run(request.plan(), request.output)
        return
    if only_preflight:
        from flopwatch.cli.trials.sweep_screens import print_preflight
        from flopwatch.sweep.folder import held_folder
        from flopwatch.sweep.preflight import preflight_trials

        with held_folder(request.output):
            preflight_trials(request.output, request.plan().todo, print_preflight)
        return
    from flopwatch.cli import lasting_output
    from flopwatch.cli.trials.tracking import refuse_unusable, tracked

    refuse_unusable(wandb, mlflow)
    if detach:
        from flopwatch.cli.trials.sweep_attach import run_detached

        request.plan()  # shows errors of the input here, because in the background they would be in a log file
        run_detached(request.output)
        return
    with lasting_output(), tracked(request.output, wandb, mlflow):
        _run(request, shuffle_seed=None if in_order else order_seed, with_preflight=not no_preflight)


@dataclass(frozen=True, slots=True)
class _Request:
    """The values of the command line, converted and checked."""

    output: Path
    specs: "list[TrialSpec]"
    engine: "Engine"
    only: str | None
    limit: str | None
    retries: "RetryPolicy"
    repeats: "RepeatPolicy"
    budget_seconds: float | None

    def plan(self, shuffle_seed: int | None = None) -> "Plan":
        from flopwatch.sweep.runner.plan import make_plan

        return make_plan(
            self.output,
            self.specs,
            only=self.only,
            limit=self.limit,
            shuffle_seed=shuffle_seed,
            engine=self.engine.name,
            repeats=self.repeats,
        )


def _read(given: dict[str, Any]) -> _Request:
    from flopwatch.records.repeats import RepeatPolicy
    from flopwatch.sweep.runner.plan import retry_policy
    from flopwatch.sweep.spec.matrix import expand
    from flopwatch.sweep.spec.names import check_names

    matrix = _matrix(given["words"] or [], _flags(given), quick=given["quick"])
    specs = expand(matrix)
    check_names(specs, with_modules=not given["no_preflight"])
    retries = retry_policy(matrix.retries, matrix.retry_on)
    engine = _engine(given["engine"], given["engine_option"] or [], given["jobs"], given["gpu_ids"])
    output = given["output"] or Path("flopwatch-quick" if given["quick"] else "flopwatch-sweep")
    repeats = RepeatPolicy(matrix.until, matrix.max_repeats)
    return _Request(output, specs, engine, given["only"], given["limit"], retries, repeats, matrix.budget)


def _flags(given: dict[str, Any]) -> dict[str, Any]:
    """The values of the given flags that describe the matrix, by the names of the settings in a YAML file."""
    same = (
        "batch_sizes",
        "seq_lens",
        "models",
        "dtypes",
        "steps",
        "retries",
        "retry_on",
        "until",
        "max_repeats",
        "budget",
    )
    limits = {"memory": given["memory"], "wall_seconds": given["timeout"], "no_progress_seconds": given["no_progress"]}
    flags = {name: given[name] for name in same} | {
        "trainers": _trainers(given["trainers"], given["command"]),
        "gpus": given["gpus_per_trial"],
        "exclude": given["exclude"] or None,
        "trace": False if given["no_trace"] else None,
        "limits": _given(limits) or None,
    }
    return _given(flags)


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _trainers(trainers: str | None, command: str | None) -> list[Any] | None:
    named: list[Any] = trainers.split(",") if trainers else []
    return [*named, {"command": command}] if command else named or None


def _matrix(words: list[str], flags: dict[str, Any], *, quick: bool) -> "Matrix":
    from flopwatch.sweep.spec.matrix import layered, read_matrix
    from flopwatch.sweep.spec.parsing import parse_overrides

    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise InputError(f"name only one YAML file, got {', '.join(files)}; write settings as batch_size=1,2,4")
    overrides = parse_overrides([word for word in words if "=" in word])
    return read_matrix(Path(files[0]) if files else None, layered(overrides, flags, _QUICK if quick else {}))


def _engine(name: str, options: list[str], jobs: int, gpus: str | None) -> "Engine":
    from flopwatch.sweep.engines.local import check_gpus
    from flopwatch.sweep.engines.protocol import load_engine
    from flopwatch.sweep.spec.parsing import parse_overrides

    settings = parse_overrides(options)
    if name == "local":
        named = [gpu.strip() for gpu in gpus.split(",")] if gpus else None
        check_gpus(named or ())
        settings |= {"jobs": jobs, "gpus": named}
    return load_engine(name, settings)


def _run(request: _Request, *, shuffle_seed: int | None, with_preflight: bool) -> None:
    from flopwatch.cli import print_error
    from flopwatch.cli.trials.sweep_screens import CommandScreen
    from flopwatch.sweep import run_sweep
    from flopwatch.sweep.folder import FolderGoneError

    try:
        plan, counts, stop = run_sweep(
            request.output,
            lambda: request.plan(shuffle_seed),
            request.engine,
            CommandScreen(),
            with_preflight=with_preflight,
            retries=request.retries,
            repeats=request.repeats,
            budget_seconds=request.budget_seconds,
        )
    except FolderGoneError as error:
        print_error(str(error))
        raise SystemExit(1) from None
    _print_next_steps(request.output, plan, counts, stop)


def _print_next_steps(output: Path, plan: "Plan", counts: dict[str, int], stop: "Stop") -> None:
    """Print which command to run next, and exit with the status of the sweep."""
    import shlex

    from flopwatch.sweep.runner.plan import OVER_BUDGET, STOPPED, exit_status, failed_before, trials_left
    from flopwatch.text import one_line, plural

    click.echo(f"Next: flopwatch report {one_line(shlex.quote(str(output)))}")
    if before := failed_before(plan):
        click.echo(f"{plural(before, 'trial')} failed in an earlier run; run them again with: --only failed")
    status = exit_status(plan, counts, was_stopped=stop.finish or stop.kill, is_over_budget=stop.is_over_budget)
    if status in (STOPPED, OVER_BUDGET):
        why = "The budget is used up: " if status == OVER_BUDGET else ""
        click.echo(f"{why}{plural(trials_left(plan, counts), 'trial')} left; run the same command again to resume.")
    if status:
        raise SystemExit(status)
