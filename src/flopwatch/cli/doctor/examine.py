"""Runs `flopwatch doctor` and `flopwatch doctor --gpu`: looks, checks, and prints what was found. Loads torch."""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from flopwatch.cli import STANDARD_OUTPUT, print_json, say
from flopwatch.cli.doctor import gpu_file, machine
from flopwatch.cli.doctor.accelerator import Accelerator, TorchAccelerator
from flopwatch.cli.doctor.checks import CHECKS
from flopwatch.cli.doctor.document import Examined, examined_document, gpu_document
from flopwatch.cli.doctor.extras import Imports, find_extras
from flopwatch.cli.doctor.findings import CheckResult, run_check
from flopwatch.cli.doctor.gpu_checks import CHECKS as GPU_CHECKS
from flopwatch.cli.doctor.gpu_checks import run_all
from flopwatch.cli.doctor.problems import find_problems, here
from flopwatch.errors import InputError
from flopwatch.present.terminal import print_document


def examine() -> Examined:
    with _one_thread():
        checks = [run_check(name, check) for name, check in CHECKS.items()]
    imports = Imports()  # after the checks, one of which measures times
    return Examined(
        machine.versions(),
        machine.limits(),
        machine.devices(),
        machine.counters(),
        find_extras(imports),
        machine.programs(),
        find_problems(here()),
        checks,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads that share a tiny model wait for each other most of the time, even more beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def show_machine(*, as_json: bool) -> int:
    """Print what `flopwatch doctor` finds; returns its exit status."""
    found = examine()
    if as_json:
        print_json({"failures": found.failures, **asdict(found)})
    else:
        print_document(examined_document(found))
    return int(bool(found.failures))


def show_gpu(output: str, *, as_json: bool, accelerator: Accelerator | None = None) -> int:
    """Run the checks of an accelerator, write their file and print them; returns the exit status."""
    used = TorchAccelerator() if accelerator is None else accelerator
    if output == STANDARD_OUTPUT or not Path(output).expanduser().absolute().parent.is_dir():
        raise InputError(f"cannot write {output!r}; name a file in a folder that exists, or print with --json")
    versions, results, found = machine.versions(), list[CheckResult](), dict[str, Any]()
    try:
        with _progress(len(GPU_CHECKS)) as tell:
            for result in run_all(used, tell):
                results.append(result)
                # After each check, so that the others are not lost if the device hangs.
                found = gpu_file.content(versions, results, is_complete=len(results) == len(GPU_CHECKS))
                gpu_file.write(output, found)
    except KeyboardInterrupt:
        say(f"Stopped after {len(results)} of {len(GPU_CHECKS)} checks; what they found is in {output}", err=True)
        raise click.Abort from None
    if as_json:
        print_json(found)
    else:
        print_document(gpu_document(used.facts.name, results, output, gpu_file.ISSUES))
    return int(any(result.outcome == "failed" for result in results))


@contextmanager
def _progress(count: int) -> Iterator[Callable[[str], None]]:
    """Show on a terminal which check runs. The result is called with the name of each check before it."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=count)
        begun = itertools.count()
        yield lambda name: progress.update(task, completed=next(begun), description=name)
