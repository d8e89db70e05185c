"""`flopwatch doctor`: what is there is named with its version, what is missing with the command that brings it."""

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flopwatch.cli.doctor import examine, machine
from flopwatch.cli.doctor.examine import NotPossibleError, run_check
from flopwatch.records.counters import CounterWindow
from flopwatch.testing import FakeClock, fake_device
from support.fakes import fake_torch

ROOT = Path(__file__).parents[2]


# --- The whole command ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R8")
def test_everything_works_here_and_fits_into_80_columns(flopwatch):
    status, out, _ = flopwatch("doctor")
    assert status == 0, out
    assert [line for line in out.splitlines() if len(line) > 80] == []
    headings = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert headings == ["Versions", "Devices", "One counted step", "Extras", "Problems"]
    assert torch.__version__ in out
    assert "65,536 FLOPs counted, 65,536 by hand" in out
    assert "flopwatch works here" in out


def test_a_wrong_count_is_a_problem_and_the_status_is_1(flopwatch, monkeypatch):
    monkeypatch.setattr(examine, "count_flops", lambda *_, **__: SimpleNamespace(model_flops=1))
    status, out, _ = flopwatch("doctor")
    assert status == 1
    assert "one counted step: 1 FLOPs counted, 65,536 by hand" in out
    status, out, _ = flopwatch("doctor", "--json")
    found = json.loads(out)
    assert (status, found["is_working"]) == (1, False)
    assert found["counted_step"]["figures"] == {"counted_flops": 1, "expected_flops": 65536}
    assert found["devices"][-1]["facts"]["kind"] == "cpu"


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
    assert (result.name, result.outcome, result.said, result.seconds) == ("a check", outcome, said, 2.0)


def test_help_of_the_command_loads_no_torch():
    code = (
        "import sys, contextlib; from flopwatch.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['doctor', '--help'])\n"
        "assert not {'torch', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# --- Extras -----------------------------------------------------------------------------------------------------------


def no_package(name):
    raise PackageNotFoundError(name)


def test_the_extras_are_those_of_the_package_with_its_lowest_versions():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    lines = dict(re.findall(r"^(\w+) = \[(.*?)\]", table, re.MULTILINE))
    declared = {name: dict(re.findall(r'"([\w-]+)>=([\d.]+)"', line)) for name, line in lines.items() if name != "all"}
    known = {
        extra: {names.partition("|")[0]: lowest for names, lowest in packages.items()}
        for extra, (_, packages) in machine._EXTRAS.items()
    }
    assert known == declared


def test_each_missing_extra_is_named_with_the_command_that_brings_it(flopwatch, monkeypatch):
    monkeypatch.setattr(machine, "version", no_package)
    status, out, _ = flopwatch("doctor")
    assert status == 0
    for extra in machine._EXTRAS:
        assert re.search(rf'{extra} +pip install "flopwatch\[{extra}\]" ', out), extra


def test_an_extra_of_which_a_package_is_missing_has_the_command(monkeypatch):
    monkeypatch.setattr(machine, "version", lambda name: no_package(name) if name == "trl" else "99.0")
    hf = next(extra for extra in machine.extras() if extra.name == "hf")
    assert (hf.versions, hf.command) == (
        {"transformers": "99.0", "accelerate": "99.0"},
        'pip install "flopwatch[hf]"',
    )


def test_a_package_that_is_too_old_is_a_failure_with_the_command_that_updates_it(flopwatch, monkeypatch):
    monkeypatch.setattr(machine, "version", lambda name: "0.1" if name == "wandb" else no_package(name))
    status, out, _ = flopwatch("doctor")
    assert status == 1
    assert "wandb 0.1 is older than 0.31" in out
    assert 'pip install --upgrade "flopwatch[wandb]"' in out


@pytest.mark.parametrize(
    ("found", "lowest", "older"),
    [("0.30.9", "0.31", True), ("0.31", "0.31", False), ("2.10.0", "2.9", False), ("1.6.0+cu12", "1.6", False)],
)
def test_versions_are_compared_by_their_numbers(found, lowest, older):
    assert machine.is_older(found, lowest) == older


# --- The machine ------------------------------------------------------------------------------------------------------


def machine_with(count, facts):
    found = fake_torch(facts)
    found.accelerator.device_count = lambda: count
    return found


def test_equal_devices_are_shown_once_with_their_peaks():
    devices = machine.devices(machine_with(8, fake_device("h100")))
    assert [(device.facts.name, device.count) for device in devices[:-1]] == [("NVIDIA H100 80GB HBM3", 8)]
    assert {peak.dtype: peak.flops_per_s for peak in devices[0].peaks}["bf16"] == 989.4e12
    assert next(examine._devices(devices)).text == "8 x NVIDIA H100 80GB HBM3 (cuda, 79.1 GiB)"


def test_a_device_without_a_peak_says_what_to_do():
    device = machine.devices(machine_with(1, fake_device("unheard-of")))[0]
    assert device.peaks == ()
    assert "flopwatch peak --measure" in device.why_unknown


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((None, "libnvidia-ml.so.1 is not found"), "absent: libnvidia-ml.so.1 is not found"),
        ((CounterWindow("nvml-gpm", 1, 0.0), ""), "NVML: activity, clock, power and energy"),
        ((CounterWindow("nvml", 1, 0.0), ""), "NVML: clock, power and energy; the activity of the GPU needs Hopper"),
    ],
)
def test_it_says_which_counters_can_be_read(found, said, monkeypatch):
    monkeypatch.setattr(machine, "read_once", lambda device: found)
    assert machine.counters().startswith(said)


