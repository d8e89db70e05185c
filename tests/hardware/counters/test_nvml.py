"""NVIDIA's real bindings, nvidia-ml-py, with a compiled stand-in for the driver's library."""

import os
import subprocess
import sys
import time

import pytest

from flopwatch.hardware.counters.nvml import open_nvml_counters
from flopwatch.hardware.counters.protocol import CountersUnavailableError, DeviceIdentity
from flopwatch.testing import FakeClock
from testbeds.stand_in_nvml import LOADED_H100, connected

UUID = "5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
H100 = DeviceIdentity("cuda", "NVIDIA H100 80GB HBM3", UUID, "0000:3b:00.0")

NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, TIMEOUT, NOT_FOUND_SYMBOL = 3, 4, 9, 10, 13
LOST, RESET_REQUIRED, MISMATCH, UNKNOWN, VERSION, UNSET = 15, 16, 18, 999, 25, 1

VALUE_OF = {
    "clock": "sm_clock_mhz",
    "power": "power_watts",
    "energy": "energy_joules",
}


def opened(device=H100, **options):
    return open_nvml_counters(device, **options)


def reason(device=H100):
    with pytest.raises(CountersUnavailableError) as error:
        opened(device)
    return str(error.value)


def h100(nvml, **values):
    return nvml.gpu(UUID, **{**LOADED_H100, **values})


def test_hopper_has_activity_clock_power_and_energy_in_our_units(nvml):
    h100(nvml)
    counters = opened()
    clock = counters.sample()
    assert (clock.source, clock.sm_clock_mhz, clock.power_watts, clock.energy_joules) == ("nvml-gpm", 1755, 650, 5000)
    counters.close()
    assert nvml.inits == nvml.samples == 0


def test_activity_is_a_share_between_two_samples_100_ms_apart(nvml):
    h100(nvml)
    clock = FakeClock()
    counters = opened(clock=clock)
    clock.advance(0.05)
    assert counters.sample().tensor_active is None
    clock.advance(0.2)

    time.sleep(0.1)  # the stand-in, like the driver, wants real time between its samples
    reading = counters.sample()
    assert (reading.tensor_active, reading.sm_active, reading.dram_active) == (0.425, 0.88, 0.55)


def test_gpus_before_hopper_have_no_activity(nvml):
    h100(nvml, has_gpm=0)
    counters = opened()
    assert counters.name == "nvml"
    assert counters.sample().tensor_active is None
    assert counters.sample().energy_joules == 5000


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


def test_without_the_permission_to_read_activity_the_other_values_are_read(nvml):
    h100(nvml)
    nvml.fail("gpm_sample", NO_PERMISSION)
    counters = opened()
    assert (counters.name, counters.sample().energy_joules) == ("nvml", 5000)
    counters.close()
    assert nvml.inits == 0


@pytest.mark.parametrize(
    ("error", "told"),
    [(LOST, "fell off the bus"), (RESET_REQUIRED, "nvidia-smi --gpu-reset"), (UNSET, "NVML says")],
)
@pytest.mark.parametrize("function", ["clock", "power", "gpm_sample"])
def test_a_gpu_that_is_lost_while_it_runs_ends_the_source(nvml, function, error, told):

    h100(nvml)
    counters = opened()
    counters.sample()
    nvml.fail(function, error)
    time.sleep(0.1)
    with pytest.raises(CountersUnavailableError, match=told):
        counters.sample()
    counters.close()


def test_activity_that_is_refused_later_is_unknown_from_there_on(nvml):
    h100(nvml)
    counters = opened()
    nvml.fail("gpm_metrics", NOT_SUPPORTED)
    time.sleep(0.1)
    assert (counters.sample().tensor_active, counters.sample().power_watts) == (None, 650)


@pytest.mark.parametrize(
    ("driver", "unknown", "name"),
    [(525, [], "nvml-gpm"), (510, [], "nvml"), (418, [], "nvml"), (375, ["energy_joules"], "nvml")],
)
def test_older_drivers_lack_functions_and_these_values_are_unknown(nvml_library, driver, unknown, name):
    with connected(nvml_library(driver)) as nvml:
        h100(nvml)
        counters = opened()
        reading = counters.sample()
        assert counters.name == name
        assert [name for name in VALUE_OF.values() if getattr(reading, name) is None] == unknown


def test_only_nvidias_gpus_are_read(nvml):
    assert reason(DeviceIdentity("rocm", "AMD Instinct MI300X")).endswith("of NVIDIA GPUs only")


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
    counters = opened(DeviceIdentity("cuda", "H100 MIG 1g.10gb", uuid, visible_as=f"MIG-{INSTANCES[1]}"))
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


PRINT = """
from flopwatch.hardware.counters.nvml import open_nvml_counters
from flopwatch.hardware.counters.protocol import DeviceIdentity
try:
    print(open_nvml_counters(DeviceIdentity("cuda", "x", "none")).name)
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
