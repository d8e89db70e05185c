"""The product table, the facts that identify a product in it, and the names of compute types. Never loads torch."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.records.flops import Confidence


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device as the framework reports it; unknown facts are None.

    Attributes:
        name: The name the device gives itself, such as `NVIDIA H100 80GB HBM3`.
        kind: torch's device type: `cuda` (also for ROCm), `xpu`, `mps`, `npu`, `cpu`; empty when only a name is known.
        unit_count: Streaming multiprocessors, compute units or cores this process sees; fewer than the product has
            on a MIG slice or an AMD partition.
        memory_gib: Memory as reported, which is below the nominal size.
        gcn_arch: AMD's architecture, such as `gfx942`.
        compute_capability: NVIDIA's architecture, such as `(9, 0)`.
        clock_mhz: The boost clock that the driver reports for this device.
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
    """Why there is no peak, as a sentence for the user."""

    reason: str


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
    # With 16-bit accumulation, which is faster on GeForce. PyTorch accumulates in fp32, so these are never assumed.
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


@dataclass(frozen=True, slots=True)
class Condition:
    """What a device must report, besides its name, to be this product and not another one of the same name."""

    unit_counts: tuple[int, ...] | None = None
    memory_gib: tuple[float, float] | None = None
    gcn_arch: str | None = None

    def allows(self, facts: DeviceFacts) -> bool:
        """True unless a known fact contradicts it; unknown facts do not."""
        # gcnArchName also lists features: "gfx942:sramecc+:xnack-".
        arch = facts.gcn_arch.partition(":")[0] if facts.gcn_arch else None
        return (
            (self.unit_counts is None or facts.unit_count is None or facts.unit_count in self.unit_counts)
            and (self.memory_gib is None or facts.memory_gib is None or _within(facts.memory_gib, self.memory_gib))
            and (self.gcn_arch is None or arch is None or arch == self.gcn_arch)
        )


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One product.

    Attributes:
        id: Short stable name.
        name: The product's name for people.
        vendor: `nvidia`, `amd`, `intel`, `apple`, `huawei`, `google` or `aws`.
        match: Patterns for the names its driver reports.
        contains: Every matching name contains one of these (lower case), so most patterns need no compiling. If empty,
            the patterns are always tried.
        when: Distinguishes it from products that report the same name.
        is_default_for_name: Chosen if several products report the name and no fact distinguishes them.
        generic_name: A name that many products report; it means this one only if all facts of `generic_when` match.
        generic_when: See `generic_name`.
        unit_count: Units of the whole device, as torch counts them.
        peak_tflops: Dense teraFLOP/s by compute type, with 32-bit accumulation.
        source: The document the rates are from.
        confidence: How reliable the source is.
        notes: Remarks for the reader.
    """

    id: str
    name: str
    vendor: str
    match: tuple[str, ...]
    contains: tuple[str, ...]
    when: Condition | None
    is_default_for_name: bool
    generic_name: str | None
    generic_when: Condition | None
    unit_count: int | None
    peak_tflops: dict[str, float]
    source: str
    confidence: Confidence
    notes: str


@cache
def load_accelerators() -> tuple[Accelerator, ...]:
    return tuple(_accelerator(row) for row in read_table("accelerators.json"))


def read_table(file_name: str) -> Any:
    """The content of a JSON file beside this module."""
    return json.loads(Path(__file__).with_name(file_name).read_text(encoding="utf-8"))


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _accelerator(row: dict[str, Any]) -> Accelerator:
    generic = row.get("match_generic")
    return Accelerator(
        id=row["id"],
        name=row["name"],
        vendor=row["vendor"],
        match=tuple(row["match"]),
        contains=tuple(row.get("contains", ())),
        when=_condition(row["when"]) if "when" in row else None,
        is_default_for_name=row.get("default_for_name", "when" not in row),
        generic_name=generic["name"] if generic else None,
        generic_when=_condition(generic) if generic else None,
        # torch counts work-group processors, not compute units, on RDNA.
        unit_count=row.get("torch_multi_processor_count") or row.get("sm_count"),
        peak_tflops=row["peak_tflops"],
        source=row["source"],
        confidence=row["confidence"],
        notes=row.get("notes", ""),
    )


def _condition(row: dict[str, Any]) -> Condition:
    memory = row.get("memory_gib")
    return Condition(
        unit_counts=tuple(row["sm_count"]) if "sm_count" in row else None,
        memory_gib=(memory[0], memory[1]) if memory else None,
        gcn_arch=row.get("gcn_arch"),
    )
