"""`flopwatch doctor --gpu` against a fake accelerator; each of its checks finds what it is there to find."""

import getpass
import json
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from flopwatch.cli.doctor import examine, gpu_checks, gpu_file, gpu_times, gpu_training
from flopwatch.cli.doctor.accelerator import TorchAccelerator
from flopwatch.cli.doctor.findings import passed_if, run_check
from flopwatch.testing import FakeClock, FakeCounters
from support.fake_accelerator import FakeAccelerator

NEEDS_TWO = "two ranks"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """The matmuls between two readings of counters take less time than on a device."""
    monkeypatch.setattr(gpu_times, "_SPAN_SECONDS", 0.05)


def outcome(check, accelerator):
    return run_check("a check", partial(check, accelerator))


# --- The whole command ------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, tmp_path, flopwatch):
    """Runs `doctor --gpu` with a fake; returns status, output and the content of the file."""

    def start(accelerator, *arguments):
        monkeypatch.setattr(examine, "TorchAccelerator", lambda: accelerator)
        file = tmp_path / "found.json"
        status, out, err = flopwatch("doctor", "--gpu", "--output", str(file), *arguments)
        return status, out, err, json.loads(file.read_text("utf-8"))

    return start


@pytest.mark.slow
def test_every_check_passes_on_a_true_accelerator_and_its_figures_are_in_the_file(run):
    status, out, _, found = run(FakeAccelerator())
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}

    assert [name for name, said in outcomes.items() if said != "passed"] == [NEEDS_TWO]
    assert list(outcomes) == list(gpu_checks.CHECKS)
    assert (status, found["is_complete"], found["format"]) == (0, True, 1)
    figures = {check["name"]: check["figures"] for check in found["checks"]}
    assert figures["FLOPs of a linear layer"]["counted_flops"] == 40 * 2 * 2 * 256 * 1024 * 1024
    assert figures["peak in bf16"]["measured_flops_per_s"] == 0.75 * 989.4e12
    assert figures["product"]["product"] == "H100 SXM5 80GB"
    assert figures["hardware counters"]["source"] == "pipes"
    assert "15 of 15 checks passed on NVIDIA H100 80GB HBM3." in out
    assert gpu_file.ISSUES in out
    # Addresses and paths are not divided, and the path of a test's folder may be long.
    divided = [line for line in out.splitlines() if not any(w.startswith(("/", "https:")) for w in line.split())]
    assert max(map(len, divided)) <= 80


def test_a_failed_check_ends_with_status_1_and_is_named(run, monkeypatch):
    monkeypatch.setattr(examine, "GPU_CHECKS", quick := {"memory": gpu_times.memory})
    monkeypatch.setattr(examine, "run_all", partial(gpu_checks.run_all, checks=quick))
    status, out, _, found = run(FakeAccelerator(leaks=True))
    assert status == 1
    assert "1 check failed on NVIDIA H100 80GB HBM3: memory" in out
    assert found["checks"][0]["outcome"] == "failed"


def test_without_an_accelerator_it_says_why_and_ends_with_status_2(flopwatch, tmp_path):
    status, out, err = flopwatch("doctor", "--gpu", "--output", str(tmp_path / "x.json"))
    assert (status, out) == (2, "")
    assert err.startswith("flopwatch doctor --gpu needs an accelerator, and torch ")
    assert "run it on a machine with a GPU" in err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("path", ["-", "no/such/folder/x.json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_checks(flopwatch, monkeypatch, path):
    monkeypatch.setattr(examine, "TorchAccelerator", FakeAccelerator)
    monkeypatch.setattr(examine, "run_all", None)
    status, _, err = flopwatch("doctor", "--gpu", "--output", path)
    assert status == 2
    assert f"cannot write {path!r}" in err


def test_what_was_found_before_an_interrupt_is_in_the_file(run, monkeypatch):
    def interrupted(accelerator):
        raise KeyboardInterrupt

    checks = {"memory": gpu_times.memory, "product": interrupted}
    monkeypatch.setattr(examine, "GPU_CHECKS", checks)
    monkeypatch.setattr(examine, "run_all", partial(gpu_checks.run_all, checks=checks))
    status, _, err, found = run(FakeAccelerator())
    assert status == 1
    assert "Stopped after 1 of 2 checks" in err
    assert ([check["name"] for check in found["checks"]], found["is_complete"]) == (["memory"], False)


def test_checks_for_which_no_time_is_left_are_not_possible():
    def check(accelerator):
        clock.advance(200.0)
        return passed_if(True, "fine")

    clock = FakeClock()
    told = []
    results = list(gpu_checks.run_all(FakeAccelerator(), told.append, {"a": check, "b": check, "c": check}, clock))
    assert [(result.name, result.outcome) for result in results] == [
        ("a", "passed"),
        ("b", "passed"),
        ("c", "not possible"),
    ]
    assert told == ["a", "b", "c"]


def test_the_file_has_no_names_paths_or_addresses(run, monkeypatch):
    secrets = [socket.gethostname(), getpass.getuser(), str(Path.home()), "node17", "10.1.2.3", "GPU-4a9c"]
    said = (
        f"OSError: {Path.home()}/venv/libcuda.so on {socket.gethostname()} by {getpass.getuser()}, "
        "http://node17:9400/metrics, 10.1.2.3, uuid GPU-4a9c1b2f-aaaa-bbbb-cccc-0123456789ab, 12.5 tokens/s of bf16"
    )
    checks = {"a": lambda accelerator: passed_if(False, said, inner={"list": [said]})}
    monkeypatch.setattr(examine, "GPU_CHECKS", checks)
    monkeypatch.setattr(examine, "run_all", partial(gpu_checks.run_all, checks=checks))
    *_, found = run(FakeAccelerator())
    text = json.dumps(found["checks"])
    assert [secret for secret in secrets if secret in text] == []
    assert found["checks"][0]["figures"]["inner"]["list"][0].endswith("12.5 tokens/s of bf16")
    assert "OSError: <path> on <name> by <name>" in text


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("no dcgm-exporter answers at node17:9400 (OSError)", "no dcgm-exporter answers at <address> (OSError)"),
        ("HTTP://Node17.Lab/x and tcp://node17:29500", "<address> and <address>"),
        ("ADA-PC refused Ada", "<name> refused <name>"),
        ("bind to [fe80::1ff:fe23:4567:890a]:29500 failed", "bind to [<address>]:29500 failed"),
        ("No such file or directory: '/data/My Project/x'", "No such file or directory: <path>"),
        (r"C:\Users\Ada Lovelace\x.dll is missing", "<path> is missing"),
        ("in /opt/conda/lib:/home/bob/lib", "in <path>:<path>"),
        ("gcc -I/home/bob/include -L/home/bob/lib", "gcc -I<path> -L<path>"),
        ("device 0000:3b:00.0 and GPU-4a9c1b2f-aaaa-bbbb-cccc-0123456789ab", "device <address> and GPU-<address>"),
        ("12.5 tokens/s/GPU of 3/4/5, at 12 %: 2.5", "12.5 tokens/s/GPU of 3/4/5, at 12 %: 2.5"),
        ("RuntimeError: CUDA error: 700; ratio 1:2", "RuntimeError: CUDA error: 700; ratio 1:2"),
    ],
)
def test_what_names_a_machine_a_person_or_a_place_is_replaced(said, kept):
    assert gpu_file.nameless({"said": said}, ["Ada Lovelace", "ada-pc", "ada"]) == {"said": kept}


