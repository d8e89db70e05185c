"""dcgm-exporter's page, in the form of its documentation, from a real HTTP server."""

import socket

import pytest

from flopwatch.hardware.counters.dcgm import DcgmProbe
from flopwatch.hardware.counters.protocol import CountersUnavailableError, DeviceIdentity
from flopwatch.records.counters import window_of
from flopwatch.testing import FakeClock
from support.dcgm_exporter import LOADED, Exporter, gpu, page
from testbeds.stand_in_nvml import LOADED_H100

UUID = "604ac76c-d9cf-fef3-62e9-d92044ab6e52"
OTHER = "5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
A100 = DeviceIdentity("cuda", "NVIDIA A100-SXM4-40GB", UUID)


@pytest.fixture
def exporter():
    made = Exporter()
    made.text = page(gpu(0, OTHER, dict.fromkeys(LOADED, "0")), gpu(1, UUID, LOADED))
    yield made
    made.close()


def reason(address, device=A100):
    with pytest.raises(CountersUnavailableError) as error:
        DcgmProbe(address).open(device)
    return str(error.value)


def test_the_values_of_the_device_with_torchs_uuid_are_read(exporter):
    reading = DcgmProbe(exporter.address).open(A100).sample()
    assert (reading.tensor_active, reading.sm_active, reading.dram_active) == (0.430433, 0.912, 0.690789)
    assert (reading.sm_clock_mhz, reading.power_watts) == (1410, 391.263)
    assert reading.throttled == ("power cap",)
    assert reading.source == "dcgm"


def test_the_device_is_found_by_its_pci_address(exporter):
    device = DeviceIdentity("cuda", "A100", pci_bus_id="0000:02:00.0")
    assert DcgmProbe(exporter.address).open(device).sample().tensor_active == 0.430433


def test_energy_of_the_page_is_not_used_because_it_ends_at_another_time_than_a_window(exporter):
    """400 W all the time, read by the exporter every 30 s; the steps of 10 s would seem to have drawn 1200 W."""
    clock = FakeClock()
    counters = DcgmProbe(exporter.address, clock).open(A100)
    first = counters.sample()
    clock.advance(10.0)
    exporter.text = exporter.text.replace("322036000", str(322036000 + 30 * 400_000))
    window = window_of([counters.sample()], first)
    assert window.energy_joules is None
    assert window.power_watts == 391.263


def test_activity_that_the_exporter_has_not_read_again_is_not_that_of_the_time_since(exporter):
    counters = DcgmProbe(exporter.address).open(A100)
    first, again = counters.sample(), counters.sample()
    assert (first.tensor_active, first.sm_active) == (0.430433, 0.912)
    assert (again.tensor_active, again.sm_active, again.dram_active) == (None, None, None)
    assert (again.sm_clock_mhz, again.power_watts) == (1410, 391.263)
    exporter.text = exporter.text.replace("322036000", "322037500")
    assert counters.sample().tensor_active == 0.430433


@pytest.mark.parametrize("value", ["+Inf", "-Inf", "NaN", "-1", "140737488355328", "9223372036854775792"])
def test_a_value_that_dcgm_writes_for_an_unknown_one_is_unknown(value, exporter):
    counters = DcgmProbe(exporter.address).open(A100)
    exporter.text = page(gpu(1, UUID, {**dict.fromkeys(LOADED, value), "DCGM_FI_DEV_SM_CLOCK": "1410"}))
    reading = counters.sample()
    assert (reading.tensor_active, reading.power_watts, reading.energy_joules, reading.throttled) == (None,) * 4
    assert reading.sm_clock_mhz == 1410


def test_a_page_that_ends_within_a_number_does_not_give_another_number(exporter):
    counters = DcgmProbe(exporter.address).open(A100)
    exporter.text = exporter.text.partition("391.263")[0] + "39"
    reading = counters.sample()
    assert (reading.sm_clock_mhz, reading.power_watts) == (1410, None)


def test_the_name_of_the_reasons_before_dcgm_4_is_read_too(exporter):
    exporter.text = exporter.text.replace("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS")
    assert DcgmProbe(exporter.address).open(A100).sample().throttled == ("power cap",)


