"""NVIDIA's real bindings, nvidia-ml-py, with a compiled stand-in for the driver's library."""

import itertools
import os
import subprocess
import sys
import time

import pytest

from flopwatch.hardware.counters.nvml import NvmlProbe
from flopwatch.hardware.counters.protocol import CountersUnavailableError, DeviceIdentity
from flopwatch.testing import FakeClock
from testbeds.stand_in_nvml import LOADED_H100, connected

UUID = "5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
H100 = DeviceIdentity("cuda", "NVIDIA H100 80GB HBM3", UUID, "0000:3b:00.0")

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, TIMEOUT, NOT_FOUND_SYMBOL = 3, 4, 9, 10, 13
LOST, RESET_REQUIRED, MISMATCH, UNKNOWN, VERSION, UNSET = 15, 16, 18, 999, 25, 1

VALUE_OF = {
    "clock": "sm_clock_mhz",
    "reasons": "throttled",
    "power": "power_watts",
    "energy": "energy_joules",
    "processes": "other_memory_bytes",
}


def opened(device=H100, *, gpm=False, clock=None):
    return NvmlProbe(gpm=gpm, **({} if clock is None else {"clock": clock})).open(device)


def reason(device=H100, *, gpm=False):
    with pytest.raises(CountersUnavailableError) as error:
        opened(device, gpm=gpm)
    return str(error.value)


def h100(nvml, **values):
    nvml.process(os.getpid(), 4 << 30)
    return nvml.gpu(UUID, **{**LOADED_H100, **values})


def test_hopper_has_activity_clock_power_and_energy_in_our_units(nvml):
    h100(nvml)
    counters = opened(gpm=True)
    clock = counters.sample()
    assert (clock.source, clock.sm_clock_mhz, clock.power_watts, clock.energy_joules) == ("nvml-gpm", 1755, 650, 5000)
    assert clock.throttled == ()
    assert clock.other_memory_bytes == 0
    counters.close()
    assert nvml.inits == nvml.samples == 0


def test_activity_is_a_share_between_two_samples_100_ms_apart(nvml):
    h100(nvml)
    clock = FakeClock()
    counters = opened(gpm=True, clock=clock)
    clock.advance(0.05)
    assert counters.sample().tensor_active is None
    clock.advance(0.2)

    time.sleep(0.1)  # the stand-in, like the driver, wants real time between its samples
    reading = counters.sample()
    assert (reading.tensor_active, reading.sm_active, reading.dram_active) == (0.425, 0.88, 0.55)


def test_gpus_before_hopper_have_no_activity(nvml):
    h100(nvml, has_gpm=0)
    assert "Hopper and newer" in reason(gpm=True)
    counters = opened()
    assert counters.name == "nvml"
    assert counters.sample().tensor_active is None
    assert counters.sample().energy_joules == 5000


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x00, ()),
        (0x01 | 0x02 | 0x10 | 0x100, ()),  # idle, clocks of applications, sync boost, display
        (0x04, ("power cap",)),
        (0x08 | 0x40, ("hardware slowdown", "hardware thermal slowdown")),
        (0x20, ("software thermal slowdown",)),
        (0x08 | 0x80, ("hardware slowdown", "power brake")),
    ],
)
def test_only_reasons_that_hold_the_clock_down_are_told(nvml, bits, reasons):
    h100(nvml, reason_bits=bits)
    assert opened().sample().throttled == reasons


@pytest.mark.parametrize("error", [NOT_SUPPORTED, NO_PERMISSION, VERSION, NOT_FOUND_SYMBOL])
@pytest.mark.parametrize("function", VALUE_OF)
def test_a_value_that_the_driver_refuses_is_unknown_and_not_asked_again(nvml, function, error):
    h100(nvml)
    nvml.fail(function, error)
    counters = opened()
    reading = counters.sample()
    assert [name for name in VALUE_OF.values() if getattr(reading, name) is None] == [VALUE_OF[function]]
    asked = nvml.calls(function)
    counters.sample()
    assert nvml.calls(function) == asked


