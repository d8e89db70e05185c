"""`flopwatch doctor --gpu`: its checks run on the CPU here, and find what is wrong with what they check."""

import getpass
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flopwatch.cli.doctor import gpu
from flopwatch.cli.doctor.examine import CheckResult, passed_if
from flopwatch.hardware import peak_flops, read_device
from flopwatch.hardware.device import find_device
from flopwatch.hardware.measure import matmul_flops, matmul_timer
from flopwatch.hardware.peak_clock import peak_clock_mhz
from flopwatch.monitor.timing.tape import EventTimer
from flopwatch.testing import FakeCounters, fake_device
from support.fakes import FakeEvents

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Matmuls that take less time than on a device, and a cache of peaks of its own."""
    monkeypatch.setattr(gpu, "_MATMUL_SIDE", 256)
    monkeypatch.setattr(gpu, "_PEAK_SECONDS", 0.2)
    monkeypatch.setattr(gpu, "_SECONDS_BETWEEN_EVENTS", 0.05)
    monkeypatch.setattr(gpu, "_SPAN_SECONDS", 0.02)


@pytest.fixture
def run(monkeypatch, tmp_path, flopwatch):
    """Runs `doctor --gpu` on the CPU with some checks; returns status, output and the content of the file."""

    def start(checks=None, *arguments):
        monkeypatch.setattr(gpu, "_accelerator", lambda: CPU)
        if checks is not None:
            monkeypatch.setattr(gpu, "CHECKS", checks)
        file = tmp_path / "found.json"
        status, out, err = flopwatch("doctor", "--gpu", "--output", str(file), *arguments)
        return status, out, err, json.loads(file.read_text("utf-8"))

    return start


# --- The whole command ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_cpu_can_show_passes_and_its_figures_are_in_the_file(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Two of the checks compare with the host's clock, and other tests may hold the host up.
    monkeypatch.setattr(gpu, "_NEAR", 0.5)
    monkeypatch.setattr(gpu, "_MOST_OWN_SHARE", 1.0)
    status, out, _, found = run()
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    figures = {check["name"]: check["figures"] for check in found["checks"]}

    assert [name for name, outcome in outcomes.items() if outcome != "passed"] == ["memory", "NVML"]
    assert len(outcomes) == 8
    assert (status, found["is_complete"], found["format"]) == (0, True, 1)
    assert figures["FLOPs of a layer"]["counted_flops"] == 40 * 2 * 2 * 256 * 1024 * 1024
    assert figures["two ranks"]["counted_flops"] == 2 * 40 * 2 * 2 * 256 * 1024 * 1024
    assert figures["two ranks"]["sum_of_ranks"] == 3
    assert "6 of 6 checks passed on " in out
    assert gpu.ISSUES in out


def test_a_failed_check_ends_with_status_1_and_is_named(run):
    status, out, _, found = run({"memory": lambda device: passed_if(False, "wrong")})
    assert status == 1
    assert "1 check failed on " in out
    assert found["checks"][0]["outcome"] == "failed"


@pytest.mark.skipif(find_device().type != "cpu", reason="this machine has an accelerator")
def test_without_an_accelerator_it_says_why_and_ends_with_status_2(flopwatch, tmp_path):
    status, out, err = flopwatch("doctor", "--gpu", "--output", str(tmp_path / "x.json"))
    assert (status, out) == (2, "")
    assert err.startswith("flopwatch doctor --gpu needs an accelerator, and torch ")
    assert "run it on a machine with a GPU" in err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("path", ["-", "no/such/folder/x.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_checks(flopwatch, monkeypatch, path):
    monkeypatch.setattr(gpu, "_accelerator", lambda: CPU)
    monkeypatch.setattr(gpu, "CHECKS", None)
    status, _, err = flopwatch("doctor", "--gpu", "--output", path)
    assert status == 2
    assert f"cannot write {path!r}" in err


def test_only_gpu_writes_a_file(flopwatch):
    status, _, err = flopwatch("doctor", "--output", "x.json")
    assert status == 2
    assert "--output 'x.json' is the file of --gpu" in err


def test_what_was_found_before_an_interrupt_is_in_the_file(run):
    def interrupted(device):
        raise KeyboardInterrupt

    status, _, err, found = run({"one": lambda device: passed_if(True, "fine"), "two": interrupted})
    assert status == 1
    assert "Stopped after 1 of 2 checks" in err
    assert ([check["name"] for check in found["checks"]], found["is_complete"]) == (["one"], False)


def test_the_file_has_neither_the_host_nor_the_user_nor_the_users_folder(run):
    said = f"OSError: {Path.home()}/venv/libcuda.so on {socket.gethostname().upper()} by {getpass.getuser()}"
    *_, found = run({"a": lambda device: passed_if(False, said, inner=[said])})
    check = found["checks"][0]
    assert (
        check["said"] == check["figures"]["inner"][0] == "OSError: <private>/venv/libcuda.so on <private> by <private>"
    )


# --- Each check finds what is wrong -----------------------------------------------------------------------------------


def test_a_rate_above_the_peak_fails(monkeypatch):
    def measured(share):
        monkeypatch.setattr(gpu, "measure_peak", lambda *_, **__: SimpleNamespace(flops_per_s=share * peak))
        return gpu.matmul_rate(CPU).outcome

    peak = peak_flops(CPU, "bf16").flops_per_s
    assert (measured(0.9), measured(1.1)) == ("passed", "failed")


def test_events_that_are_wrong_fail(monkeypatch):
    times = iter((0.0, 1.0) * 9)
    monkeypatch.setattr(gpu, "monotonic_seconds", times.__next__)
    for seconds, outcome in ((1.0, "passed"), (1.1, "failed")):
        events = iter((0.0, seconds, seconds))
        timer = EventTimer(CPU, FakeEvents(events.__next__))
        monkeypatch.setattr(gpu, "timer_for", lambda device, clock, timer=timer: timer)
        assert gpu.event_times(CPU).outcome == outcome


@pytest.mark.parametrize(("counted", "outcome"), [(100, "passed"), (101, "failed"), (None, "failed")])
def test_a_count_that_is_off_by_one_fails(counted, outcome):
    assert gpu._compared(counted, 100).outcome == outcome


@pytest.mark.parametrize(("leaks", "outcome"), [(False, "passed"), (True, "failed")])
def test_memory_that_stays_allocated_fails(leaks, outcome, monkeypatch):
    size = gpu._ALLOCATED_BYTES
    readings = iter((10, 10 + size, 10 + size if leaks else 10))
    allocator = {"memory_allocated": lambda device: next(readings), "max_memory_allocated": lambda device: 20 + size}
    for name, function in allocator.items():
        monkeypatch.setattr(torch.cpu, name, function, raising=False)
    assert gpu.memory(CPU).outcome == outcome


class Pipes(FakeCounters):
    """Counters of tensor cores that do the FLOPs of the matmuls."""

    def __init__(self, factor, facts, peak):
        super().__init__("pipes", [{}])
        self.flops, self._factor, self._facts, self._peak = 0, factor, facts, peak
        self._last = (self._clock(), 0)

    def sample(self):
        now, last = (self._clock(), self.flops), self._last
        self._last = now
        active = self._factor * (now[1] - last[1]) / (now[0] - last[0]) / self._peak
        self._readings = [
            type(self._readings[0])("pipes", 0.0, tensor_active=active, sm_clock_mhz=peak_clock_mhz(self._facts))
        ]
        return super().sample()


@pytest.mark.parametrize(("factor", "outcome"), [(1.05, "passed"), (1.4, "failed"), (0.6, "failed")])
def test_counters_that_are_wrong_fail(factor, outcome, monkeypatch):
    facts = fake_device("h100")
    pipes = Pipes(factor, facts, peak_flops(facts, "bf16").flops_per_s)

    def counted(device, dtype):
        run = matmul_timer(device, dtype)

        def timed(shape, calls):
            pipes.flops += calls * matmul_flops(shape)
            return run(shape, calls)

        return timed

    monkeypatch.setattr(gpu, "matmul_timer", counted)
    monkeypatch.setattr(gpu, "read_device", lambda device: facts)
    monkeypatch.setattr(gpu, "open_nvml_counters", pipes.open)
    assert gpu.nvml(CPU).outcome == outcome
    assert pipes.closed == 1


def test_counters_without_tensor_activity_give_their_other_figures(monkeypatch):
    monkeypatch.setattr(gpu, "open_nvml_counters", FakeCounters("nvml", [{"power_watts": 300.0}]).open)
    found = gpu.nvml(CPU)
    assert (found.outcome, found.figures["power_watts"]) == ("not possible", 300.0)


def test_a_dear_monitor_fails(monkeypatch):
    monkeypatch.setattr(gpu, "_MOST_OWN_SHARE", 0.0)
    assert gpu.cost_of_monitoring(CPU).outcome == "failed"


# --- A real accelerator -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu.CHECKS)
def test_a_real_accelerator_passes(name):
    found: CheckResult = gpu.run_check(name, lambda: gpu.CHECKS[name](find_device()))
    assert found.outcome != "failed", (found.said, read_device())
