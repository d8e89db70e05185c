"""What `flopwatch trial` and `flopwatch fit` do: run trials in processes of their own, and print what was measured."""

import contextlib
import os
import shlex
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from flopwatch.cli import print_json, say
from flopwatch.cli.streams import lasting_output
from flopwatch.cli.trials.sweep_screens import outcome_cell
from flopwatch.decode import BrokenRecordError
from flopwatch.errors import InputError
from flopwatch.files import UnreadableError, load_json
from flopwatch.numbers import UNKNOWN, byte_size, count, duration, number, percent, step_time
from flopwatch.present import document as doc
from flopwatch.present.terminal import print_document
from flopwatch.records.sweep_results import NewerFormatError, is_sweep_folder, read_current, read_trial_list
from flopwatch.records.trial import TrialJob, TrialResult, TrialSpec, content_key
from flopwatch.records.trial_files import log_file
from flopwatch.report.cells import epsilon_text
from flopwatch.report.problems import above_peak
from flopwatch.sweep.fit import Found, Probe, fit_batch, with_host_limit
from flopwatch.sweep.folder import Trial, has_begun, held_folder, prepare, put_aside, record, write_trial_list
from flopwatch.sweep.host.environment import fingerprint
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import STOPPED, check_unchanged
from flopwatch.sweep.spec.matrix import expand, layered, read_matrix
from flopwatch.sweep.spec.names import check_names, trial_names
from flopwatch.sweep.spec.parsing import FLAGS, check_processes, settings_without_flags
from flopwatch.sweep.supervisor.supervise import supervise
from flopwatch.text import one_line

_TRIAL = {"batch_size": 4, "seq_len": 512}
_FIT = {"seq_len": 512, "steps": 5, "warmup_steps": 2, "trace": False}
"""A fit records no trace, because its memory would reduce the largest batch that fits."""


def run_trial(words: list[str] | None, spec: Path | None, output: Path | None, as_json: bool, **given: Any) -> None:
    if spec is not None:
        output = output and output.resolve()
        asked, folder, name = _from_file(spec, has_folder=output is not None)
    else:
        asked = _only_spec("`flopwatch trial` runs", _TRIAL, settings_without_flags(words or []), _flags(given))
        folder, name = Path("flopwatch-sweep"), None
    check_names([asked])
    with lasting_output():
        result = _supervised(output or folder, asked, name, quiet=as_json)
        if as_json:
            print_json(result.to_json())
        else:
            print_result(result)
    if result.outcome != "ok":
        raise SystemExit(STOPPED if result.outcome == "cancelled" else 1)


def run_fit(words: list[str] | None, output: Path, max_batch: int, as_json: bool, **given: Any) -> None:
    if max_batch < 1:
        raise InputError(f"--max-batch must be 1 or more, got {max_batch}")
    settings = settings_without_flags(words or [])
    spec = _only_spec("`flopwatch fit` tries", _FIT, settings, _flags(given), {"batch_size": 1})
    check_names([spec])
    spec, reason = with_host_limit(output, spec)
    with lasting_output():
        if reason and not as_json:
            say(reason)
        stop = Stop()
        with _ended_by_signals(stop):
            found = fit_batch(
                output,
                spec,
                stop=stop,
                max_batch=max_batch,
                on_probe=lambda probe: None if as_json else say(probe_line(probe)),
            )
        if as_json:
            print_json({**asdict(found), "folder": str(output)})
        else:
            print_found(found, max_batch)
            click.echo(f"flopwatch report {shlex.quote(str(output))}")
    if stop.kill:
        raise SystemExit(STOPPED)
    if found.stopped or found.largest is None:
        raise SystemExit(1)


def _flags(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in FLAGS if given.get(name) is not None}


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
            say(f"{said}; running in the current folder", err=True)
    return job.spec, folder, job.name