@pytest.mark.parametrize("error", [TIMEOUT, UNKNOWN])
def test_a_value_that_is_missing_once_is_asked_again(nvml, error):
    h100(nvml)
    counters = opened()
    nvml.fail("power", error)
    assert counters.sample().power_watts is None
    nvml.fail("power", 0)
    assert counters.sample().power_watts == 650


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DRIVER_NOT_LOADED, "the NVIDIA driver is not loaded; run nvidia-smi"),
        (MISMATCH, "updated while it was loaded"),
        (NO_PERMISSION, "NVreg_RestrictProfilingToAdminUsers=0"),
        (UNKNOWN, "NVML says: "),
    ],
)
def test_a_driver_that_cannot_be_initialised_says_why(nvml, error, told):
    h100(nvml)
    nvml.fail("init", error)
    assert told in reason()


def test_activity_that_only_administrators_may_read_says_so(nvml):
    h100(nvml)
    nvml.fail("gpm_sample", NO_PERMISSION)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in reason(gpm=True)
    assert nvml.inits == 0


@pytest.mark.parametrize(
    ("error", "told"),
    [(LOST, "fell off the bus"), (RESET_REQUIRED, "nvidia-smi --gpu-reset"), (UNSET, "NVML says")],
)
@pytest.mark.parametrize("function", ["clock", "power", "gpm_sample"])
def test_a_gpu_that_is_lost_while_it_runs_ends_the_source(nvml, function, error, told):

    h100(nvml)
    counters = opened(gpm=True)
    counters.sample()
    nvml.fail(function, error)
    time.sleep(0.1)
    with pytest.raises(CountersUnavailableError, match=told):
        counters.sample()
    counters.close()


def test_activity_that_is_refused_later_ends_the_source_with_activity(nvml):

    h100(nvml)
    counters = opened(gpm=True)
    nvml.fail("gpm_metrics", NOT_SUPPORTED)
    time.sleep(0.1)
    with pytest.raises(CountersUnavailableError):
        counters.sample()


@pytest.mark.parametrize(
    ("driver", "unknown", "has_gpm"),
    [
        (525, [], True),
        (510, [], False),
        (470, ["other_memory_bytes"], False),
        (418, ["other_memory_bytes"], False),
        (375, ["energy_joules", "other_memory_bytes"], False),
    ],
)
def test_older_drivers_lack_functions_and_these_values_are_unknown(nvml_library, driver, unknown, has_gpm):
    with connected(nvml_library(driver)) as nvml:
        h100(nvml, reason_bits=4)
        reading = opened().sample()
        assert [name for name in VALUE_OF.values() if getattr(reading, name) is None] == unknown
        assert reading.throttled == ("power cap",)
        if has_gpm:
            assert opened(gpm=True).name == "nvml-gpm"
        else:
            reason(gpm=True)


def eight_gpus(nvml):
    uuids = [UUID[:-1] + str(index) for index in range(8)]
    for index, uuid in enumerate(uuids):
        nvml.gpu(uuid, f"00000000:{0x1B + 16 * index:02X}:00.0", **{**LOADED_H100, "sm_clock": 1000 + index})
    return uuids


@pytest.mark.parametrize("by", ["uuid", "pci"])
def test_each_of_eight_gpus_is_found_although_torch_numbers_them_otherwise(nvml, by):
    uuids = eight_gpus(nvml)
    torch_order = [5, 2, 7, 0, 1, 6, 3, 4]
    for place in torch_order:
        pci = f"0000:{0x1B + 16 * place:02x}:00.0"
        device = DeviceIdentity("cuda", "H100", *((uuids[place], None) if by == "uuid" else (None, pci)))
        counters = opened(device)
        assert counters.sample().sm_clock_mhz == 1000 + place
        counters.close()


def test_the_entry_of_the_environment_that_is_a_uuid_finds_the_gpu(nvml):
    uuids = eight_gpus(nvml)
    device = DeviceIdentity("cuda", "H100", visible_as=f"GPU-{uuids[3]}")
    assert opened(device).sample().sm_clock_mhz == 1003


def test_the_gpu_that_torch_uses_comes_before_one_that_the_environment_names_too_late(nvml):
    """CUDA_VISIBLE_DEVICES has no effect any more when it is set after the first use of the GPU."""
    uuids = eight_gpus(nvml)
    device = DeviceIdentity("cuda", "H100", uuids[5], visible_as=f"GPU-{uuids[3]}")
    assert opened(device).sample().sm_clock_mhz == 1005


