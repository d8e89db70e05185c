"""`flopwatch sweep`: every configuration of a matrix, each in a separate process."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flopwatch.cli.trials.trial import flag

if TYPE_CHECKING:
    from flopwatch.records.trial import TrialSpec
    from flopwatch.sweep.engines.protocol import Engine
    from flopwatch.sweep.runner.observing import Stop
    from flopwatch.sweep.runner.plan import Plan, RetryPolicy
    from flopwatch.sweep.spec.matrix import Matrix

_QUICK = {"models": "tiny", "batch_sizes": [2], "seq_lens": [64], "steps": 3, "warmup_steps": 1, "batch": None}


_Words = Annotated[
    list[str] | None,
    typer.Argument(help="A YAML file, and settings such as batch_size=1,2,4.", metavar="[FILE] [KEY=VALUE]..."),
]
_Output = Annotated[
    Path | None, flag("The sweep's folder; an earlier one is resumed. Default: flopwatch-sweep.", "--output", "-o")
]
# The matrix.
_Trainers = Annotated[str | None, flag("standard,dpsgd,ghost,fast or package.module:Class.")]
_BatchSizes = Annotated[str | None, flag("Such as 4,8.")]
_SeqLens = Annotated[str | None, flag("Such as 512,1024.")]
_Models = Annotated[
    str | None, flag("tiny, small, medium, 1b; a config.json; module:function.", "--models", "--model-size")
]
_Dtypes = Annotated[str | None, flag("fp32,bf16.")]
_Command = Annotated[str | None, flag("A shell command as the trainer: 'python t.py --bs {batch_size}'.")]
_Steps = Annotated[int | None, flag("Measured steps of each trial.")]
_Exclude = Annotated[list[str] | None, flag("Leave out, such as 'trainer=ghost seq_len>=1024'.")]
_NoTrace = Annotated[bool, flag("Record no Kineto traces.", "--no-trace")]
# The limits of a trial.
_Memory = Annotated[str | None, flag("Host memory of each trial, such as 4GiB.")]
_Timeout = Annotated[float | None, flag("Seconds a trial may take. Default: 3600.")]
_NoProgress = Annotated[float | None, flag("Seconds without a step. Default: 600.")]
# Where trials run.
_EngineName = Annotated[str, flag("local, ray or slurm.")]
_EngineOption = Annotated[list[str] | None, flag("Such as partition=gpu, address=10.0.0.1:6379.")]
_Jobs = Annotated[int, flag("Trials at once on a machine without GPUs.")]
_GpuIds = Annotated[
    str | None, flag("Numbers of the GPUs to use, such as 0,1; 2 is the third one. Default: all.", "--gpu-ids")
]
_GpusPerTrial = Annotated[float | None, flag("A fraction shares one GPU.")]
# Which trials run, in which order, and for how long.
_Only = Annotated[str | None, flag("failed, oom or missing: run just those.")]
_Limit = Annotated[str | None, flag("A slice of the matrix: 20, or 100:200.")]
_Retries = Annotated[int | None, flag("How often a lost or preempted trial is tried again. Default: 2.")]
_RetryOn = Annotated[str | None, flag("Try these again too: error,crash,timeout,hang. Default: none.")]
_Budget = Annotated[
    str | None, flag("Start nothing new after this time, such as 8h or 90m; running trials are finished.")
]
_OrderSeed = Annotated[int, flag("Seed of the order in which trials run.", "--order-seed")]
_InOrder = Annotated[bool, flag("Run in the order of the matrix.", "--in-order")]
# What the command does.
_Detach = Annotated[bool, flag("Run on in the background; see `flopwatch sweep attach DIR`.", "--detach")]
_Quick = Annotated[bool, flag("The same trainers on a tiny model first: a minute's test.", "--quick")]
_DryRun = Annotated[bool, flag("Show the matrix and the predicted time; run nothing.", "--dry-run")]
_OnlyPreflight = Annotated[
    bool, flag("Say which trainer supports which model, count FLOPs, and stop.", "--only-preflight")
]
_NoPreflight = Annotated[bool, flag("Do not try the pairs on tiny copies first.", "--no-preflight")]
_Wandb = Annotated[str | None, flag("Log each trial to W&B when it ends, as one run.", metavar="PROJECT")]
_Mlflow = Annotated[str | None, flag("Log each trial to MLflow when it ends, as one run.", metavar="EXPERIMENT")]


def sweep(
    words: _Words = None,
    output: _Output = None,
    trainers: _Trainers = None,
    batch_sizes: _BatchSizes = None,
    seq_lens: _SeqLens = None,
    models: _Models = None,
    dtypes: _Dtypes = None,
    command: _Command = None,
    steps: _Steps = None,
    exclude: _Exclude = None,
    memory: _Memory = None,
    timeout: _Timeout = None,
    no_progress: _NoProgress = None,
    engine: _EngineName = "local",
    engine_option: _EngineOption = None,
    jobs: _Jobs = 1,
    gpu_ids: _GpuIds = None,
    gpus_per_trial: _GpusPerTrial = None,
    only: _Only = None,
    limit: _Limit = None,
    retries: _Retries = None,
    retry_on: _RetryOn = None,
    budget: _Budget = None,
    detach: _Detach = False,
    order_seed: _OrderSeed = 0,
    in_order: _InOrder = False,
    quick: _Quick = False,
    dry_run: _DryRun = False,
    only_preflight: _OnlyPreflight = False,
    no_preflight: _NoPreflight = False,
    no_trace: _NoTrace = False,
    wandb: _Wandb = None,
    mlflow: _Mlflow = None,
) -> None:
    """Measure every configuration of a matrix, each in its own process; run it again to resume.

    Ctrl-C once withdraws queued trials and finishes the running ones; twice ends those too. `flopwatch sweep attach
    DIR` shows a sweep that another terminal runs, `flopwatch sweep stop DIR` is Ctrl-C for it.
    """
    given = locals()  # typer needs every flag in the signature; passing each on by name would double it
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

        request.plan()  # so that a refusal is printed here and not in the background's log
        run_detached(request.output)
        return
    with lasting_output(), tracked(request.output, wandb, mlflow):
        _run(request, shuffle_seed=None if in_order else order_seed, with_preflight=not no_preflight)


@dataclass(frozen=True, slots=True)
class _Request:
    """The command line, read and checked."""

    output: Path
    specs: "list[TrialSpec]"
    engine: "Engine"
    only: str | None
    limit: str | None
    retries: "RetryPolicy"
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
        )


def _read(given: dict[str, Any]) -> _Request:
    from flopwatch.sweep.runner.plan import retry_policy
    from flopwatch.sweep.spec.matrix import expand
    from flopwatch.sweep.spec.names import check_names

    matrix = _matrix(given["words"] or [], _flags(given), quick=given["quick"])
    specs = expand(matrix)
    check_names(specs, with_modules=not given["no_preflight"])
    retries = retry_policy(matrix.retries, matrix.retry_on)
    engine = _engine(given["engine"], given["engine_option"] or [], given["jobs"], given["gpu_ids"])
    output = given["output"] or Path("flopwatch-quick" if given["quick"] else "flopwatch-sweep")
    return _Request(output, specs, engine, given["only"], given["limit"], retries, matrix.budget)


def _flags(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the matrix that were given as flags."""
    same = ("batch_sizes", "seq_lens", "models", "dtypes", "steps", "retries", "retry_on", "budget")
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


