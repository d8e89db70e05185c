"""AMD's amdsmi, by a stand-in for the module with the functions and dictionaries of its documentation."""

import os
import sys
from enum import IntEnum
from types import ModuleType

import pytest

from flopwatch.hardware.counters.amd import AmdProbe
from flopwatch.hardware.counters.protocol import CountersUnavailableError, DeviceIdentity

MI300X = DeviceIdentity("rocm", "AMD Instinct MI300X", pci_bus_id="0000:0c:00.0")


class AmdSmiException(Exception):  # noqa: N818 - amdsmi calls it so
    pass


class AmdSmiClkType(IntEnum):
    SYS = 0
    GFX = 0


class StandInAmdsmi(ModuleType):
    """Two devices; `answers` has what the functions return for the second one, or the exception that they raise."""

    AmdSmiException = AmdSmiException
    AmdSmiClkType = AmdSmiClkType

    def __init__(self):
        super().__init__("amdsmi")
        self.inits = 0
        self.init_error = None
        self.serial = "0x3938343030303031"
        self.answers = {
            "gpu_activity": {"gfx_activity": 97, "umc_activity": 41, "mm_activity": "N/A"},
            "power_info": {"current_socket_power": 731, "average_socket_power": "N/A", "power_limit": 750000000},
            "energy_count": {"energy_accumulator": 2_000_000, "counter_resolution": 15.3, "timestamp": 1},
            "clock_info": {"clk": 2084, "min_clk": 132, "max_clk": 2100, "clk_locked": "N/A"},
            "violation_status": {"active_ppt_pwr": True, "active_socket_thrm": False, "active_hbm_thrm": "N/A"},
            "gpu_process_list": [
                {"pid": os.getpid(), "mem": 9, "memory_usage": {"vram_mem": 4 << 30}},
                {"pid": 1, "mem": 9, "memory_usage": {"vram_mem": 3 << 30}},
            ],
        }

    def __getattr__(self, name):
        answers = self.__dict__.get("answers", {})
        asked = name.removeprefix("amdsmi_get_")
        if asked not in answers:
            raise AttributeError(name)

        def answer(handle, *_):
            assert handle == "second"
            if isinstance(answers[asked], Exception):
                raise answers[asked]
            return answers[asked]

        return answer

    def amdsmi_init(self):
        if self.init_error:
            raise self.init_error
        self.inits += 1

    def amdsmi_shut_down(self):
        self.inits -= 1

    def amdsmi_get_processor_handles(self):
        return ["first", "second"]

    def amdsmi_get_gpu_device_bdf(self, handle):
        return {"first": "0000:05:00.0", "second": "0000:0C:00.0"}[handle]

    def amdsmi_get_gpu_asic_info(self, handle):
        return {"asic_serial": {"first": "0x1", "second": self.serial}[handle]}


@pytest.fixture
def amdsmi(monkeypatch):
    stand_in = StandInAmdsmi()
    monkeypatch.setitem(sys.modules, "amdsmi", stand_in)
    return stand_in


def test_the_values_are_in_our_units(amdsmi):
    counters = AmdProbe().open(MI300X)
    reading = counters.sample()
    assert reading.source == "amdsmi"
    assert (reading.sm_active, reading.dram_active, reading.tensor_active) == (0.97, 0.41, None)
    assert (reading.power_watts, reading.sm_clock_mhz) == (731, 2084)
    assert reading.energy_joules == pytest.approx(30.6)
    assert reading.throttled == ("power cap",)
    assert reading.other_memory_bytes == 3 << 30
    counters.close()
    assert amdsmi.inits == 0


def test_the_words_of_earlier_releases_are_read_too(amdsmi):
    amdsmi.answers["power_info"] = {"average_socket_power": 512, "current_socket_power": "N/A"}
    amdsmi.answers["clock_info"] = {"cur_clk": 1700}
    amdsmi.answers["energy_count"] = {"power": 1_000_000, "counter_resolution": 15.3, "timestamp": 1}
    reading = AmdProbe().open(MI300X).sample()
    assert (reading.power_watts, reading.sm_clock_mhz) == (512, 1700)
    assert reading.energy_joules == pytest.approx(15.3)