def test_a_driver_is_read_from_the_kernel(tmp_path):
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\n")
    assert machine.versions(tmp_path)["driver"] == "NVIDIA 570.86.15"


# --- Problems ---------------------------------------------------------------------------------------------------------


def write(root, path, content=""):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)


def some_torch(own="2.13.0", cuda=None, *, is_available=False, threads=1):
    return SimpleNamespace(
        __version__=own,
        version=SimpleNamespace(cuda=cuda, hip=None),
        accelerator=SimpleNamespace(is_available=lambda: is_available),
        get_num_threads=lambda: threads,
    )


def problems_of(root, files, **about_torch):
    for path, content in files.items():
        write(root, path, content)
    return machine.problems(root, some_torch(**about_torch))


PROFILING = {"proc/driver/nvidia/params": "RmProfilingAdminOnly: 1\n"}
QUOTA = {"proc/self/cgroup": "0::/x\n", "sys/fs/cgroup/x/cpu.max": "150000 100000\n"}
NVIDIA = {"dev/nvidiactl": ""}


@pytest.mark.parametrize(
    ("case", "what", "command"),
    [
        ({"files": {}, "own": "2.5.1"}, "torch 2.5.1 is older than 2.6", 'pip install --upgrade "torch>=2.6"'),
        ({"files": PROFILING}, "lets only administrators profile", ""),
        ({"files": NVIDIA}, "built for neither CUDA nor ROCm, finds none", "torch.zeros(1).cuda()"),
        ({"files": QUOTA, "threads": 64}, "64 threads, but the control group allows 1.5", "OMP_NUM_THREADS=2"),
    ],
)
def test_a_problem_is_named_with_the_command_that_removes_it(case, what, command, tmp_path):
    (problem,) = problems_of(tmp_path, **case)
    assert what in problem.what
    assert command in problem.command
    assert problem.is_failure == ("own" in case)


@pytest.mark.parametrize(
    "case",
    [
        {"files": {}},
        {"files": {"proc/driver/nvidia/params": "RmProfilingAdminOnly: 0\n"}},
        {"files": NVIDIA, "cuda": "12.8", "is_available": True},
        {"files": QUOTA, "threads": 2},
    ],
)
def test_a_machine_without_the_problem_has_none(case, tmp_path):
    assert problems_of(tmp_path, **case) == []


def test_little_shared_memory_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "statvfs", lambda path: SimpleNamespace(f_frsize=4096, f_blocks=16384))
    (problem,) = problems_of(tmp_path, {})
    assert problem.what.startswith("/dev/shm has 64.0 MiB")


def test_problems_that_only_limit_do_not_fail_and_their_commands_are_not_broken(flopwatch, monkeypatch, tmp_path):
    found = problems_of(tmp_path, {**PROFILING, **QUOTA}, threads=64)
    monkeypatch.setattr(machine, "problems", lambda: found)
    status, out, _ = flopwatch("doctor")
    assert status == 0
    assert "  export OMP_NUM_THREADS=2\n" in out
    assert "flopwatch works here, with 2 limits." in out
