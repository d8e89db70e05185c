"""`flopwatch trial` measures one trial; `flopwatch fit` finds the largest and the fastest batch size."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from flopwatch.cli import argument, flag, print_json
from flopwatch.errors import InputError

if TYPE_CHECKING:
    from flopwatch.records.trial import TrialResult, TrialSpec
    from flopwatch.sweep.fit import Found
    from flopwatch.sweep.runner.plan import Plan
    from flopwatch.sweep.runner.run import Refusal


MODEL_HELP = "tiny, small, medium or 1b; the path of a Hugging Face config.json; or module:function."
COMMAND_HELP = "Run a shell command instead of a trainer: 'python t.py --bs {batch_size}'."
_MORE_SETTINGS = "options.noise_multiplier=0.8 privacy.dataset_size=50000 privacy.epochs=3"
_Trainer = Annotated[str, flag("The trainer: standard, dpsgd, ghost, fast or package.module:Class.")]
_SeqLen = Annotated[int, flag("Sequence length: tokens of each sample.")]
_Model = Annotated[str, flag(MODEL_HELP, "--model", "--model-size")]
_Command = Annotated[str | None, flag(COMMAND_HELP)]
_Dtype = Annotated[str, flag("Compute type: fp32 or bf16.")]
_Device = Annotated[str, flag("The device, such as cpu or cuda; auto takes the accelerator if there is one.")]
_Checkpoint = Annotated[bool, flag("Use gradient checkpointing.", "--checkpoint")]
_Steps = Annotated[int, flag("Measured steps.")]
_Timeout = Annotated[float, flag("End a trial after this many seconds.")]
_AsJson = Annotated[bool, flag("Print the result as JSON.", "--json")]


def trial(
    words: Annotated[
        list[str] | None, argument(f"Further settings, such as {_MORE_SETTINGS}.", "[KEY=VALUE]...")
    ] = None,
    trainer: _Trainer = "standard",
    batch_size: Annotated[int, flag("Samples per step.")] = 4,
    seq_len: _SeqLen = 512,
    model: _Model = "small",
    command: _Command = None,
    dtype: _Dtype = "fp32",
    device: _Device = "auto",
    checkpoint: _Checkpoint = False,
    steps: _Steps = 10,
    memory: Annotated[str | None, flag("Limit of host memory for the trial, such as 4GiB.")] = None,
    timeout: _Timeout = 3600.0,
    spec: Annotated[Path | None, flag("Run an earlier trial again: the path of its spec.json.")] = None,
    output: Annotated[Path | None, flag("Folder for the result. Default: flopwatch-sweep.", "--output", "-o")] = None,
    as_json: _AsJson = False,
) -> None:
    """Measure one trial in a separate process: step time, memory, FLOPs and MFU, or the reason why it failed."""
    given = locals()  # a dict of all flags, to pass them on together
    from flopwatch.cli import lasting_output
    from flopwatch.sweep.spec.names import check_names

    if spec is not None:
        output = output and output.resolve()
        asked, folder, name = _from_file(spec, has_folder=output is not None)
    else:
        asked, folder, name = asked_for(words or [], _flags(given)), Path("flopwatch-sweep"), None
    check_names([asked])
    with lasting_output():
        result, note = _supervised(output or folder, asked, name, quiet=as_json)
        if as_json:
            print_json(result.to_json())
        else:
            from flopwatch.cli.trials.trial_screens import print_result

            print_result(result)
        if note:
            click.echo(note, err=True)
    if result.outcome != "ok":
        raise SystemExit(1)


def fit(
    words: Annotated[
        list[str] | None,
        argument("Further settings, such as warmup_steps=1 threads=4.", "[KEY=VALUE]..."),
    ] = None,
    trainer: _Trainer = "standard",
    seq_len: _SeqLen = 512,
    model: _Model = "small",
    command: _Command = None,
    dtype: _Dtype = "fp32",
    device: _Device = "auto",
    checkpoint: _Checkpoint = False,
    steps: _Steps = 5,
    memory: Annotated[
        str | None,
        flag("Limit of host memory for each trial, such as 2GiB. Default on a CPU: the free memory less a margin."),
    ] = None,
    max_batch: Annotated[int, flag("The largest batch size to try.")] = 4096,
    timeout: _Timeout = 3600.0,
    output: Annotated[Path, flag("Folder of the trials. A fit already in it is resumed.", "--output", "-o")] = Path(
        "flopwatch-fit"
    ),
    no_preflight: Annotated[
        bool, flag("Do not try the trainer on a tiny copy of the model first.", "--no-preflight")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Find the largest batch size that fits in memory, and the fastest one, with a few trials.

    Two small trials predict the largest batch, and trials at that size and just above it verify the prediction. Ctrl-C
    ends the search and keeps the finished trials.
    """
    given = locals()
    from flopwatch.cli import lasting_output
    from flopwatch.sweep.fit import with_host_limit
    from flopwatch.sweep.spec.names import check_names

    if max_batch < 1:
        raise InputError(f"--max-batch must be 1 or more, got {max_batch}")
    spec = _fit_spec(words or [], _flags(given | {"batch_size": 1}))
    check_names([spec], with_modules=not no_preflight)
    limited = with_host_limit(output, spec)
    with lasting_output():
        if limited.reason and not as_json:
            click.echo(limited.reason)
        found = _searched(output, limited.spec, max_batch, with_preflight=not no_preflight, quiet=as_json)
        _show_found(found, output, max_batch, as_json=as_json)
    if found.stopped or found.largest is None:
        raise SystemExit(1)


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
    """The trial that flags and settings describe. The setting `seq_len=512` overrides `--seq-len`."""
    from flopwatch.sweep.spec.parsing import parse_overrides

    return _only_spec("`flopwatch trial` runs", flags, parse_overrides(words))