def test_a_gpu_is_never_found_by_its_index(nvml):
    eight_gpus(nvml)
    told = reason(DeviceIdentity("cuda", "NVIDIA H100", visible_as="3"))
    assert "NVML has no device with the UUID unknown or the PCI address unknown" in told


INSTANCES = ("c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "cba663e8-9bed-5b25-b243-5985ef7c9beb")


def divided(nvml, count=2):
    h100(nvml)
    for place, uuid in enumerate(INSTANCES[:count]):
        nvml.instance(0, 7 + place, uuid, tensor=10.0 + place)


@pytest.mark.parametrize("torch_reports", ["the instance", "the GPU", "nothing"])
def test_a_mig_instance_has_its_own_activity_and_no_energy(nvml, torch_reports):

    divided(nvml)
    uuid = {"the instance": INSTANCES[1], "the GPU": UUID, "nothing": None}[torch_reports]
    counters = opened(DeviceIdentity("cuda", "H100 MIG 1g.10gb", uuid, visible_as=f"MIG-{INSTANCES[1]}"), gpm=True)
    time.sleep(0.1)
    reading = counters.sample()
    assert reading.tensor_active == pytest.approx(0.11)
    assert reading.sm_clock_mhz == 1755
    assert reading.power_watts is reading.energy_joules is None  # those of the GPU with all its instances


def test_one_of_several_instances_is_not_guessed(nvml):
    divided(nvml)
    told = reason(H100)
    assert "2 MIG instances" in told
    assert "CUDA_VISIBLE_DEVICES" in told


def test_the_only_instance_of_a_gpu_is_the_one(nvml):
    divided(nvml, count=1)
    assert opened(H100).sample().energy_joules is None


def test_memory_of_other_processes_is_without_ours_and_our_children(nvml):
    h100(nvml)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        nvml.process(child.pid, 1 << 30)
        nvml.process(os.getppid(), 3 << 30)
        nvml.process(1, 2 << 30)
        assert opened().sample().other_memory_bytes == 5 << 30
        child.communicate(b"\n")


@pytest.mark.parametrize("why", ["our process is not listed, as in a container", "a process's memory is unknown"])
def test_memory_of_others_is_unknown_if(nvml, why):
    nvml.gpu(UUID, **LOADED_H100)
    unknown = 2**64 - 1
    if "container" in why:
        nvml.process(4_000_000, 1 << 30)
    else:
        nvml.process(os.getpid(), 1 << 30)
        nvml.process(1, unknown)
    assert opened().sample().other_memory_bytes is None


def test_processes_are_asked_every_five_seconds_because_they_cost_most(nvml):
    h100(nvml)
    clock = FakeClock(100.0)
    counters = opened(clock=clock)
    asked = []
    for _ in range(10):
        counters.sample()
        asked.append(nvml.calls("processes"))
        clock.advance(1.25)
    assert [two - one for one, two in itertools.pairwise(asked)] == [0, 0, 0, 2, 0, 0, 0, 2, 0]


PRINT = """
from flopwatch.hardware.counters.nvml import NvmlProbe
from flopwatch.hardware.counters.protocol import DeviceIdentity
try:
    print(NvmlProbe(gpm=False).open(DeviceIdentity("cuda", "x", "none")).name)
except Exception as error:
    print(type(error).__name__, error)
"""


def said(**environment):
    done = subprocess.run(
        [sys.executable, "-c", PRINT], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_library_is_found_as_the_driver_installs_it(nvml_library):
    told = said(LD_LIBRARY_PATH=str(nvml_library().parent))
    assert told.startswith("CountersUnavailableError NVML has no device with the UUID none")


def test_without_a_driver_it_is_said_what_to_install():
    pytest.importorskip("pynvml")
    assert "libnvidia-ml.so.1 is not found: install the NVIDIA driver" in said(LD_LIBRARY_PATH="")


def test_without_the_package_it_is_said_what_to_install(tmp_path):
    (tmp_path / "pynvml.py").write_text("raise ImportError('No module named pynvml')")
    assert 'pip install "flopwatch[nvml]"' in said(PYTHONPATH=str(tmp_path))
