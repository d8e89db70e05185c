"""`flopwatch trial`: one configuration, watched over and measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flopwatch.records.trial import TrialResult, TrialSpec


def trial(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Further settings, such as options.noise_multiplier=0.8 privacy.dataset_size=50000 privacy.epochs=3.",
            metavar="[KEY=VALUE]...",
        ),
    ] = None,
    trainer: Annotated[str, typer.Option(help="standard, dpsgd, ghost, fast or package.module:Class.")] = "standard",
    batch_size: Annotated[int, typer.Option(help="Samples per step.")] = 4,
    seq_len: Annotated[int, typer.Option(help="Positions of each sample.")] = 512,
    model: Annotated[
        str, typer.Option("--model", "--model-size", help="tiny, small, medium, 1b; a config.json; module:function.")
    ] = "small",
    command: Annotated[str | None, typer.Option(help="A shell command as the trainer.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto is the accelerator if there is one.")] = "auto",
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="With gradient checkpointing.")] = False,
    steps: Annotated[int, typer.Option(help="Measured steps.")] = 10,
    memory: Annotated[str | None, typer.Option(help="Host memory it may use, such as 4GiB.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds it may take.")] = 3600.0,
    spec: Annotated[
        Path | None, typer.Option(help="The spec.json of an earlier trial: run just that one again.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder. Default: flopwatch-sweep.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure one configuration in a process of its own: time, memory, FLOPs, MFU, and how it ended."""
    import json

    from flopwatch.cli.output import lasting_output
    from flopwatch.sweep.spec.names import check_names

    if spec is not None:
        output = output and output.resolve()
        asked, folder, name = _from_file(spec, has_folder=output is not None)
    else:
        asked, folder, name = asked_for(words or [], _flags(locals())), Path("flopwatch-sweep"), None
    check_names([asked])
    with lasting_output():
        result, stands = _supervised(output or folder, asked, name, quiet=as_json)
        if as_json:
            typer.echo(json.dumps(result.to_json(), indent=2))
        else:
            from flopwatch.cli.trials.trial_screens import print_result

            print_result(result)
        if stands:
            typer.echo(stands, err=True)
    if result.outcome != "ok":
        raise typer.Exit(1)


def _flags(given: dict[str, Any]) -> dict[str, Any]:
    trainers: list[Any] = [{"command": given["command"]}] if given["command"] else [given["trainer"]]
    return {
        "trainers": trainers,
        "batch_sizes": [given["batch_size"]],
        "seq_lens": [given["seq_len"]],
        "models": [given["model"]],
        "dtypes": [given["dtype"]],
        "device": given["device"],
        "checkpointing": [given["checkpoint"]],
        "steps": given["steps"],
        "limits": {"wall_seconds": given["timeout"], **({"memory": given["memory"]} if given["memory"] else {})},
    }


def asked_for(words: list[str], flags: dict[str, Any]) -> "TrialSpec":
    """The one configuration that flags and settings make; a setting goes over the flag of the same meaning."""
    from flopwatch.errors import InputError
    from flopwatch.sweep.spec.matrix import expand, layered, read_matrix
    from flopwatch.sweep.spec.parsing import parse_overrides

    specs = expand(read_matrix(None, layered(flags, parse_overrides(words))))
    if len(specs) > 1:
        raise InputError(f"a trial is one configuration, these settings make {len(specs)}; give one value of each")
    return specs[0]


def _from_file(file: Path, *, has_folder: bool) -> "tuple[TrialSpec, Path, str]":
    from flopwatch.errors import InputError
    from flopwatch.records.reading import BrokenRecordError, UnreadableError, load_json
    from flopwatch.records.sweep_results import NewerFormatError, is_sweep_folder, trial_job_from
    from flopwatch.sweep.spec.processes import check_processes

    try:
        job = trial_job_from(load_json(file))
    except (FileNotFoundError, UnreadableError, BrokenRecordError) as error:
        raise InputError(f"{file} is not the spec.json of a trial ({error}); it lies in SWEEP/trials/NAME/") from None
    except NewerFormatError as error:
        raise InputError(f"{file} is of {error}; update flopwatch") from None
    check_processes(job.spec)
    folder = file.resolve().parent.parent.parent
    if not has_folder and not is_sweep_folder(folder):
        raise InputError(f"{file} does not lie in SWEEP/trials/NAME/; name a folder for the result with --output")
    _go_to(job.cwd)
    return job.spec, folder, job.name


def _go_to(folder: str | None) -> None:
    """To where the sweep was started: the trainer, a config or a script are named from there."""
    import os

    if folder is None:
        return
    try:
        os.chdir(folder)
    except OSError as error:
        typer.echo(
            f"cannot go to {folder}, where the sweep was started ({error.strerror}); running from here", err=True
        )


def _supervised(folder: Path, spec: "TrialSpec", name: str | None, *, quiet: bool) -> "tuple[TrialResult, str]":
    """In this process: the supervisor is light, and Ctrl-C ends the trial with all its processes.

    Returns the result, and a sentence where an earlier one stands instead of it.
    """
    from flopwatch.cli.trials.trial_screens import interruptible, phases_shown
    from flopwatch.records.sweep_results import read_result, read_trial_list
    from flopwatch.records.trial import content_key
    from flopwatch.sweep.attempts import is_worse, put_aside, put_back
    from flopwatch.sweep.folder import Trial, has_begun, held_folder, prepare, record, result_file, write_trial_list
    from flopwatch.sweep.host.environment import fingerprint
    from flopwatch.sweep.spec.names import trial_names
    from flopwatch.sweep.supervisor.supervise import supervise

    name = name or trial_names([spec])[0]
    with held_folder(folder):
        # As the sweep knows it: one that ran on a cluster has a key without this host's devices.
        here, anywhere = (content_key(spec, fingerprint(spec, is_here=is_here)) for is_here in (True, False))
        listed = read_trial_list(folder).trials.get(name, {}).get("key")
        placed = Trial(folder, name, anywhere if listed == anywhere else here, spec)
        earlier = read_result(result_file(folder, name))
        aside = put_aside(folder, name) if has_begun(folder, name) else ""
        prepare(placed)
        write_trial_list(folder, [placed], "trial")
        with interruptible() as asked_to_stop, phases_shown(folder, placed, quiet=quiet) as show:
            result = supervise(folder, name, cancel=lambda: show() or asked_to_stop())
        if earlier is not None and is_worse(result, earlier):
            place = put_back(folder, name, aside)
            return result, f"The earlier result ({earlier.outcome}) stands; this attempt is in {folder / place}"
        record(folder, result)
    return result, ""