def _only_spec(command_does: str, *layers: dict[str, Any]) -> "TrialSpec":
    """The trial that `layers` describe; later dicts override earlier ones. Raises InputError for several trials."""
    from flopwatch.sweep.spec.matrix import expand, layered, read_matrix

    specs = expand(read_matrix(None, layered(*layers)))
    if len(specs) > 1:
        raise InputError(
            f"{command_does} one configuration, but these settings make {len(specs)}; give each setting one value"
        )
    return specs[0]


def _from_file(file: Path, *, has_folder: bool) -> "tuple[TrialSpec, Path, str]":
    from flopwatch.decode import BrokenRecordError
    from flopwatch.files import UnreadableError, load_json
    from flopwatch.records.sweep_results import NewerFormatError, is_sweep_folder, trial_job_from
    from flopwatch.sweep.spec.parsing import check_processes

    try:
        job = trial_job_from(load_json(file))
    except (FileNotFoundError, UnreadableError, BrokenRecordError) as error:
        raise InputError(
            f"{file} is not the spec.json of a trial ({error}); name a file SWEEP/trials/NAME/spec.json"
        ) from None
    except NewerFormatError as error:
        raise InputError(f"{file} cannot be read, because {error}") from None
    check_processes(job.spec)
    folder = file.resolve().parent.parent.parent
    if not has_folder and not is_sweep_folder(folder):
        raise InputError(f"{file} is not in the folder of a sweep; name a folder for the result with --output")
    _go_to(job.cwd)
    return job.spec, folder, job.name


def _go_to(folder: str | None) -> None:
    """Change to the folder where the sweep was started, because paths in its settings are relative to that folder."""
    if folder is None:
        return
    try:
        os.chdir(folder)
    except OSError as error:
        click.echo(
            f"cannot change to the folder where the sweep was started, {folder} ({error.strerror}); running in the "
            "current folder",
            err=True,
        )


def _supervised(folder: Path, spec: "TrialSpec", name: str | None, *, quiet: bool) -> "tuple[TrialResult, str]":
    """Run the trial and wait for it; Ctrl-C ends all processes of the trial.

    Returns the result, and a message if the folder keeps an earlier, better result instead of this one.
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
        # The key of a trial is a hash of its settings and, unless it ran on a cluster, of the devices of this machine.
        # `sweep.json` tells which of the two keys this trial has.
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
            return result, f"The earlier result ({earlier.outcome}) was kept; this attempt is in {folder / place}"
        record(folder, result)
    return result, ""


def _fit_spec(words: list[str], flags: dict[str, Any]) -> "TrialSpec":
    from flopwatch.sweep.spec.parsing import parse_overrides

    # No trace is recorded, because its memory would reduce the largest batch that fits.
    return _only_spec("`flopwatch fit` tries", {"warmup_steps": 2, "trace": False}, parse_overrides(words), flags)


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
            on_probe=lambda probe: None if quiet else click.echo(probe_line(probe)),
        )


def _preflight(output: Path, plan: "Plan", *, quiet: bool) -> "Refusal":
    from flopwatch.cli.trials.sweep_screens import print_preflight
    from flopwatch.sweep.preflight import preflight_trials

    return preflight_trials(output, plan.todo, (lambda found: None) if quiet else print_preflight)


def _show_found(found: "Found", output: Path, max_batch: int, *, as_json: bool) -> None:

    from flopwatch.cli.trials.trial_screens import as_content, print_found

    if as_json:
        print_json(as_content(found, output))
        return
    print_found(found, max_batch)
    click.echo(f"flopwatch report {shlex.quote(str(output))}")
