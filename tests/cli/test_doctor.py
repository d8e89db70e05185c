"""`flopwatch doctor`: what is there is named with its version, what is missing with the command that brings it."""

import json
import os
import re
import stat
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flopwatch.cli.doctor import checks, document, examine, extras, machine, problems
from flopwatch.cli.doctor.extras import EXTRAS, Extra, Imports, part_of
from flopwatch.cli.doctor.findings import NotPossibleError, run_check
from flopwatch.cli.doctor.problems import Around, find_problems
from flopwatch.testing import FakeClock, FakeCounters, fake_device
from support.fakes import fake_torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch):
    """Leaves out what takes seconds: trainings, and the import of extras."""
    monkeypatch.setattr(examine, "CHECKS", {"FLOPs of a known layer": checks.count_of_a_layer})
    monkeypatch.setattr(extras, "_is_complete", lambda extra: False)


# --- The whole command ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.requirement("R8")
def test_all_checks_pass_here_and_versions_are_those_of_the_packages():
    done = subprocess.run(
        [sys.executable, "-m", "flopwatch", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [check["outcome"] for check in found["checks"]] == ["passed"] * 3
    assert found["versions"]["torch"] == torch.__version__
    said = {extra["name"]: extra for extra in found["extras"]}
    assert said["wandb"]["said"] == version("wandb")
    assert f"trl {version('trl')}" in said["hf"]["said"]


def test_the_former_word_for_it_still_runs_it(flopwatch, quick):
    status, out, _ = flopwatch("selftest")
    assert status == 0
    assert "Everything that is installed works." in out


def test_every_section_fits_into_80_columns(flopwatch, quick, monkeypatch):
    monkeypatch.setattr(extras, "version", no_package)
    _, out, _ = flopwatch("doctor")
    assert [line for line in out.splitlines() if len(line) > 80] == []
    headings = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert headings == ["Versions", "Devices", "Hardware counters", "Extras", "Programs", "Checks"]


def test_a_wrong_count_is_found(flopwatch, quick, monkeypatch):
    wrong = SimpleNamespace(model_flops=1)
    monkeypatch.setattr(checks, "count_flops", lambda *_, **__: wrong)
    status, out, _ = flopwatch("doctor")
    assert status == 1
    assert "FAIL  FLOPs of a known layer  1 counted, 65,536 by hand" in out
    assert "1 part of this installation failed: FLOPs of a known layer" in out


def test_json_has_all_that_is_shown_and_the_status_is_the_same(flopwatch, quick, monkeypatch):
    monkeypatch.setattr(checks, "count_flops", lambda *_, **__: SimpleNamespace(model_flops=1))
    status, out, _ = flopwatch("doctor", "--json")
    found = json.loads(out)
    assert status == 1
    assert found["failures"] == ["FLOPs of a known layer"]
    assert found["checks"][0]["figures"] == {"counted_flops": 1, "expected_flops": 65536}
    assert {extra["name"] for extra in found["extras"]} == {extra.name for extra in EXTRAS}
    assert found["devices"][-1]["facts"]["kind"] == "cpu"


# --- Checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "outcome", "said"),
    [
        (RuntimeError("no kernel image\nis available"), "failed", "RuntimeError: no kernel image"),
        (NotPossibleError("there is one device"), "not possible", "there is one device"),
    ],
)
def test_whatever_a_check_raises_is_its_result(raised, outcome, said):
    def check():
        clock.advance(2.0)
        raise raised

    clock = FakeClock()
    result = run_check("a check", check, clock)
    assert (result.outcome, result.said, result.seconds) == (outcome, said, 2.0)


@pytest.mark.slow
def test_a_monitor_that_changes_the_training_is_found(monkeypatch):
    train = checks.train

    def changing(device, monitor=None):
        model, *others = train(device, monitor)
        if monitor is not None:
            next(model.parameters()).data[0, 0] += 1e-7
        return model, *others

    monkeypatch.setattr(checks, "train", changing)
    found = checks.monitored_training()
    assert (found.outcome, found.figures["bitwise_equal"]) == ("failed", False)


def test_a_dear_monitor_is_found(monkeypatch):
    monkeypatch.setattr(checks, "train", lambda *_: (None, [0.010, 0.010, 0.5], [0.0006, 0.0006, 0.3]))
    assert checks.cost_of_monitoring().outcome == "failed"
    monkeypatch.setattr(checks, "train", lambda *_: (None, [0.010, 0.010, 0.5], [0.0004, 0.0004, 0.3]))
    assert checks.cost_of_monitoring().outcome == "passed"


# --- Extras -----------------------------------------------------------------------------------------------------------


def no_package(name):
    raise PackageNotFoundError(name)


def test_the_extras_are_those_of_the_package_with_its_lowest_versions():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    lines = dict(re.findall(r"^(\w+) = \[(.*?)\]", table, re.MULTILINE))
    declared = {name: dict(re.findall(r'"([\w-]+)>=([\d.]+)"', line)) for name, line in lines.items() if name != "all"}
    known = {extra.name: {names.partition("|")[0]: lowest for names, lowest in extra.packages} for extra in EXTRAS}
    assert known == declared


def test_each_missing_extra_is_named_with_the_command_that_brings_it(flopwatch, quick, monkeypatch):
    monkeypatch.setattr(extras, "version", no_package)
    status, out, _ = flopwatch("doctor")
    assert status == 0
    for extra in EXTRAS:
        assert re.search(rf'absent +{extra.name} +pip install "flopwatch\[{extra.name}\]" ', out), extra.name


@pytest.mark.parametrize(
    ("found", "lowest", "older"),
    [("0.30.9", "0.31", True), ("0.31", "0.31", False), ("2.10.0", "2.9", False), ("1.6.0+cu12", "1.6", False)],
)
def test_versions_are_compared_by_their_numbers(found, lowest, older):
    assert extras.is_older(found, lowest) == older


def test_an_extra_that_is_too_old_is_a_failure_with_the_command_that_updates_it(flopwatch, quick, monkeypatch):
    monkeypatch.setattr(extras, "version", lambda name: "0.1" if name == "wandb" else no_package(name))
    status, out, _ = flopwatch("doctor")
    assert status == 1
    assert "wandb 0.1 is older than 0.31" in out
    assert 'pip install --upgrade "flopwatch[wandb]"' in out


def test_an_extra_of_which_a_package_is_missing_says_which(monkeypatch):
    monkeypatch.setattr(extras, "version", lambda name: no_package(name) if name == "trl" else "99.0")
    hf = next(extra for extra in EXTRAS if extra.name == "hf")
    part = part_of(hf, Imports(()))
    assert (part.state, part.command) == ("missing", 'pip install "flopwatch[hf]"')
    assert part.said.endswith("not installed: trl")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('libfoo.so.3: cannot open shared object file')", "libfoo.so.3: cannot open"),
        ("print('a banner')\nraise SystemExit(3)", "SystemExit: 3"),
        ("import os\nos.kill(os.getpid(), 11)", "importing it ended the process by signal 11"),
        ("print('a banner without an end', end='')", None),
    ],
)
def test_an_extra_that_cannot_be_imported_is_found(code, said, tmp_path, monkeypatch):
    (tmp_path / "broken_extra.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    extra = Extra("x", (("pytest", "1.0"),), ("broken_extra",), "sink")
    part = part_of(extra, Imports((extra,)))
    assert part.state == ("there" if said is None else "broken")
    assert (said or version("pytest")) in part.said


@pytest.mark.parametrize(
    ("code", "state", "said"),
    [
        ("import time\ntime.sleep(600)", "unusable", "it is not known whether it works"),
        ("import os\nos._exit(0)", "broken", "importing it ended the process with status 0"),
        ("print('no end of the line', end='')\nraise ImportError('no')", "broken", "ImportError: no"),
        # A server that the import starts and that keeps the output open.
        ("import subprocess\nsubprocess.Popen(['sleep', '5'])", "there", version("pytest")),
        ("input()", "broken", "EOFError"),
    ],
)
def test_an_extra_whose_import_hangs_or_ends_the_process_is_told_and_not_waited_for(
    code, state, said, tmp_path, monkeypatch
):
    (tmp_path / "strange_extra.py").write_text(code)
    (tmp_path / "later_extra.py").write_text("raise ImportError('later')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    strange, later = (Extra(name, (("pytest", "1.0"),), (f"{name}_extra",), "sink") for name in ("strange", "later"))
    seconds = 0.5 if "sleep(600)" in code else 60.0
    imports = Imports((strange, later), seconds=seconds)
    began = time.monotonic()
    part = part_of(strange, imports)
    assert (part.state, said in part.said) == (state, True), part
    assert time.monotonic() - began < 5
    if seconds > 1:
        assert part_of(later, imports).said == "cannot be imported: ImportError: later"


# --- The machine ------------------------------------------------------------------------------------------------------


def machine_with(count, facts):
    found = fake_torch(facts)
    found.accelerator.device_count = lambda: count
    return found


def test_equal_devices_are_shown_once_with_their_peaks(capsys):
    devices = machine.devices(machine_with(8, fake_device("h100")))
    assert [(device.facts.name, device.count) for device in devices[:-1]] == [("NVIDIA H100 80GB HBM3", 8)]
    assert {peak.dtype: peak.flops_per_s for peak in devices[0].peaks}["bf16"] == 989.4e12
    assert document._name(devices[0]) == "8 x NVIDIA H100 80GB HBM3 (cuda, 79.1 GiB)"


def test_a_device_without_a_peak_says_what_to_do():
    device = machine.devices(machine_with(1, fake_device("unheard-of")))[0]
    assert device.peaks == ()
    assert "flopwatch peak --measure" in device.why_unknown


def test_a_source_of_counters_says_what_it_reads_and_the_others_why_they_are_not_there(monkeypatch):
    probes = [FakeCounters("nvml", absent="libnvidia-ml.so.1 is not there"), FakeCounters("dcgm", [{"sm_active": 0.5}])]
    open_counters = machine.open_counters
    monkeypatch.setattr(machine, "open_counters", lambda device: open_counters(device, probes))
    parts = [(part.name, part.state, part.said) for part in machine.counters()]
    assert parts == [("nvml", "missing", "libnvidia-ml.so.1 is not there"), ("dcgm", "there", "reads compute activity")]


def test_what_only_the_first_reading_of_a_source_has_is_known_too(monkeypatch):
    """An exporter gives activity and energy only when it has read again, and NVML some values every few seconds."""
    open_counters = machine.open_counters
    source = FakeCounters("dcgm", [{"tensor_active": 0.5, "energy_joules": 9.0}, {"power_watts": 40.0}])
    monkeypatch.setattr(machine, "open_counters", lambda device: open_counters(device, [source]))
    assert [part.said for part in machine.counters()] == ["reads tensor activity, power, energy"]


def test_a_source_of_counters_that_fails_after_its_first_reading_does_not_end_the_command(monkeypatch):
    open_counters, source = machine.open_counters, FakeCounters("nvml", raises=RuntimeError("lost"), fails_after=1)
    monkeypatch.setattr(machine, "open_counters", lambda device: open_counters(device, [source]))
    assert [(part.name, part.state, part.said) for part in machine.counters()] == [
        ("nvml", "unusable", "RuntimeError: lost")
    ]


@pytest.mark.parametrize(
    ("script", "state", "said"),
    [
        ("echo slurm 25.05.1", "there", "slurm 25.05.1"),
        ("echo sbatch: error: no configuration >&2; exit 1", "unusable", "status 1: sbatch: error: no configuration"),
        ("sleep 60", "unusable", "does not answer"),
        (None, "missing", ""),
    ],
)
def test_programs_are_asked_for_their_version(script, state, said, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_PROGRAM_SECONDS", 0.5 if script and "sleep" in script else 30.0)
    if script:
        (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "sbatch").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else str(tmp_path))
    sbatch = next(part for part in machine.programs() if part.name == "sbatch")
    assert (sbatch.state, said in sbatch.said) == (state, True), sbatch
    assert bool(sbatch.command) == (state == "missing")


def test_a_driver_is_read_from_the_kernel(tmp_path):
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\n")
    assert machine.versions(tmp_path)["driver"] == "NVIDIA 570.86.15"


# --- Known problems ---------------------------------------------------------------------------------------------------


def write(root, path, content=""):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)


def some_torch(own="2.13.0", cuda=None, hip=None, *, is_available=False, threads=1):
    return SimpleNamespace(
        __version__=own,
        version=SimpleNamespace(cuda=cuda, hip=hip),
        accelerator=SimpleNamespace(is_available=lambda: is_available),
        get_num_threads=lambda: threads,
    )


def around(root, files, environment=None, is_admin=False, **about_torch):
    write(root, "proc/self/status")
    for path, content in files.items():
        write(root, path, content)
    return Around(root, some_torch(**about_torch), environment or {}, is_admin)


PROFILING = {"proc/driver/nvidia/params": "RmProfilingAdminOnly: 1\n"}
QUOTA = {"proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/x/cpu.max": "150000 100000\n"}
NVIDIA = {"dev/nvidiactl": ""}


@pytest.mark.parametrize(
    ("case", "what", "command"),
    [
        ({"files": {}, "own": "2.5.1"}, "torch 2.5.1 is older than 2.6", 'pip install --upgrade "torch>=2.6"'),
        ({"files": PROFILING}, "RestrictProfilingToAdminUsers", "NVreg_RestrictProfilingToAdminUsers=0"),
        ({"files": NVIDIA}, "this torch is built for CPUs only", "pip install --force-reinstall torch"),
        (
            {"files": NVIDIA, "cuda": "12.8", "environment": {"CUDA_VISIBLE_DEVICES": ""}},
            "CUDA_VISIBLE_DEVICES hides all GPUs",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        ({"files": NVIDIA, "cuda": "12.8"}, "the driver may be too old", "torch.zeros(1).cuda()"),
        ({"files": {"dev/kfd": ""}, "cuda": "12.8"}, "there is an AMD GPU", "rocm"),
        ({"files": QUOTA, "threads": 64}, "64 threads, but the control group allows 1.5", "OMP_NUM_THREADS=2"),
    ],
)
def test_a_known_problem_is_named_with_the_command_that_removes_it(case, what, command, tmp_path):
    (problem,) = find_problems(around(tmp_path, **case))
    assert what in problem.what
    assert command in problem.command


@pytest.mark.parametrize(
    "case",
    [
        {"files": {}},
        {"files": PROFILING, "is_admin": True},
        {"files": {"proc/driver/nvidia/params": "RmProfilingAdminOnly: 0\n"}},
        {"files": NVIDIA, "cuda": "12.8", "is_available": True},
        {"files": QUOTA, "threads": 2},
    ],
)
def test_a_machine_without_the_problem_has_none(case, tmp_path):
    assert find_problems(around(tmp_path, **case)) == []


def test_little_shared_memory_a_missing_proc_and_a_cache_that_cannot_be_written_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "shared_memory_bytes", lambda root: 64 << 20)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = find_problems(Around(tmp_path / "nothing", some_torch(), {}))
    assert [problem.what.partition(",")[0] for problem in found] == [
        "/dev/shm has 64.0 MiB",
        "there is no /proc",
        "measured peaks cannot be kept",
    ]


def test_problems_are_shown_with_their_commands_and_do_not_fail_unless_nothing_works(
    flopwatch, quick, monkeypatch, tmp_path
):
    here = around(tmp_path, {**PROFILING, **NVIDIA})
    monkeypatch.setattr(examine, "here", lambda: here)
    status, out, _ = flopwatch("doctor")
    assert status == 0
    assert f"  {problems._ALLOW_PROFILING}\n" in out, "a command is not broken, so that it can be copied"

    monkeypatch.setattr(examine, "here", lambda: around(tmp_path, {}, own="2.5.1"))
    status, out, _ = flopwatch("doctor")
    assert status == 1
    assert "torch 2.5.1 is older than 2.6" in out


def test_only_gpu_writes_a_file(flopwatch):
    status, _, err = flopwatch("doctor", "--output", "x.json")
    assert status == 2
    assert "--output 'x.json' is the file of --gpu" in err


def test_help_of_the_command_loads_no_torch():
    code = (
        "import sys, contextlib; from flopwatch.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['doctor', '--help'])\n"
        "assert not {'torch', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
