"""`flopwatch trial` measures one configuration; `flopwatch fit` finds its largest and its fastest batch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flopwatch.records.trial import TrialResult, TrialSpec
    from flopwatch.sweep.fit import Found
    from flopwatch.sweep.runner.plan import Plan
    from flopwatch.sweep.runner.run import Refusal


def flag(text: str, *names: str, metavar: str | None = None) -> Any:
    """A flag with its help text; its name is that of the parameter unless `names` are given."""
    return typer.Option(*names, help=text, metavar=metavar)


_MORE_SETTINGS = "options.noise_multiplier=0.8 privacy.dataset_size=50000 privacy.epochs=3"
_TrialWords = Annotated[
    list[str] | None, typer.Argument(help=f"Further settings, such as {_MORE_SETTINGS}.", metavar="[KEY=VALUE]...")
]
_FitWords = Annotated[
    list[str] | None,
    typer.Argument(help="Further settings, such as warmup_steps=1 threads=4.", metavar="[KEY=VALUE]..."),
]
_Trainer = Annotated[str, flag("standard, dpsgd, ghost, fast or package.module:Class.")]
_BatchSize = Annotated[int, flag("Samples per step.")]
_SeqLen = Annotated[int, flag("Positions of each sample.")]
_Model = Annotated[str, flag("tiny, small, medium, 1b; a config.json; module:function.", "--model", "--model-size")]
_Command = Annotated[str | None, flag("A shell command as the trainer: 'python t.py --bs {batch_size}'.")]
_Dtype = Annotated[str, flag("fp32 or bf16.")]
_Device = Annotated[str, flag("cpu, cuda, ...; auto is the accelerator if there is one.")]
_Checkpoint = Annotated[bool, flag("With gradient checkpointing.", "--checkpoint")]
_Steps = Annotated[int, flag("Measured steps.")]
_Memory = Annotated[str | None, flag("Host memory the trial may use, such as 4GiB.")]
_FitMemory = Annotated[
    str | None, flag("Host memory of each trial, such as 2GiB. Default on a CPU: what is available, less a margin.")
]
_Timeout = Annotated[float, flag("Seconds a trial may take.")]
_Spec = Annotated[Path | None, flag("The spec.json of an earlier trial: run just that one again.")]
_Output = Annotated[Path | None, flag("Folder. Default: flopwatch-sweep.", "--output", "-o")]
_FitOutput = Annotated[Path, flag("Folder of the trials; an earlier fit is resumed.", "--output", "-o")]
_MaxBatch = Annotated[int, flag("Try nothing larger.")]
_NoPreflight = Annotated[bool, flag("Do not try the trainer on a tiny copy first.", "--no-preflight")]
_AsJson = Annotated[bool, flag("Print the result as JSON.", "--json")]


def trial(
    words: _TrialWords = None,
    trainer: _Trainer = "standard",
    batch_size: _BatchSize = 4,
    seq_len: _SeqLen = 512,
    model: _Model = "small",
    command: _Command = None,
    dtype: _Dtype = "fp32",
    device: _Device = "auto",
    checkpoint: _Checkpoint = False,
    steps: _Steps = 10,
    memory: _Memory = None,
    timeout: _Timeout = 3600.0,
    spec: _Spec = None,
    output: _Output = None,
    as_json: _AsJson = False,
) -> None:
    """Measure one configuration in a separate process: time, memory, FLOPs, MFU, and how it ended."""
    given = locals()  # typer needs every flag in the signature; passing each on by name would double it
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
        _show_result(result, as_json=as_json)
        if note:
            typer.echo(note, err=True)
    if result.outcome != "ok":
        raise typer.Exit(1)


def fit(
    words: _FitWords = None,
    trainer: _Trainer = "standard",
    seq_len: _SeqLen = 512,
    model: _Model = "small",
    command: _Command = None,
    dtype: _Dtype = "fp32",
    device: _Device = "auto",
    checkpoint: _Checkpoint = False,
    steps: _Steps = 5,
    memory: _FitMemory = None,
    max_batch: _MaxBatch = 4096,
    timeout: _Timeout = 3600.0,
    output: _FitOutput = Path("flopwatch-fit"),
    no_preflight: _NoPreflight = False,
    as_json: _AsJson = False,
) -> None:
    """Find the largest batch that fits in memory and the fastest one, in a handful of trials.

    Two small trials predict the limit, and trials on both sides of it verify it. Ctrl-C ends the search; finished
    trials are kept.
    """
    given = locals()
    from flopwatch.cli import lasting_output
    from flopwatch.errors import InputError
    from flopwatch.sweep.fit import with_host_limit
    from flopwatch.sweep.spec.names import check_names

    if max_batch < 1:
        raise InputError(f"--max-batch must be 1 or more, got {max_batch}")
    spec = _fit_spec(words or [], _flags(given | {"batch_size": 1}))
    check_names([spec], with_modules=not no_preflight)
    limited = with_host_limit(output, spec)
    with lasting_output():
        if limited.reason and not as_json:
            typer.echo(limited.reason)
        found = _searched(output, limited.spec, max_batch, with_preflight=not no_preflight, quiet=as_json)
        _show_found(found, output, max_batch, as_json=as_json)
    if found.stopped or found.largest is None:
        raise typer.Exit(1)


def _show_result(result: "TrialResult", *, as_json: bool) -> None:
    if as_json:
        import json

        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        from flopwatch.cli.trials.trial_screens import print_result

        print_result(result)


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
    """The one configuration that flags and settings make; a setting wins over the flag of the same meaning."""
    from flopwatch.sweep.spec.parsing import parse_overrides

    return _only_spec("a trial is", flags, parse_overrides(words))


def _only_spec(of_what: str, *layers: dict[str, Any]) -> "TrialSpec":
    """The configuration that the layers make, later ones over earlier ones; an error if they make several."""
    from flopwatch.errors import InputError
    from flopwatch.sweep.spec.matrix import expand, layered, read_matrix

    specs = expand(read_matrix(None, layered(*layers)))
    if len(specs) > 1:
        raise InputError(f"{of_what} one configuration, and these settings make {len(specs)}; give one value of each")
    return specs[0]


def _from_file(file: Path, *, has_folder: bool) -> "tuple[TrialSpec, Path, str]":
    from flopwatch.errors import InputError
    from flopwatch.records.reading import BrokenRecordError, UnreadableError, load_json
    from flopwatch.records.sweep_results import NewerFormatError, is_sweep_folder, trial_job_from
    from flopwatch.sweep.spec.parsing import check_processes

    try:
        job = trial_job_from(load_json(file))
    except (FileNotFoundError, UnreadableError, BrokenRecordError) as error:
        raise InputError(
            f"{file} is not the spec.json of a trial ({error}); a trial's is in SWEEP/trials/NAME/"
        ) from None
    except NewerFormatError as error:
        raise InputError(f"{file} is of {error}; update flopwatch") from None
    check_processes(job.spec)
    folder = file.resolve().parent.parent.parent
    if not has_folder and not is_sweep_folder(folder):
        raise InputError(f"{file} is not in SWEEP/trials/NAME/; name a folder for the result with --output")
    _go_to(job.cwd)
    return job.spec, folder, job.name


def _go_to(folder: str | None) -> None:
    """Change to the folder the sweep was started in: names of trainers, configs and scripts are relative to it."""
    import os

    if folder is None:
        return
    try:
        os.chdir(folder)
    except OSError as error:
        typer.echo(
            f"cannot change to {folder}, where the sweep was started ({error.strerror}); running from here", err=True
        )


def _supervised(folder: Path, spec: "TrialSpec", name: str | None, *, quiet: bool) -> "tuple[TrialResult, str]":
    """Run the trial under a supervisor in this process, so that Ctrl-C ends the trial with all its processes.

    Returns the result, and a note if an earlier, better result was kept instead of it.
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
        # A trial that ran on a cluster has a key without this host's devices; keep the key that the sweep lists.
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

    # Without a trace, because recording one needs memory too.
    return _only_spec("a fit is of", {"warmup_steps": 2, "trace": False}, parse_overrides(words), flags)


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
    from flopwatch.sweep.preflight import preflight_trials

    return preflight_trials(output, plan.todo, (lambda found: None) if quiet else print_preflight)


def _show_found(found: "Found", output: Path, max_batch: int, *, as_json: bool) -> None:
    import json
    import shlex

    from flopwatch.cli.trials.trial_screens import as_content, print_found

    if as_json:
        typer.echo(json.dumps(as_content(found, output), indent=2))
        return
    print_found(found, max_batch)
    typer.echo(f"flopwatch report {shlex.quote(str(output))}")
