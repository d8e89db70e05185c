"""The type a matrix product runs in, by the names that the table of peaks has."""

from collections.abc import Mapping
from typing import Any

import torch

# The same names as `hardware.dtypes.canonical_dtype` gives; a test holds the two together.
_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e5m2fnuz: "fp8",
    torch.float4_e2m1fn_x2: "fp4",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.qint8: "int8",
    torch.quint8: "int8",
    # One complex multiply-add is four real ones of the parts' type.
    torch.complex128: "fp64",
    torch.complex64: "fp32",
    torch.complex32: "fp16",
}
# Of an op that also adds something, these are the factors; the addend comes first and may have another type.
_FACTORS = ("mat1", "batch1", "mat", "vec1", "self", "input", "query", "q")


def compute_type(dtype: torch.dtype) -> str:
    """The compute type's name; torch's own name for a type that no table of peaks has.

    >>> compute_type(torch.bfloat16), compute_type(torch.int64)
    ('bf16', 'int64')
    """
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def type_of_product(arguments: Mapping[str, Any]) -> str | None:
    """The type of an op's first factor, which is the activation; None where no argument is a tensor.

    Where activation and weight differ (weights stored as int8 or int4), the weight is converted to the activation's
    type before it is multiplied. An op that converts the activation instead says so in its formula.
    """
    first = next((arguments[name] for name in _FACTORS if isinstance(arguments.get(name), torch.Tensor)), None)
    if first is None:
        first = next((value for value in arguments.values() if isinstance(value, torch.Tensor)), None)
    return None if first is None else compute_type(first.dtype)