def _run(request: _Request, *, shuffle_seed: int | None, with_preflight: bool) -> None:
    from flopwatch.cli.trials.sweep_screens import CommandScreen
    from flopwatch.sweep import run_sweep

    plan, counts, stop = run_sweep(
        request.output,
        lambda: request.plan(shuffle_seed),
        request.engine,
        CommandScreen(),
        with_preflight=with_preflight,
        retries=request.retries,
        budget_seconds=request.budget_seconds,
    )
    _print_next_steps(request.output, plan, counts, stop)


def _print_next_steps(output: Path, plan: "Plan", counts: dict[str, int], stop: "Stop") -> None:
    """Say what to run next, and exit with the sweep's status."""
    import shlex

    from flopwatch.number_format import plural
    from flopwatch.records.reading import one_line
    from flopwatch.sweep.runner.plan import OVER_BUDGET, STOPPED, exit_status, failed_before, trials_left

    typer.echo(f"Next: flopwatch report {one_line(shlex.quote(str(output)))}")
    if before := failed_before(plan):
        typer.echo(f"{plural(before, 'trial')} failed in an earlier run; --only failed runs them again.")
    status = exit_status(plan, counts, was_stopped=stop.finish or stop.kill, is_over_budget=stop.is_over_budget)
    if status in (STOPPED, OVER_BUDGET):
        why = "The budget is used up: " if status == OVER_BUDGET else ""
        typer.echo(f"{why}{plural(trials_left(plan, counts), 'trial')} left; run the same command again to resume.")
    if status:
        raise typer.Exit(status)
