import pytest
import torch

from flopwatch import InputError
from flopwatch.hardware import DeviceFacts, read_device
from flopwatch.hardware.device import find_device
from flopwatch.testing import FAKE_DEVICES, fake_device
from support.fakes import fake_torch

WITH_A_DEVICE_TYPE_HERE = [key for key, facts in FAKE_DEVICES.items() if facts.kind != "npu"]


@pytest.mark.parametrize("product", WITH_A_DEVICE_TYPE_HERE)
def test_what_torch_reports_is_read_in_full(product):
    facts = fake_device(product)
    assert read_device(facts.kind, fake_torch(facts)) == facts


def test_a_device_that_follows_torchs_naming_is_read_by_name():
    gaudi = DeviceFacts("GAUDI2", "hpu")
    assert read_device("hpu:0", fake_torch(gaudi)) == gaudi


def test_without_a_device_the_current_accelerator_is_read():
    facts = fake_device("h100")
    assert read_device(None, fake_torch(facts)) == facts


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_the_cpu_is_read():
    assert find_device() == torch.device("cpu")
    assert read_device().kind == "cpu"


def test_on_nvidia_the_field_for_amds_architecture_is_not_believed():
    h100 = fake_device("h100")
    assert fake_torch(h100).cuda.get_device_properties(0).gcnArchName == "NVIDIA H100 80GB HBM3"
    assert read_device("cuda", fake_torch(h100)).gcn_arch is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_here_is_an_error_that_says_so():
    with pytest.raises(InputError, match="device 'cuda:3' cannot be used on this machine"):
        read_device("cuda:3")


def test_an_unknown_fake_device_is_an_error_that_names_the_known_ones():
    with pytest.raises(InputError, match="use one of: h100"):
        fake_device("h1000")
