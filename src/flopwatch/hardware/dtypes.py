"""One name for each compute type, whatever people call it. Never loads torch."""

from flopwatch.errors import InputError

_SPELLINGS = {
    "fp64": ("float64", "double", "f64"),
    "fp32": ("float32", "float", "single", "f32"),
    "tf32": ("tensorfloat32", "xf32"),
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half", "f16"),
    "fp8": (
        "float8",
        "f8",
        "e4m3",
        "e5m2",
        "mxfp8",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
    ),
    "fp6": ("float6", "mxfp6"),
    "fp4": ("float4", "nvfp4", "mxfp4", "float4_e2m1fn_x2"),
    "int8": ("i8",),
    "int4": ("i4",),
    # Faster on GeForce, less exact; PyTorch accumulates in fp32, so these are never assumed.
    "fp16_fp16acc": (),
    "fp8_fp16acc": (),
}
_CANONICAL = {spelling: key for key, spellings in _SPELLINGS.items() for spelling in (key, *spellings)}

DTYPES = tuple(_SPELLINGS)


def canonical_dtype(dtype: object) -> str:
    """The table's name for a compute type given as a `torch.dtype` or in any common spelling.

    >>> canonical_dtype("torch.bfloat16"), canonical_dtype("half")
    ('bf16', 'fp16')

    Raises:
        InputError: The spelling is not known.
    """
    spelling = str(dtype).strip().lower().removeprefix("torch.").replace("-", "_")
    if spelling in _CANONICAL:
        return _CANONICAL[spelling]
    accepted = ", ".join("/".join((key, *spellings[:1])) for key, spellings in _SPELLINGS.items())
    raise InputError(f"dtype {dtype!r} is not known; use one of: {accepted}, or a torch.dtype of these")
