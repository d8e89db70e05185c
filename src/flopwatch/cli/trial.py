"""`flopwatch trial`: one configuration, watched over and measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flopwatch.trial_records import TrialResult, TrialSpec


def trial(
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

    from flopwatch.cli.lasting_output import lasting_output

    if spec is not None:
        asked, folder, name = _from_file(spec)
    else:
        settings = _settings(locals())
        asked, folder, name = _from_flags(settings), Path("flopwatch-sweep"), None
    with lasting_output():
        result = _supervised(output or folder, asked, name, quiet=as_json)
        if as_json:
            typer.echo(json.dumps(result.to_json(), indent=2))
        else:
            from flopwatch.cli.trial_text import print_result

            print_result(result)
    if result.outcome != "ok":
        raise typer.Exit(1)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    trainers: list[Any] = [{"command": given["command"]}] if given["command"] else [given["trainer"]]
    limits = {"wall_seconds": given["timeout"], **({"memory": given["memory"]} if given["memory"] else {})}
    return {
        "trainers": trainers,
        "batch_sizes": [given["batch_size"]],
        "seq_lens": [given["seq_len"]],
        "models": [given["model"]],
        "dtypes": [given["dtype"]],
        "device": given["device"],
        "checkpointing": [given["checkpoint"]],
        "steps": given["steps"],
        "limits": limits,
    }


def _from_flags(settings: dict[str, Any]) -> "TrialSpec":
    from flopwatch.sweep.matrix import expand, read_matrix

    return expand(read_matrix(None, settings))[0]


def _from_file(file: Path) -> "tuple[TrialSpec, Path, str]":
    from flopwatch.errors import InputError
    from flopwatch.file_reading import UnreadableError, load_json
    from flopwatch.record_reading import BrokenRecordError
    from flopwatch.trial_records import TrialSpec, is_trial_name

    try:
        content = load_json(file)
        spec = TrialSpec.from_json(content["spec"])
        name = str(content["name"])
    except (FileNotFoundError, UnreadableError, BrokenRecordError, KeyError, TypeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{file} is not the spec.json of a trial ({why}); it lies in SWEEP/trials/NAME/") from None
    if not is_trial_name(name):
        raise InputError(f"{file} names its trial {name[:80]!r}, which is no name of a trial")
    return spec, file.resolve().parents[2], name


def _supervised(folder: Path, spec: "TrialSpec", name: str | None, *, quiet: bool) -> "TrialResult":
    """In this process: the supervisor is light, and Ctrl-C ends the trial with all its processes."""
    from flopwatch.cli.trial_text import interruptible, phases_shown
    from flopwatch.sweep.engines.protocol import Trial
    from flopwatch.sweep.environment import fingerprint
    from flopwatch.sweep.folder import held_folder, prepare, record, write_trial_list
    from flopwatch.sweep.names import trial_names
    from flopwatch.sweep.supervisor import supervise
    from flopwatch.trial_records import content_key

    name = name or trial_names([spec])[0]
    placed = Trial(folder, name, content_key(spec, fingerprint(spec)), spec)
    with held_folder(folder):
        prepare(placed)
        write_trial_list(folder, [placed], "trial")
        with interruptible() as asked_to_stop, phases_shown(folder, placed, quiet=quiet) as show:
            result = supervise(folder, name, cancel=lambda: show() or asked_to_stop())
        record(folder, result)
    return result
