"""The order of the sources, two sources read as one, and what this machine says of each."""

import time

import pytest
import torch

from flopwatch.hardware.counters.chain import JoinedProbe, open_counters, probes_for
from flopwatch.hardware.counters.dcgm import DcgmCounters
from flopwatch.hardware.counters.protocol import CountersUnavailableError, DeviceIdentity
from flopwatch.hardware.counters.sampler import CounterSampler
from flopwatch.hardware.identity import identify
from flopwatch.testing import FakeCounters
from support.dcgm_exporter import LOADED, Exporter, gpu, page
from testbeds.stand_in_nvml import LOADED_H100

GPU = DeviceIdentity("cuda", "NVIDIA H100", "5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77")


def test_the_first_source_that_works_is_opened_and_the_others_say_why_not():
    probes = [
        FakeCounters("a", absent="no library"),
        FakeCounters("b", raises=RuntimeError("boom\nmore")),
        FakeCounters("c"),
        FakeCounters("d"),
    ]
    opened = open_counters(GPU, probes)
    assert opened.source.name == "c"
    assert opened.reasons == {"a": "no library", "b": "RuntimeError: boom"}
    assert (probes[1].closed, probes[3].opened) == (1, 0)


def test_a_driver_that_hangs_holds_nobody_up():
    """Neither when it is opened, nor when it is read later or closed."""
    probes = [FakeCounters("a", hangs=True), FakeCounters("b", hangs=True, fails_after=2)]
    opened = open_counters(GPU, probes, seconds=0.1)
    assert (opened.source.name, opened.reasons) == ("b", {"a": "it did not answer for 0.1 s"})
    assert opened.source.sample().source == "b"
    with pytest.raises(CountersUnavailableError, match="it did not answer"):
        opened.source.sample()
    opened.source.close()
    for probe in probes:
        probe.release()


def test_a_source_that_leaves_the_process_is_passed_over():
    opened = open_counters(GPU, [FakeCounters("a", raises=SystemExit(3)), FakeCounters("b")])
    assert (opened.source.name, opened.reasons) == ("b", {"a": "it raises SystemExit"})


def test_two_sources_are_read_as_one_and_the_second_comes_first_where_both_know():
    dcgm = FakeCounters("dcgm", [{"tensor_active": 0.5, "power_watts": 1.0}])
    nvml = FakeCounters("nvml", [{"energy_joules": 9.0, "power_watts": 2.0, "throttled": ()}])
    joined = JoinedProbe(dcgm, nvml).open(GPU)
    reading = joined.sample()
    assert (reading.source, reading.tensor_active, reading.energy_joules) == ("dcgm+nvml", 0.5, 9.0)
    assert (reading.power_watts, reading.throttled, reading.sm_active) == (2.0, (), None)
    joined.close()
    assert dcgm.closed == nvml.closed == 1


def test_each_of_two_sources_is_read_at_its_own_interval():
    slow, fast = FakeCounters("slow", [{"tensor_active": 0.5}], interval_seconds=1000), FakeCounters("fast")
    joined = JoinedProbe(slow, fast).open(GPU)
    readings = [joined.sample() for _ in range(3)]
    assert (slow.sampled, fast.sampled, joined.interval_seconds) == (1, 3, 0.0)
    assert [reading.tensor_active for reading in readings] == [0.5, None, None]


def test_if_the_second_of_two_is_absent_the_first_is_closed():
    first = FakeCounters("dcgm")
    with pytest.raises(CountersUnavailableError, match="no driver"):
        JoinedProbe(first, FakeCounters("nvml", absent="no driver")).open(GPU)
    assert first.closed == 1


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("cuda", ["nvml-gpm", "dcgm+nvml", "dcgm", "nvml"]),
        ("rocm", ["amdsmi"]),
        ("cpu", ["perf+rapl", "rapl", "perf"]),
        ("mps", []),
    ],
)
def test_the_order_of_the_sources_of_each_kind(kind, names):
    assert [probe.name for probe in probes_for(DeviceIdentity(kind, "x"))] == names