# --- Each check finds what is wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (gpu_times.times_by_events, {"event_factor": 1.1}),
        (gpu_times.times_by_a_trace, {"trace_factor": 1.1}),
        (gpu_times.memory, {"leaks": True}),
        (gpu_times.counters, {"counter_factor": 1.4}),
        (gpu_times.counters, {"counter_factor": 0.6}),
        (gpu_times.PEAKS["peak in bf16"], {"peak_share": 1.1}),
    ],
)
@pytest.mark.slow
def test_a_wrong_reading_fails_its_check_and_a_true_one_passes(check, wrong):
    # Some compare with the host's clock, and other tests may hold the host up.
    assert any(outcome(check, FakeAccelerator()).outcome == "passed" for _ in range(3))
    assert outcome(check, FakeAccelerator(**wrong)).outcome == "failed"


def test_a_count_that_is_off_by_one_fails():
    assert gpu_training._compared(100, 100).outcome == "passed"
    assert gpu_training._compared(101, 100).outcome == "failed"
    assert gpu_training._compared(None, 100).outcome == "failed"


def test_a_monitored_step_that_is_timed_wrongly_fails(monkeypatch):
    monkeypatch.setattr(gpu_training, "monotonic_seconds", iter((0.0, 1000.0)).__next__)
    assert outcome(gpu_training.time_of_a_step, FakeAccelerator()).outcome == "failed"


def test_a_product_that_the_table_does_not_have_or_that_has_too_many_units_is_told():
    unheard_of, too_many = FakeAccelerator("unheard-of"), FakeAccelerator()
    too_many.facts = replace(too_many.facts, unit_count=200)
    assert outcome(gpu_times.product, unheard_of).outcome == "not possible"
    assert "no product in the table" in outcome(gpu_times.product, unheard_of).said
    assert outcome(gpu_times.product, too_many).outcome == "failed"
    assert outcome(gpu_times.product, FakeAccelerator("a100-mig-1g.5gb")).outcome == "passed"


def test_without_counters_the_reasons_are_told():
    absent = [FakeCounters("nvml", absent="libnvidia-ml.so.1 is not there"), FakeCounters("dcgm", absent="no exporter")]
    found = outcome(gpu_times.counters, FakeAccelerator(counters=absent))
    assert (found.outcome, found.said) == (
        "not possible",
        "nvml: libnvidia-ml.so.1 is not there; dcgm: no exporter",
    )


def test_counters_without_tensor_activity_give_their_other_figures():
    found = outcome(gpu_times.counters, FakeAccelerator(counters=[FakeCounters("nvml", [{"power_watts": 300.0}])]))
    assert found.outcome == "not possible"
    assert found.said == "nvml does not report tensor activity and clock"
    assert found.figures["power_watts"] == 300.0


@pytest.mark.parametrize(("product", "dtype"), [("v100", "tf32"), ("mi300x", "fp4"), ("m1-max-24-cores", "tf32")])
def test_a_type_that_a_device_does_not_have_is_not_possible(product, dtype):
    assert outcome(partial(gpu_times.measured_peak, dtype), FakeAccelerator(product)).outcome == "not possible"


def test_one_device_cannot_have_two_ranks():
    assert outcome(gpu_training.two_ranks, FakeAccelerator()).said == "it needs two devices, and this machine has 1"


@pytest.mark.slow
def test_two_ranks_add_up_their_flops():
    found = outcome(gpu_training.two_ranks, FakeAccelerator(count=2))
    assert found.outcome == "passed", found.said
    assert found.figures["counted_flops"] == 2 * 20 * 2 * 2 * 256 * 1024 * 1024
    assert found.figures["sum_of_ranks"] == 3


# --- A real accelerator -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_checks.CHECKS)
def test_a_real_accelerator_passes(name):
    found = outcome(gpu_checks.CHECKS[name], TorchAccelerator())
    assert found.outcome != "failed", found.said
