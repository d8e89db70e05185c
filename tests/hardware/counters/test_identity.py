"""Which device is meant, in words that drivers understand; and a lost GPU in a run."""

import time

import pytest
import torch

from flopwatch.hardware.counters.protocol import DeviceIdentity
from flopwatch.hardware.counters.sampler import CounterSampler
from flopwatch.hardware.identity import identify
from testbeds.stand_in_nvml import LOADED_H100

GPU = DeviceIdentity("cuda", "NVIDIA H100", "5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77")


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


def test_a_run_reads_the_real_bindings_until_the_gpu_is_lost(nvml):
    nvml.gpu(GPU.uuid, **LOADED_H100)
    told = []
    sampler = CounterSampler(GPU, told.append, interval_seconds=0.12)
    until = time.monotonic() + 30
    while (window := sampler.take()) is None or window.tensor_active is None:
        assert time.monotonic() < until, told
        time.sleep(0.005)
    assert (window.source, window.sm_clock_mhz) == ("nvml-gpm", 1755)
    nvml.set(0, is_lost=1)
    while not told:
        assert time.monotonic() < until
        time.sleep(0.005)
    sampler.close()
    assert "fell off the bus" in told[0]
    assert nvml.inits == nvml.samples == 0
