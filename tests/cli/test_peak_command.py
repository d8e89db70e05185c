import json

import click
import pytest

import flopwatch as package
from flopwatch.hardware import measure_peak


def test_a_product_is_shown_with_all_its_types_where_they_come_from_and_how_sure_that_is(flopwatch):
    status, out, err = flopwatch("peak", "--name", "NVIDIA A100-SXM4-80GB")
    assert (status, err) == (0, "")
    assert (
        out
        == """
A100 SXM4 80GB

  dtype  dense TFLOP/s
  fp64            19.5
  fp32            19.5
  tf32           156.0
  bf16           312.0
  fp16           312.0
  int8           624.0
  int4         1,248.0

  kind        datasheet
  confidence  high
  source      fp64: NVIDIA A100 datasheet r4/2188504 and whitepaper; NVIDIA
              aiconfigurator a100_*.yaml (rate fp64_tensor, which matmuls use)
  source      fp32, tf32, bf16, fp16, int8, int4: NVIDIA A100 datasheet
              r4/2188504 and whitepaper; NVIDIA aiconfigurator a100_*.yaml

"""
    )


def test_one_type_can_be_asked_for(flopwatch):
    status, out, _ = flopwatch("peak", "--name", "NVIDIA H100 80GB HBM3", "--dtype", "bfloat16")
    assert status == 0
    assert "bf16           989.4" in out
    assert "fp16" not in out.split("kind")[0]


def test_json_carries_the_whole_records(flopwatch):
    status, out, _ = flopwatch("peak", "--name", "NVIDIA H100 80GB HBM3", "--dtype", "bf16", "--json")
    assert status == 0
    peak = package.peak_flops(name="NVIDIA H100 80GB HBM3", dtype="bf16")
    assert json.loads(out) == {"peaks": [peak.to_json()]}
    assert peak.flops_per_s == 989.4e12


def test_an_unknown_product_ends_with_status_1_and_says_what_to_do(flopwatch):
    status, out, err = flopwatch("peak", "--name", "NVIDIA RTX A1000")
    assert (status, out) == (1, "")
    assert "no product in the table reports the name 'NVIDIA RTX A1000'" in err
    assert "Similar products: RTX A" in err
    assert "torch.cuda.get_device_name()" in err


def test_a_type_the_product_lacks_ends_with_status_1(flopwatch):
    status, _, err = flopwatch("peak", "--name", "Tesla T4", "--dtype", "bf16")
    assert status == 1
    assert "Tesla T4 has no dense bf16 rate; it has fp64, fp32, fp16, int8, int4" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--name", "Tesla T4", "--dtype", "bf17"), "dtype 'bf17' is not known (did you mean 'bf16'?); use one of "),
        (("--device", "gpu"), "'gpu' is not a device"),
        (("--name", "Tesla T4", "--device", "cpu"), "pass one of them"),
        (("--measure", "--name", "Tesla T4"), "--measure needs a device of this machine"),
        (("--measure", "--device", "cpu", "--dtype", "fp8"), "fp8 cannot be measured"),
        (("--seconds", "soon"), "Invalid value for '--seconds'"),
    ],
)
def test_wrong_input_ends_with_status_2_and_a_message(flopwatch, arguments, message):
    status, out, err = flopwatch("peak", *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_a_figure_in_the_environment_is_shown_as_such(flopwatch, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_PEAK_TFLOPS", "50")
    status, out, _ = flopwatch("peak", "--device", "cpu")
    assert status == 0
    assert "override" in out
    assert "50.0" in out


def test_measuring_prints_the_measured_peak_and_keeps_it(flopwatch):
    status, out, _ = flopwatch("peak", "--measure", "--device", "cpu", "--dtype", "fp32", "--seconds", "0.1", "--json")
    assert status == 0
    (peak,) = json.loads(out)["peaks"]
    assert (peak["kind"], peak["dtype"]) == ("measured", "fp32")
    assert measure_peak("cpu", "fp32").to_json() == peak


def test_help_names_the_commands(flopwatch):
    status, out, _ = flopwatch("--help")
    assert status == 0
    assert "peak" in out


def test_a_command_that_does_not_exist_is_an_error_with_a_suggestion(flopwatch):
    status, _, err = flopwatch("peek")
    assert status == 2
    assert "No such command 'peek'" in err
    if hasattr(click.exceptions, "NoSuchCommand"):  # click before 8.4 suggests nothing
        assert "peak" in err
