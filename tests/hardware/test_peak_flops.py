"""The peak of a device. Expected figures are the vendors' (H100 and A100 whitepapers, ROCm's architecture pages)."""

import math
import sys

import pytest
import torch

from flopwatch import InputError, Peak
from flopwatch.hardware import DeviceFacts, explain_unknown, list_peaks, peak_flops
from flopwatch.testing import fake_device


def test_an_h100_does_989_teraflops_in_bf16():
    assert peak_flops(fake_device("h100"), "bf16") == Peak(
        flops_per_s=989.4e12,
        device="H100 SXM5 80GB",
        dtype="bf16",
        source="NVIDIA H100 whitepaper v1.04 tables 1 and 3; NVIDIA cudnn-frontend PR 650",
        kind="datasheet",
        confidence="high",
        fraction=1.0,
    )


def test_a_product_can_be_looked_up_by_name_without_having_it():
    peak = peak_flops(name="NVIDIA H100 80GB HBM3", dtype=torch.bfloat16)
    assert (peak.flops_per_s, peak.dtype) == (989.4e12, "bf16")


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [("NVIDIA A100-SXM4-80GB", "bf16", 312), ("Tesla V100-SXM2-16GB", "fp16", 125), ("Apple M5", "fp16", None)],
)
def test_without_a_dtype_a_product_is_looked_up_in_bf16_else_fp16(name, dtype, teraflops):
    peak = peak_flops(name=name)
    assert peak.dtype == dtype
    if teraflops is not None:
        assert peak.flops_per_s == teraflops * 1e12


def test_a_mig_slice_gets_its_share_of_the_multiprocessors():
    peak = peak_flops(fake_device("a100-mig-1g.5gb"), "bf16")
    assert peak.flops_per_s == pytest.approx(312e12 * 14 / 108, rel=1e-12)
    assert peak.fraction == 14 / 108
    assert peak_flops(fake_device("a100-80gb-mig-1g.10gb"), "bf16").flops_per_s == peak.flops_per_s


def test_an_mi300x_in_eight_partitions_gets_an_eighth():
    whole, part = peak_flops(fake_device("mi300x"), "bf16"), peak_flops(fake_device("mi300x-cpx"), "bf16")
    assert whole.flops_per_s == 1307.4e12
    assert part.flops_per_s == 1307.4e12 / 8
    assert part.fraction == 0.125


def test_more_units_than_the_product_has_do_not_raise_its_peak():
    assert peak_flops(DeviceFacts("NVIDIA H100 PCIe", "cuda", 132), "bf16").flops_per_s == 756e12


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "fp64", 19.5),  # tensor cores; 9.7 is the vector rate
        ("AMD Instinct MI250X", "fp32", 47.9),  # matrix cores; 23.9 is the vector rate
        ("AMD Instinct MI300X", "fp64", 163.4),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
    ],
)
def test_where_a_product_has_two_rates_the_peak_is_the_one_matmuls_run_at(name, dtype, teraflops):
    peak = peak_flops(name=name, dtype=dtype)
    assert (peak.flops_per_s, peak.dtype) == (pytest.approx(teraflops * 1e12), dtype)


def test_a_dtype_the_product_does_not_have_is_unknown():
    assert peak_flops(name="NVIDIA A100-SXM4-80GB", dtype="fp8") is None
    assert "no dense fp8 rate; it has fp64, fp32" in explain_unknown(name="NVIDIA A100-SXM4-80GB", dtype="fp8")


def test_an_unknown_device_has_no_peak_and_the_explanation_says_what_to_do():
    device = fake_device("unheard-of")
    assert peak_flops(device, "bf16") is None
    assert list_peaks(device) == []
    explanation = explain_unknown(device, "bf16")
    for way_out in ("FLOPWATCH_PEAK_TFLOPS", "override_flops_per_s", "flopwatch peak --measure"):
        assert way_out in explanation


def test_explaining_a_known_peak_says_that_it_is_known():
    assert explain_unknown(name="Tesla T4", dtype="fp16").startswith("The peak is known: 6.5e+13 FLOP/s")


def test_an_argument_overrides_everything(monkeypatch):
    monkeypatch.setenv("FLOPWATCH_PEAK_TFLOPS", "5")
    peak = peak_flops(fake_device("h100"), "bf16", override_flops_per_s=1e12)
    assert (peak.flops_per_s, peak.kind, peak.dtype) == (1e12, "override", "bf16")


def test_the_environment_overrides_the_table(monkeypatch):
    monkeypatch.setenv("FLOPWATCH_PEAK_TFLOPS", "123.5")
    peak = peak_flops(fake_device("h100"), "bf16")
    assert (peak.flops_per_s, peak.kind) == (123.5e12, "override")
    assert "FLOPWATCH_PEAK_TFLOPS" in peak.source