@pytest.mark.parametrize("kind", ["cuda", "rocm", "cpu"])
def test_on_this_machine_every_source_works_or_says_in_one_line_why_not(kind):
    opened = open_counters(DeviceIdentity(kind, "x", GPU.uuid))
    names = [probe.name for probe in probes_for(GPU if kind == "cuda" else DeviceIdentity(kind, "x"))]
    tried = names if opened.source is None else names[: names.index(opened.source.name)]
    assert list(opened.reasons) == tried
    for reason in opened.reasons.values():
        assert len(reason) > 20
        assert "\n" not in reason
        assert "Traceback" not in reason


class StandInTorch:
    """The part of `torch` that knows of two GPUs."""

    device = torch.device

    class version:  # noqa: N801
        hip = None

    class cuda:  # noqa: N801
        @staticmethod
        def get_device_properties(device):
            class Properties:
                name = f"NVIDIA H100 {device.index}"
                uuid = GPU.uuid
                pci_domain_id, pci_bus_id, pci_device_id = 0, 0x3B, 0

            return Properties

        @staticmethod
        def current_device():
            return 1


@pytest.mark.parametrize(
    ("visible", "index", "entry"),
    [(None, 0, None), ("3,5", 1, "5"), ("MIG-a , MIG-b", 1, "MIG-b"), ("3", 1, None), ("", 0, None)],
)
def test_the_identity_of_a_gpu_is_what_torch_and_the_environment_say(monkeypatch, visible, index, entry):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = identify(f"cuda:{index}", StandInTorch)
    assert found == DeviceIdentity("cuda", f"NVIDIA H100 {index}", GPU.uuid, "0000:3b:00.0", entry)


def test_a_torch_that_does_not_tell_the_pci_address_leaves_it_out(monkeypatch):
    class Old(StandInTorch):
        class cuda:  # noqa: N801
            @staticmethod
            def get_device_properties(device):
                return type("Properties", (), {"name": "V100", "uuid": GPU.uuid})

    assert identify("cuda:0", Old).pci_bus_id is None


def test_amds_gpus_are_told_apart_by_the_build_of_torch():
    class Rocm(StandInTorch):
        class version:  # noqa: N801
            hip = "6.4"

    assert identify("cuda:0", Rocm).kind == "rocm"


def test_a_run_passes_from_one_real_source_to_the_next_until_the_gpu_is_lost(nvml, monkeypatch):
    """Real bindings and a real HTTP server: the performance monitor is refused, the exporter ends, the GPU is lost."""
    exporter = Exporter()
    exporter.text = page(gpu(0, GPU.uuid, LOADED))
    monkeypatch.setenv("FLOPWATCH_DCGM", exporter.address)
    nvml.gpu(GPU.uuid, **LOADED_H100)
    told, windows = [], []
    monkeypatch.setattr(DcgmCounters, "interval_seconds", 0.1)
    sampler = CounterSampler(GPU, lambda *message: told.append(message), interval_seconds=0.12)

    def wait_for(source):
        until = time.monotonic() + 30
        while sampler.source != source:
            assert time.monotonic() < until, (source, sampler.source, told)
            time.sleep(0.005)
        sampler.take()
        while (window := sampler.take()) is None and source is not None:
            time.sleep(0.005)
        windows.append(window)

    wait_for("nvml-gpm")
    nvml.fail("gpm_sample", 3)
    wait_for("dcgm+nvml")
    exporter.close()
    wait_for("nvml")
    nvml.set(0, is_lost=1)
    wait_for(None)
    sampler.close()
    assert [window and window.source for window in windows] == ["nvml-gpm", "dcgm+nvml", "nvml", None]
    assert windows[0].sm_clock_mhz == windows[2].sm_clock_mhz == 1755
    assert [code for code, _ in told] == ["counters_changed", "counters_changed", "counters_absent"]
    assert "fell off the bus" in told[-1][1]
    assert nvml.inits == nvml.samples == 0