def test_the_address_comes_from_the_environment(exporter, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_DCGM", exporter.address)
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:1")
    assert DcgmProbe().open(A100).sample().sm_clock_mhz == 1410


def instances(*numbers):
    parent = gpu(1, UUID, {"DCGM_FI_DEV_SM_CLOCK": "1410"})
    return [parent] + [
        gpu(
            1,
            UUID,
            {**LOADED, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": f"0.{number}"},
            f'GPU_I_PROFILE="1g.5gb",GPU_I_ID="{number}",',
        )
        for number in numbers
    ]


def test_a_mig_instance_is_found_by_its_gpu_and_number_which_nvml_knows(exporter, nvml):
    exporter.text = page(*instances(7, 9))
    nvml.gpu(UUID, **LOADED_H100)
    nvml.instance(0, 7, "c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f")
    nvml.instance(0, 9, "cba663e8-9bed-5b25-b243-5985ef7c9beb")
    device = DeviceIdentity("cuda", "A100", UUID, visible_as="MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb")
    reading = DcgmProbe(exporter.address).open(device).sample()
    assert reading.tensor_active == 0.9
    assert reading.power_watts is reading.energy_joules is None  # the exporter shows those of the GPU
    assert nvml.inits == 0


def test_activity_of_an_instance_is_not_that_of_the_gpu_with_all_instances(exporter):
    """An exporter that was told to show GPUs and instances."""
    whole = gpu(1, UUID, {**LOADED, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "0.1"})
    exporter.text = page(whole, *instances(7)[1:])
    assert DcgmProbe(exporter.address).open(A100).sample().tensor_active == 0.7


def test_one_of_several_instances_is_not_guessed(exporter):
    exporter.text = page(*instances(7, 9))
    assert "2 MIG instances" in reason(exporter.address)


def test_the_only_instance_is_the_one(exporter):
    exporter.text = page(*instances(7))
    reading = DcgmProbe(exporter.address).open(A100).sample()
    assert (reading.tensor_active, reading.power_watts) == (0.7, None)


def test_without_the_tensor_cores_activity_it_is_said_what_to_export(exporter):
    exporter.text = page(gpu(1, UUID, {"DCGM_FI_DEV_SM_CLOCK": "1410"}))
    assert "has no DCGM_FI_PROF_PIPE_TENSOR_ACTIVE of this GPU; add it" in reason(exporter.address)


def test_activity_that_is_missing_while_a_profiler_runs_is_unknown(exporter):
    counters = DcgmProbe(exporter.address).open(A100)
    exporter.text = page(gpu(1, UUID, {"DCGM_FI_DEV_SM_CLOCK": "1410", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "NaN"}))
    reading = counters.sample()
    assert (reading.tensor_active, reading.sm_clock_mhz) == (None, 1410)


def test_a_device_that_the_page_does_not_know_any_more_ends_the_source(exporter):
    counters = DcgmProbe(exporter.address).open(A100)
    exporter.text = page(gpu(0, OTHER, LOADED))
    with pytest.raises(CountersUnavailableError, match="no value of this GPU any more"):
        counters.sample()


@pytest.mark.parametrize(
    "text",
    ["", "<html>", "\x00\xff{", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{} x", "{} 1\n} {"],
)
def test_a_page_of_something_else_is_no_source(exporter, text):
    exporter.text = text
    assert "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE" in reason(exporter.address)


def test_a_page_of_a_whole_cluster_is_not_read_because_it_costs_too_much(exporter):
    """8 MB take half a second of a core, and they are read every 5 s."""
    exporter.text += "# of another machine\n" * 60_000
    assert "more than 1 MiB, more than that of one machine" in reason(exporter.address)


def test_an_error_of_the_server_is_told(exporter):
    exporter.status = 500
    assert "answers with HTTP 500" in reason(exporter.address)


def test_without_an_exporter_it_is_said_what_to_start():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        told = reason(f"http://127.0.0.1:{bound.getsockname()[1]}/metrics")
    assert "no dcgm-exporter answers at http://127.0.0.1:" in told
    assert "FLOPWATCH_DCGM" in told


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_left_after_a_second():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "TimeoutError" in reason(f"http://127.0.0.1:{silent.getsockname()[1]}/metrics")


@pytest.mark.parametrize("address", ["https://localhost:9400/metrics", "file:///etc/passwd", "http://", "http://a:b/"])
def test_an_address_that_is_none_is_refused(address):
    assert address in reason(address)


def test_a_device_without_uuid_and_address_is_not_guessed(exporter):
    assert "torch does not tell the UUID" in reason(exporter.address, DeviceIdentity("cuda", "A100", visible_as="0"))


def test_the_default_address_is_the_exporters(monkeypatch):
    monkeypatch.delenv("FLOPWATCH_DCGM", raising=False)
    assert "http://localhost:9400/metrics" in reason(None)
