"""What is known about one device, in plain values. Never loads torch."""

from dataclasses import dataclass

from flopwatch.errors import InputError


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device as the framework enumerates it; what cannot be read is None.

    Attributes:
        name: The name the device gives itself, such as `NVIDIA H100 80GB HBM3`.
        kind: torch's device type: `cuda` (also for ROCm), `xpu`, `mps`, `npu`, `cpu`; empty when only a name is known.
        unit_count: Streaming multiprocessors, compute units or cores this process sees; fewer than the product has
            on a MIG slice or an AMD partition.
        memory_gib: Memory as reported, which is below the nominal size.
        gcn_arch: AMD's architecture, such as `gfx942`.
        compute_capability: NVIDIA's architecture, such as `(9, 0)`.
        clock_mhz: Boost clock the driver states for this very device.
    """

    name: str
    kind: str = ""
    unit_count: int | None = None
    memory_gib: float | None = None
    gcn_arch: str | None = None
    compute_capability: tuple[int, int] | None = None
    clock_mhz: float | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why there is no peak: a sentence for the person who asked."""

    reason: str


# One name for each compute type, whatever people call it. Never loads torch.


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