def _supervised(folder: Path, spec: TrialSpec, name: str | None, *, quiet: bool) -> TrialResult:
    """Run the trial and wait for it; Ctrl-C ends all processes of the trial. An earlier attempt moves to `earlier/`."""
    name = name or trial_names([spec])[0]
    with held_folder(folder):
        # The key of a trial is a hash of its settings and, unless it ran on a cluster, of the devices of this machine.
        # `sweep.json` tells which of the two keys this trial has.
        here, anywhere = (content_key(spec, fingerprint(spec, is_here=is_here)) for is_here in (True, False))
        known = read_trial_list(folder)
        listed = known.trials.get(name, {}).get("key")
        placed = Trial(folder, name, anywhere if listed == anywhere else here, spec)
        check_unchanged(folder, [placed], known)
        if has_begun(folder, name):
            put_aside(folder, name)
        prepare(placed)
        write_trial_list(folder, [placed], "trial")
        if not quiet:
            say(f"{one_line(name)}: its log is {one_line(str(log_file(folder, name)))}", err=True)
        with _ended_by_signals(Stop()) as asked:
            result = supervise(folder, name, cancel=lambda: asked[0] if asked else None)
        record(folder, result)
    return result


@contextlib.contextmanager
def _ended_by_signals(stop: Stop) -> Iterator[list[str]]:
    """Let SIGINT, SIGTERM and SIGHUP end the running trials; each adds its reason to the list."""
    words = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
    asked: list[str] = []

    def note(number: int, frame: object) -> None:
        asked.append(f"stopped by {words[signal.Signals(number)]}")
        stop.kill = True

    before = {number: signal.signal(number, note) for number in words}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_result(result: TrialResult, console: Console | None = None) -> None:
    """Print the measurements of a trial; if it failed, also the reason, its threads' stacks and the end of its log."""
    has_failed = result.outcome != "ok"
    blocks = [doc.Verbatim(text, most_lines=1000) for text in (result.stacks, result.log_tail) if text and has_failed]
    again = [doc.Text(f"run again: {result.command}", "command")] if has_failed else []
    reason = f"({one_line(result.reason, 1000)})" if has_failed else ""
    lead = [doc.Cell(result.name), outcome_cell(result.outcome)]
    section = doc.Section(reason, [doc.Facts(_rows(result)), *blocks, *again], lead=lead)
    print_document(doc.Document("", [section]), console)


def _rows(result: TrialResult) -> list[tuple[str, str]]:
    measured, cost = result.measured, result.measured.cost
    rows = [("model", f"{result.spec.model}, {count(measured.parameters)} parameters" if measured.parameters else "")]
    if times := measured.steps:
        unstable = ", unstable" if times.unstable else ""
        interval = f"{step_time(times.low, digits=4)} to {step_time(times.high, digits=4)}"
        median = step_time(times.median, digits=4)
        rows.append(("step time", f"{median} (median of {times.count}; {interval}{unstable})"))
    by_phase = [f"{phase} {byte_size(size)}" for phase, size in measured.memory.by_phase.items()]
    rows += [
        ("samples/s", number(measured.samples_per_s, digits=4) if measured.samples_per_s else ""),
        ("tokens/s", number(measured.tokens_per_s, digits=4) if measured.tokens_per_s else ""),
        ("memory", byte_size(measured.memory.peak_bytes) if measured.memory.peak_bytes else ""),
        ("by phase", ", ".join(by_phase)),
    ]
    if cost is not None and cost.model_flops is not None:
        rows.append(("model FLOPs", f"{cost.model_flops:,}"))
        rows.append(("hardware FLOPs", f"{cost.hardware_flops:,}" if cost.hardware_flops is not None else ""))
    if cost is not None and cost.mfu is not None:
        hfu = f", HFU {percent(cost.hfu)}" if cost.hfu is not None else ""
        peak = f" of the {cost.peak['kind']} peak" if cost.peak else ""
        rows.append(("MFU", f"{percent(cost.mfu)}{hfu}{peak}"))
        rows += [("warning", above[1])] if (above := above_peak(cost)) else []
    if (spent := measured.privacy) is not None:
        noise = UNKNOWN if spent.noise_multiplier is None else f"{spent.noise_multiplier:.4g}"
        training = f"{spent.steps:,} steps at sampling rate {spent.sample_rate:.4g}, noise {noise}"
        known = f"{epsilon_text(spent.epsilon)} at delta {spent.delta:.3g} for {training}, by {spent.accountant}"
        rows.append(("epsilon", "; ".join(filter(None, [known, spent.note]))))
    rows += [("not measured", f"{phase}: {why}") for phase, why in measured.not_measured.items()]
    if result.seconds is not None:
        rows.append(("took", duration(result.seconds)))
    return [row for row in rows if row[1]]


