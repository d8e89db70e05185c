import pytest
import torch

from flopwatch import InputError
from flopwatch.hardware import matmul_dtype
from flopwatch.hardware.peaks import canonical_dtype


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("bf16", "bf16"),
        ("bfloat16", "bf16"),
        ("torch.bfloat16", "bf16"),
        ("BF16", "bf16"),
        (torch.bfloat16, "bf16"),
        ("fp16", "fp16"),
        ("float16", "fp16"),
        ("half", "fp16"),
        (torch.half, "fp16"),
        ("float32", "fp32"),
        ("float", "fp32"),
        (torch.float32, "fp32"),
        ("tf32", "tf32"),
        ("double", "fp64"),
        (torch.float64, "fp64"),
        ("fp8", "fp8"),
        ("float8_e4m3fn", "fp8"),
        ("float8-e5m2", "fp8"),
        (torch.float8_e4m3fn, "fp8"),
        (torch.float8_e5m2fnuz, "fp8"),
        ("nvfp4", "fp4"),
        (torch.int8, "int8"),
    ],
)
def test_a_dtype_is_known_by_any_common_spelling(spelling, canonical):
    assert canonical_dtype(spelling) == canonical


@pytest.mark.parametrize("spelling", ["bf17", "", torch.complex64, None])
def test_an_unknown_dtype_is_an_error_that_names_the_known_ones(spelling):
    with pytest.raises(InputError, match=r"is not known.*; use one of .*bf16"):
        canonical_dtype(spelling)


def test_autocast_decides_whatever_the_parameters_are():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matmul_dtype("cpu", torch.float32) == "bf16"
    assert matmul_dtype("cpu", torch.float32) == "fp32"


def test_autocast_of_one_device_says_nothing_about_another(cuda_autocast):
    cuda_autocast(torch.float16)
    assert matmul_dtype("cuda", torch.float32) == "fp16"
    assert matmul_dtype("cpu", torch.float32) == "fp32"


def test_without_autocast_the_parameters_decide():
    assert matmul_dtype("cuda", torch.bfloat16) == "bf16"
    assert matmul_dtype("cuda", torch.float8_e4m3fn) == "fp8"


def test_without_parameters_torchs_default_type_decides():
    torch.set_default_dtype(torch.float64)
    try:
        assert matmul_dtype("cpu") == "fp64"
    finally:
        torch.set_default_dtype(torch.float32)
    assert matmul_dtype("cpu") == "fp32"


def test_weights_stored_as_integers_do_not_tell_the_compute_type():
    assert matmul_dtype("cuda", torch.uint8) is None


def allow_by_the_old_switch():
    torch.backends.cuda.matmul.allow_tf32 = True


def allow_by_precision():
    torch.set_float32_matmul_precision("high")


def allow_by_the_new_switch():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


HAS_NEW_SWITCH = hasattr(torch.backends.cuda.matmul, "fp32_precision")
needs_the_new_switch = pytest.mark.skipif(not HAS_NEW_SWITCH, reason="this torch has no fp32_precision")


@pytest.mark.parametrize(
    "allow",
    [
        allow_by_the_old_switch,
        allow_by_precision,
        pytest.param(allow_by_the_new_switch, marks=needs_the_new_switch),
    ],
)
def test_fp32_on_cuda_is_tf32_once_allowed_by_any_of_the_three_switches(restored_fp32_precision, allow):
    assert matmul_dtype("cuda", torch.float32) == "fp32"
    allow()
    assert matmul_dtype("cuda", torch.float32) == "tf32"
    assert matmul_dtype("cuda", torch.bfloat16) == "bf16"
    assert matmul_dtype("cpu", torch.float32) == "fp32"
