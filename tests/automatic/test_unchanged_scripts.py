"""Eighteen training scripts run as they are, with `flopwatch run`, and with a monitor written in.

With and without `flopwatch run` they print the same: losses, a hash of the parameters, the number of compiled graphs.
Each step under `flopwatch run` has the FLOPs, tokens and samples that the written-in monitor measures, or a notice
says why not. `python benchmarks/pages/run_table.py` writes the results as a table to docs/run.md.

The processes are forks of one that has imported torch. With FLOPWATCH_LONG=1, each script is also
started in new processes, with torchrun where it needs ranks.
"""

import subprocess
import sys
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from support.torchrun import outputs_of_ranks
from support.warm_python import TORCH, TRANSFORMERS, start_warm
from testbeds.unchanged.outcomes import run
from testbeds.unchanged.scripts import SCRIPTS

pytestmark = pytest.mark.slow

AS_A_COMMAND = "from flopwatch.cli import main; main()"
has_entry_point = "flopwatch" in entry_points(group="lightning.pytorch.callbacks_factory").names


def start_fork(command, ranks, modules):
    code, arguments = (AS_A_COMMAND, command[2:]) if command[0] == "-m" else (Path(command[0]), command[1:])
    if ranks > 1:
        return "".join(outputs_of_ranks(code, *arguments, ranks=ranks))
    process = start_warm(code, *arguments, modules=modules)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def start_new(command, ranks):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *torchrun, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def each_script_in_forks_and_new_processes():
    for script in SCRIPTS:
        skipped = script.name == "lightning_module" and not has_entry_point
        reason = "the installed flopwatch has no entry point for Lightning; install it again"
        marks = [pytest.mark.skipif(skipped, reason=reason)]
        forks = partial(start_fork, modules=TRANSFORMERS if "frameworks" in script.path else TORCH)
        yield pytest.param((script, forks), id=script.name, marks=marks)
        yield pytest.param((script, start_new), id=f"{script.name} new", marks=[*marks, pytest.mark.campaign])


@pytest.fixture(scope="module", params=each_script_in_forks_and_new_processes())
def runs(request, tmp_path_factory):
    """The script, and a function that runs it in one of the three ways, once for all tests of this file."""
    script, start = request.param
    done = {}

    def run_once(way):
        if way not in done:
            done[way] = run(script, way, tmp_path_factory.mktemp(script.name), start)
        return done[way]

    return script, run_once


def test_output_parameters_and_graphs_are_those_of_a_run_without_flopwatch(runs):
    _, run_once = runs
    assert run_once("flopwatch run").printed == run_once("python").printed
    assert "parameters" in run_once("python").printed


def known(values):
    """A row has a column, such as that of the loss, if one of its steps has a value, and slow runs have more rows."""
    return {name: value for name, value in values.items() if value is not None}


def test_each_step_has_the_values_of_a_written_in_monitor_or_a_notice_says_why_not(runs):
    script, run_once = runs
    seen = run_once("flopwatch run")
    if not script.edits:
        assert seen.steps is None  # the script's own monitor measures it, and nothing else does
        return
    expected = run_once("written in").steps
    assert sorted(seen.steps) == [number for number in sorted(expected) if number not in script.not_measured]
    for number, values in seen.steps.items():
        lacking = {*script.lacks, *(script.lacks_first if number == 0 else ())}
        wanted = {name: value for name, value in expected[number].items() if name not in lacking}
        assert known(values) == known(wanted), number
    assert ("first_step" in seen.notices) == (0 in script.not_measured)
    of_both = {*run_once("written in").notices, "first_step", "input_wait_unknown", script.notice}
    of_both |= {"stalled", "time_outside_steps"}  # on a busy machine
    assert set(seen.notices) <= of_both
    if script.notice is not None:
        assert script.notice in seen.notices


def test_rows_are_exact_where_those_of_a_written_in_monitor_are(runs):
    script, run_once = runs
    if script.edits and run_once("written in").is_exact:
        assert run_once("flopwatch run").is_exact