def probe_line(probe: Probe) -> str:
    """The result of the trial with one batch size, in one line.

    >>> probe_line(Probe(8, True, "ok", "", 512 << 20, samples_per_s=102.34))
    'batch 8: ok, 512 MiB, 102 samples/s'
    """
    if probe.fits is None:
        return one_line(f"batch {probe.batch_size}: {probe.outcome}: {probe.reason}", 1000)
    parts = [f"batch {probe.batch_size}: {probe.outcome}{', barely fits' if probe.is_bare else ''}"]
    if probe.fits and probe.peak_bytes is not None:
        parts.append(byte_size(probe.peak_bytes))
    if probe.samples_per_s is not None and probe.fits:
        parts.append(f"{number(probe.samples_per_s)} samples/s")
    return ", ".join(parts)


def print_found(found: Found, max_batch: int, console: Console | None = None) -> None:
    columns: tuple[doc.Head | str, ...] = (*doc.english_numbers("batch", "memory", "step time", "samples/s"), "outcome")
    rows = []
    for probe in sorted(found.probes, key=lambda probe: probe.batch_size):
        memory = byte_size(probe.peak_bytes) if probe.peak_bytes is not None and probe.fits else ""
        took = step_time(probe.step_seconds) if probe.step_seconds is not None and probe.fits else ""
        rate = number(probe.samples_per_s) if probe.samples_per_s is not None and probe.fits else ""
        outcome = outcome_cell(probe.outcome, "(barely fits)" if probe.is_bare else "")
        rows.append((str(probe.batch_size), memory, took, rate, outcome))
    said = [doc.Text(one_line(sentence, 1000)) for sentence in sentences(found, max_batch)]
    print_document(doc.Document("", [doc.Grid(columns, rows), *said]), console)


def sentences(found: Found, max_batch: int) -> list[str]:
    said = [f"The search stopped at {found.stopped}."] if found.stopped else []
    if found.largest is None:
        no_batch = [f"No batch fits: even a batch of 1 runs out of memory{_limit(found)}."]
        return [*said, *(no_batch if found.too_large == 1 else [])]
    said.append(_largest(found, max_batch))
    rate = next((probe.samples_per_s for probe in found.probes if probe.batch_size == found.fastest), None)
    if rate is not None:
        same = f" ({found.as_fast} is not measurably faster)" if found.as_fast is not None else ""
        said.append(f"Fastest: {found.fastest}, {number(rate)} samples/s{same}.")
    return said


def _largest(found: Found, max_batch: int) -> str:
    barely = next((", barely" for probe in found.probes if probe.batch_size == found.largest and probe.is_bare), "")
    if not found.is_largest_known:
        beyond = f"; {found.too_large} does not" if found.too_large is not None else ""
        return f"Largest batch seen to fit{barely}: {found.largest}{beyond}. The search is not finished."
    if found.too_large is None:
        return f"No limit found up to {max_batch}: a batch of {found.largest} fits{barely}."
    return f"Largest batch that fits{barely}: {found.largest} ({found.too_large} does not{_limit(found, '; ')})."


def _limit(found: Found, before: str = ": ") -> str:
    """The memory limit as text; empty if unknown, for example if no trial fitted on an accelerator."""
    known = [probe.capacity_bytes for probe in found.probes if probe.capacity_bytes is not None]
    on_device = any(probe.outcome == "oom_device" for probe in found.probes)
    return f"{before}{byte_size(known[0])} {'of the device' if on_device else 'limit'}" if known else ""
