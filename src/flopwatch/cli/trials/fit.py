"""`flopwatch fit`: the largest batch that fits, and the fastest."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flopwatch.records.trial import TrialSpec
    from flopwatch.sweep.fit_search import Found
    from flopwatch.sweep.runner.plan import Plan
    from flopwatch.sweep.runner.run import Refusal


def fit(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Further settings, such as warmup_steps=1 threads=4.", metavar="[KEY=VALUE]..."),
    ] = None,
    trainer: Annotated[str, typer.Option(help="standard, dpsgd, ghost, fast or package.module:Class.")] = "standard",
    seq_len: Annotated[int, typer.Option(help="Positions of each sample.")] = 512,
    model: Annotated[
        str, typer.Option("--model", "--model-size", help="tiny, small, medium, 1b; a config.json; module:function.")
    ] = "small",
    command: Annotated[
        str | None, typer.Option(help="A shell command as the trainer: 'python t.py --bs {batch_size}'.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto is the accelerator if there is one.")] = "auto",
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="With gradient checkpointing.")] = False,
    steps: Annotated[int, typer.Option(help="Measured steps of each trial.")] = 5,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory of each trial, such as 2GiB. Default on a CPU: what is available, less a margin."
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Try nothing larger.")] = 4096,
    timeout: Annotated[float, typer.Option(help="Seconds a trial may take.")] = 3600.0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the trials; an earlier fit is resumed.")
    ] = Path("flopwatch-fit"),
    no_preflight: Annotated[
        bool, typer.Option("--no-preflight", help="Do not try the trainer on a tiny copy first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the largest batch that fits in memory and the fastest one, in a handful of trials.

    Two small trials predict the edge, trials on both sides of it verify it. Ctrl-C ends it; what was tried is kept.
    """
    from flopwatch.cli.output import lasting_output
    from flopwatch.errors import InputError
    from flopwatch.sweep.fit import with_host_limit
    from flopwatch.sweep.spec.names import check_names

    if max_batch < 1:
        raise InputError(f"--max-batch must be 1 or more, got {max_batch}")
    spec = _spec(words or [], locals())
    check_names([spec], with_modules=not no_preflight)
    limited = with_host_limit(output, spec)
    with lasting_output():
        if limited.reason and not as_json:
            typer.echo(limited.reason)
        found = _searched(output, limited.spec, max_batch, with_preflight=not no_preflight, quiet=as_json)
        _show(found, output, max_batch, as_json=as_json)
    if found.stopped or found.largest is None:
        raise typer.Exit(1)


def _spec(words: list[str], given: dict[str, Any]) -> "TrialSpec":
    from flopwatch.errors import InputError
    from flopwatch.sweep.spec.matrix import expand, layered, read_matrix
    from flopwatch.sweep.spec.parsing import parse_overrides

    limits = {"wall_seconds": given["timeout"], **({"memory": given["memory"]} if given["memory"] else {})}
    flags = {
        "trainers": [{"command": given["command"]}] if given["command"] else [given["trainer"]],
        "seq_lens": [given["seq_len"]],
        "models": [given["model"]],
        "dtypes": [given["dtype"]],
        "device": given["device"],
        "checkpointing": [given["checkpoint"]],
        "steps": given["steps"],
        "limits": limits,
    }
    # No trace: recording one takes memory of its own.
    settings = layered({"warmup_steps": 2, "trace": False}, parse_overrides(words), flags, {"batch_sizes": [1]})
    specs = expand(read_matrix(None, settings))
    if len(specs) > 1:
        raise InputError(f"a fit is of one configuration, these settings make {len(specs)}; give one value of each")
    return specs[0]


def _searched(output: Path, spec: "TrialSpec", max_batch: int, *, with_preflight: bool, quiet: bool) -> "Found":
    from flopwatch.cli.trials.trial_screens import ProbeStatus, interruptible, probe_line
    from flopwatch.sweep.fit import fit_batch
    from flopwatch.sweep.runner.observing import Stop

    stop = Stop()
    with interruptible() as asked_to_stop, ProbeStatus(stop, asked_to_stop, quiet=quiet) as status:
        return fit_batch(
            output,
            spec,
            status,
            stop=stop,
            max_batch=max_batch,
            preflight=(lambda plan: _preflight(output, plan, quiet=quiet)) if with_preflight else None,
            on_probe=lambda probe: None if quiet else typer.echo(probe_line(probe)),
        )


def _preflight(output: Path, plan: "Plan", *, quiet: bool) -> "Refusal":
    from flopwatch.cli.trials.sweep_screens import print_preflight
    from flopwatch.sweep.preflight import refusals, refuse_mistakes, run_preflight

    specs = [trial.spec for trial in plan.todo]
    found = run_preflight(output, specs)
    if not quiet:
        print_preflight(found)
    refuse_mistakes(found)
    why_not = refusals(found, specs)
    return lambda trial: why_not(trial.spec)


def _show(found: "Found", output: Path, max_batch: int, *, as_json: bool) -> None:
    import json
    import shlex

    from flopwatch.cli.trials.trial_screens import as_content, print_found

    if as_json:
        typer.echo(json.dumps(as_content(found, output), indent=2))
        return
    print_found(found, max_batch)
    typer.echo(f"flopwatch report {shlex.quote(str(output))}")
