"""What `flopwatch trial` and `flopwatch fit` do: run trials in processes of their own, and print what was measured."""

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from flopwatch.cli import print_json
from flopwatch.cli.streams import lasting_output
from flopwatch.cli.trials.sweep_screens import print_preflight
from flopwatch.cli.trials.trial_screens import (
    phases_shown,
    print_found,
    print_result,
    probe_line,
)
from flopwatch.decode import BrokenRecordError
from flopwatch.errors import InputError
from flopwatch.files import UnreadableError, load_json
from flopwatch.records.sweep_results import (
    NewerFormatError,
    is_sweep_folder,
    read_current,
    read_result,
    read_trial_list,
)
from flopwatch.records.trial import TrialJob, TrialResult, TrialSpec, content_key
from flopwatch.sweep.attempts import is_worse, put_aside, put_back
from flopwatch.sweep.fit import Found, fit_batch, with_host_limit
from flopwatch.sweep.folder import Trial, has_begun, held_folder, prepare, record, result_file, write_trial_list
from flopwatch.sweep.host.environment import fingerprint
from flopwatch.sweep.preflight import preflight_trials
from flopwatch.sweep.runner.plan import Plan
from flopwatch.sweep.runner.run import Refusal
from flopwatch.sweep.spec.matrix import expand, layered, read_matrix
from flopwatch.sweep.spec.names import check_names, trial_names
from flopwatch.sweep.spec.parsing import check_processes, parse_overrides
from flopwatch.sweep.supervisor.supervise import supervise


def run_trial(words: list[str] | None, spec: Path | None, output: Path | None, as_json: bool, **given: Any) -> None:
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
            print_result(result)
        if note:
            click.echo(note, err=True)
    if result.outcome != "ok":
        raise SystemExit(1)


def run_fit(words: list[str] | None, output: Path, max_batch: int, as_json: bool, **given: Any) -> None:
    if max_batch < 1:
        raise InputError(f"--max-batch must be 1 or more, got {max_batch}")
    # No trace is recorded, because its memory would reduce the largest batch that fits.
    beneath = {"warmup_steps": 2, "trace": False}
    spec = _only_spec("`flopwatch fit` tries", beneath, parse_overrides(words or []), _flags(given | {"batch_size": 1}))
    check_names([spec], with_modules=not given["no_preflight"])
    spec, reason = with_host_limit(output, spec)
    with lasting_output():
        if reason and not as_json:
            click.echo(reason)
        found = _searched(output, spec, max_batch, with_preflight=not given["no_preflight"], quiet=as_json)
        if as_json:
            print_json({**asdict(found), "folder": str(output)})
        else:
            print_found(found, max_batch)
            click.echo(f"flopwatch report {shlex.quote(str(output))}")
    if found.stopped or found.largest is None:
        raise SystemExit(1)


def _flags(given: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: [given[name]] for name in ("batch_size", "seq_len", "model", "dtype")},
        **{name: given[name] for name in ("device", "steps")},
        "trainers": [{"command": given["command"]} if given["command"] else given["trainer"]],
        "checkpointing": [given["checkpoint"]],
        "limits": {"wall_seconds": given["timeout"], **({"memory": given["memory"]} if given["memory"] else {})},
    }


def asked_for(words: list[str], flags: dict[str, Any]) -> TrialSpec:
    """The trial that flags and settings describe. The setting `seq_len=512` overrides `--seq-len`."""
    return _only_spec("`flopwatch trial` runs", flags, parse_overrides(words))


def _only_spec(command_does: str, *layers: dict[str, Any]) -> TrialSpec:
    """The trial that `layers` describe; later dicts override earlier ones. Raises InputError for several trials."""
    specs = expand(read_matrix(None, layered(*layers)))
    if len(specs) > 1:
        raise InputError(
            f"{command_does} one configuration, but these settings make {len(specs)}; give each setting one value"
        )
    return specs[0]


def _from_file(file: Path, *, has_folder: bool) -> tuple[TrialSpec, Path, str]:
    try:
        job = read_current(TrialJob, load_json(file))
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
    if job.cwd is not None:
        try:
            os.chdir(job.cwd)  # paths in the settings of a sweep are relative to the folder where it was started
        except OSError as error:
            said = f"cannot change to the folder where the sweep was started, {job.cwd} ({error.strerror})"
            click.echo(f"{said}; running in the current folder", err=True)
    return job.spec, folder, job.name


def _supervised(folder: Path, spec: TrialSpec, name: str | None, *, quiet: bool) -> tuple[TrialResult, str]:
    """Run the trial and wait for it; Ctrl-C ends all processes of the trial.

    Returns the result, and a message if the folder keeps an earlier, better result instead of this one.
    """
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
        with phases_shown(lambda trial: trial.name, quiet=quiet) as status:
            status.started(placed)
            result = supervise(folder, name, cancel=lambda: status.why_stopped(placed))
        if earlier is not None and is_worse(result, earlier):
            place = put_back(folder, name, aside)
            return result, f"The earlier result ({earlier.outcome}) was kept; this attempt is in {folder / place}"
        record(folder, result)
    return result, ""


def _searched(output: Path, spec: TrialSpec, max_batch: int, *, with_preflight: bool, quiet: bool) -> Found:
    def preflight(plan: Plan) -> Refusal:
        return preflight_trials(output, plan.todo, (lambda found: None) if quiet else print_preflight)

    with phases_shown(lambda trial: f"batch {trial.spec.batch_size}", quiet=quiet) as status:
        return fit_batch(
            output,
            spec,
            status,
            stop=status.stop,
            max_batch=max_batch,
            preflight=preflight if with_preflight else None,
            on_probe=lambda probe: None if quiet else click.echo(probe_line(probe)),
        )