def test_the_environment_speaks_of_the_devices_here_not_of_a_product_looked_up(monkeypatch):
    monkeypatch.setenv("FLOPWATCH_PEAK_TFLOPS", "123.5")
    assert peak_flops(name="NVIDIA A100-SXM4-80GB", dtype="bf16").flops_per_s == 312e12


@pytest.mark.parametrize("text", ["fast", "-1", "0", "nan", "inf", "1e999"])
def test_an_environment_figure_that_is_no_positive_number_is_an_error(monkeypatch, text):
    monkeypatch.setenv("FLOPWATCH_PEAK_TFLOPS", text)
    with pytest.raises(InputError, match=f"FLOPWATCH_PEAK_TFLOPS={text!r}"):
        peak_flops(fake_device("h100"), "bf16")


@pytest.mark.parametrize("figure", [0, -1.0, math.nan, math.inf, "much"])
def test_an_override_that_is_no_positive_number_is_an_error(figure):
    with pytest.raises(InputError, match="override_flops_per_s"):
        peak_flops(fake_device("h100"), "bf16", override_flops_per_s=figure)


def test_device_and_name_together_are_an_error():
    with pytest.raises(InputError, match="pass one of them"):
        peak_flops("cpu", name="NVIDIA H100 80GB HBM3")


def test_a_device_that_is_not_here_is_an_error():
    with pytest.raises(InputError, match="'xpu:7' cannot be used on this machine"):
        peak_flops("xpu:7", "bf16")


def test_a_laptop_gpu_outside_the_table_is_derived_at_the_half_rate_of_geforce():
    # RTX 4090 Laptop: 76 multiprocessors, 2040 MHz boost; GeForce Ada does 512 FLOP per clock with fp32 accumulation.
    laptop = DeviceFacts("NVIDIA GeForce RTX 4090 Laptop GPU", "cuda", 76, 15.7, None, (8, 9), 2040.0)
    peak = peak_flops(laptop, "bf16")
    assert peak.flops_per_s == pytest.approx(76 * 512 * 2040e6)
    assert (peak.kind, peak.confidence) == ("derived", "low")


@pytest.mark.parametrize(
    ("name", "compute_capability"),
    [
        ("NVIDIA H30", (9, 0)),  # an H20 has the architecture of an H100 and a quarter of its rate
        ("NVIDIA A11G", (8, 6)),  # data-centre parts of 8.6 run at full rate or at half
        ("NVIDIA GeForce GTX 1650", (7, 5)),  # no tensor cores
        ("NVIDIA GeForce RTX 6090 D", (12, 0)),  # capped
        ("GRID A100-40C", (8, 0)),  # time-sliced
        ("NVIDIA GeForce RTX 6090", (13, 0)),  # an architecture nobody has described
    ],
)
def test_nothing_is_derived_where_the_architecture_does_not_give_the_rate(name, compute_capability):
    assert peak_flops(DeviceFacts(name, "cuda", 64, 40.0, None, compute_capability, 1700.0), "bf16") is None


def test_a_product_in_the_table_is_not_derived_for_a_dtype_its_record_lacks():
    card = DeviceFacts("NVIDIA GeForce RTX 3090", "cuda", 82, 23.7, None, (8, 6), 1695.0)
    assert peak_flops(card, "fp8") is None


def test_the_compute_type_now_is_taken_when_none_is_given(cuda_autocast):
    assert peak_flops(fake_device("h100")).flops_per_s == 66.9e12
    cuda_autocast(torch.bfloat16)
    assert peak_flops(fake_device("h100")).flops_per_s == 989.4e12


def test_allowing_tf32_makes_the_tf32_rate_the_peak(restored_fp32_precision):
    torch.backends.cuda.matmul.allow_tf32 = True
    assert peak_flops(fake_device("a100")).flops_per_s == 156e12
    assert peak_flops(fake_device("v100")).flops_per_s == 15.7e12  # before Ampere the switch does nothing


def test_all_types_of_a_product_are_listed_once_each():
    peaks = {peak.dtype: peak.flops_per_s / 1e12 for peak in list_peaks(fake_device("a100"))}
    assert peaks == pytest.approx(
        {"fp64": 19.5, "fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312, "int8": 624, "int4": 1248}
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports what a CPU can do")
def test_the_cpu_of_this_machine_has_a_derived_peak():
    peak = peak_flops("cpu", "fp32")
    assert peak is None or (peak.kind == "derived" and peak.confidence == "low" and " cores x " in peak.source)


def test_a_figure_in_the_wrong_unit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOPWATCH_PEAK_TFLOPS", "989.4e12")

    with pytest.raises(InputError, match="more than any device reaches"):
        peak_flops("cpu")