FIELDS = {
    "gpu_activity": ("sm_active", "dram_active"),
    "power_info": ("power_watts",),
    "energy_count": ("energy_joules",),
    "clock_info": ("sm_clock_mhz",),
    "violation_status": ("throttled",),
    "gpu_process_list": ("other_memory_bytes",),
}


@pytest.mark.parametrize("answer", [AmdSmiException("AMDSMI_STATUS_NOT_SUPPORTED"), "N/A", None])
@pytest.mark.parametrize("function", FIELDS)
def test_what_amdsmi_does_not_tell_is_unknown(amdsmi, function, answer):
    whole = AmdProbe().open(MI300X).sample()
    amdsmi.answers[function] = answer
    counters = AmdProbe().open(MI300X)
    for _ in range(2):
        reading = counters.sample()
        missing = {field for fields in FIELDS.values() for field in fields if getattr(reading, field) is None}
        assert missing == set(FIELDS[function])
    assert whole.power_watts == 731


def test_values_that_are_not_available_are_unknown(amdsmi):
    for name in ("gpu_activity", "power_info", "clock_info", "violation_status"):
        amdsmi.answers[name] = dict.fromkeys(amdsmi.answers[name], "N/A")
    reading = AmdProbe().open(MI300X).sample()
    assert reading.sm_active is reading.power_watts is reading.sm_clock_mhz is reading.throttled is None


def test_a_device_is_found_by_the_serial_number_that_hip_calls_its_uuid(amdsmi):
    # The 16 characters of the serial number as torch writes them, as the bytes of a UUID.
    written = b"3938343030303031".hex()
    uuid = "-".join((written[:8], written[8:12], written[12:16], written[16:20], written[20:]))
    reading = AmdProbe().open(DeviceIdentity("rocm", "AMD Instinct MI300X", uuid)).sample()
    assert reading.power_watts == 731


def test_a_device_that_amdsmi_does_not_know_is_not_guessed(amdsmi):
    with pytest.raises(CountersUnavailableError, match="no device with the PCI address unknown"):
        AmdProbe().open(DeviceIdentity("rocm", "AMD Instinct MI300X", "5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"))
    assert amdsmi.inits == 0


@pytest.mark.parametrize("function", range(2))
def test_one_of_several_partitions_is_not_guessed(function, amdsmi, monkeypatch):
    """As of an MI300X in mode CPX, whose partitions differ in the PCI function, which torch does not tell."""
    places = {"first": "0000:0C:00.1", "second": "0000:0C:00.0"}
    monkeypatch.setattr(StandInAmdsmi, "amdsmi_get_gpu_device_bdf", lambda _, handle: places[handle])
    with pytest.raises(CountersUnavailableError, match="divided into 2 partitions"):
        AmdProbe().open(DeviceIdentity("rocm", "AMD Instinct MI300X", pci_bus_id=f"0000:0c:00.{function}"))
    assert amdsmi.inits == 0


def test_a_device_that_answers_nothing_any_more_ends_the_source(amdsmi):
    counters = AmdProbe().open(MI300X)
    amdsmi.answers = dict.fromkeys(amdsmi.answers, AmdSmiException("AMDSMI_STATUS_NO_DATA"))
    with pytest.raises(CountersUnavailableError, match="AMDSMI_STATUS_NO_DATA"):
        counters.sample()


def test_a_driver_that_is_not_loaded_is_told(amdsmi):
    amdsmi.init_error = AmdSmiException("AMDSMI_STATUS_DRIVER_NOT_LOADED")
    with pytest.raises(CountersUnavailableError, match="amdsmi says: AMDSMI_STATUS_DRIVER_NOT_LOADED"):
        AmdProbe().open(MI300X)


@pytest.mark.parametrize("error", ["ImportError('no module')", "KeyError('libamd_smi.so')", "OSError('no library')"])
def test_without_the_package_it_is_said_where_it_is(monkeypatch, tmp_path, error):
    (tmp_path / "amdsmi.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(CountersUnavailableError, match="/opt/rocm/share/amd_smi"):
        AmdProbe().open(MI300X)
