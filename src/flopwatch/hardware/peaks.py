"""The product table, and a device's peak by it or derived from its architecture. Never loads torch."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.records.flops import Confidence, Peak


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


# The rate that matmuls reach if a product has two for one type: fp64 on tensor cores (cuBLAS), fp32 and fp64 on AMD's
# matrix cores (rocBLAS). With the vector rate as its peak, a good matmul would show an MFU near 2.
_MATMUL_RATES = {"fp64": ("fp64_tensor", "fp64_matrix", "fp64"), "fp32": ("fp32_matrix", "fp32")}
_RATES_BEHIND_A_DTYPE = {"fp64_tensor", "fp64_matrix", "fp32_matrix", "fp32_packed"}
_USUAL_TRAINING_DTYPES = ("bf16", "fp16", "fp32")
_MOST_SUGGESTIONS = 4
_TOO_FAR = (0, 0.5)  # no word with a digit in common, and half of the letters differ


def find_accelerator(facts: DeviceFacts) -> Accelerator | Unknown:
    """The product of a device: by its name, and by other known facts if several products share the name.

    >>> find_accelerator(DeviceFacts("NVIDIA H100 80GB HBM3")).id
    'h100-sxm5-80gb'
    >>> find_accelerator(DeviceFacts("NVIDIA RTX A1000"))
    Unknown(reason="no product in the table reports the name 'NVIDIA RTX A1000'")
    """
    name = " ".join(facts.name.split())
    namesakes = _named(name)
    if not namesakes:
        return _find_by_generic_name(name, facts)
    fitting = namesakes
    if len(fitting) > 1:
        fitting = [record for record in fitting if record.when is None or record.when.allows(facts)]
    if len(fitting) > 1:
        fitting = [record for record in fitting if record.is_default_for_name]
    if len(fitting) == 1:
        return fitting[0]
    return Unknown(f"{len(namesakes)} products report the name {name!r} and none is known to have {_known(facts)}")


def peak_of_record(record: Accelerator, facts: DeviceFacts, dtype: str | None = None) -> Peak | Unknown:
    """The datasheet peak of a product, scaled to the part of it that is visible.

    >>> slice_of_it = DeviceFacts("NVIDIA A100-SXM4-40GB MIG 1g.5gb", unit_count=14)
    >>> peak = peak_of_record(find_accelerator(slice_of_it), slice_of_it, "bf16")
    >>> round(peak.flops_per_s / 1e12, 2), round(peak.fraction, 3)
    (40.44, 0.13)

    Args:
        record: The product.
        facts: What the device reports.
        dtype: Canonical compute type; None takes bf16, else fp16, else fp32.
    """
    dtype = dtype or next((usual for usual in _USUAL_TRAINING_DTYPES if usual in record.peak_tflops), "fp32")
    rate = next((key for key in _MATMUL_RATES.get(dtype, (dtype,)) if key in record.peak_tflops), None)
    if rate is None:
        return Unknown(f"{record.name} has no dense {dtype} rate; it has {_matmul_dtypes(record)}")
    fraction = _visible_fraction(record, facts)
    if fraction is None:
        return Unknown(
            f"{facts.name!r} is a slice of {record.name} and its share of the multiprocessors is not known; "
            f"ask on the slice itself, or look up the whole {record.name}"
        )
    return Peak(
        flops_per_s=round(record.peak_tflops[rate] * 1e12) * fraction,
        device=record.name,
        dtype=dtype,
        source=record.source + (f" (rate {rate}: what matmuls run on)" if rate != dtype else ""),
        kind="datasheet",
        confidence=record.confidence,
        fraction=fraction,
    )


def similar_products(name: str) -> list[str]:
    """Names of products similar to `name`, the most similar first; each can be looked up.

    >>> similar_products("NVIDIA H100 80GB")[0]
    'H100 SXM5 80GB'
    """
    from difflib import SequenceMatcher  # a tenth of the start-up time, and only needed after a mistake

    query = name.lower()
    models = {word for word in query.split() if any(letter.isdigit() for letter in word)}

    def closeness(product: str) -> tuple[int, float]:
        lowered = product.lower()
        shared = sum(any(word.startswith(model) for word in lowered.split()) for model in models)
        return shared, SequenceMatcher(None, query, lowered).ratio()

    ranked = sorted(((closeness(record.name), record.name) for record in load_accelerators()), reverse=True)
    return [product for how_close, product in ranked[:_MOST_SUGGESTIONS] if how_close > _TOO_FAR]


def _named(name: str) -> list[Accelerator]:
    records = load_accelerators()
    lowered = name.lower()
    called_so = [record for record in records if lowered in (record.id, record.name.lower())]
    return called_so or [record for record in records if _reports(record, name, lowered)]


def _reports(record: Accelerator, name: str, lowered: str) -> bool:
    if record.contains and not any(part in lowered for part in record.contains):
        return False
    return any(_matches(pattern, name) for pattern in record.match)


def _matches(pattern: str, name: str) -> bool:
    return re.search(pattern, name, re.IGNORECASE) is not None


def _find_by_generic_name(name: str, facts: DeviceFacts) -> Accelerator | Unknown:
    named = [record for record in load_accelerators() if record.generic_name and _matches(record.generic_name, name)]
    if not named:
        return Unknown(f"no product in the table reports the name {name!r}")
    if None in (facts.unit_count, facts.memory_gib, facts.gcn_arch):
        return Unknown(f"many products report the name {name!r}; its architecture, units and memory must be known too")
    fitting = [record for record in named if record.generic_when and record.generic_when.allows(facts)]
    if len(fitting) == 1:
        return fitting[0]
    return Unknown(f"many products report the name {name!r} and none in the table has {_known(facts)}")


def _visible_fraction(record: Accelerator, facts: DeviceFacts) -> float | None:
    if facts.unit_count is not None and record.unit_count is not None:
        return min(1.0, facts.unit_count / record.unit_count)
    # The profile in the name ("1g.5gb") does not give the fraction: 1g is 14 of 108 on an A100, 16 of 132 on an H100.
    return None if re.search(r"\bMIG\b", facts.name, re.IGNORECASE) else 1.0


def _known(facts: DeviceFacts) -> str:
    parts = []
    if facts.unit_count is not None:
        parts.append(f"{facts.unit_count} units")
    if facts.memory_gib is not None:
        parts.append(f"{facts.memory_gib:.1f} GiB")
    if facts.gcn_arch is not None:
        parts.append(facts.gcn_arch)
    return ", ".join(parts) or "nothing"


def _matmul_dtypes(record: Accelerator) -> str:
    return ", ".join(dtype for dtype in record.peak_tflops if dtype not in _RATES_BEHIND_A_DTYPE)


# Peaks are derived only for product lines in which the architecture decides the rate. The same architecture runs at
# full rate in one product and at half of it in another (compute capability 8.6: A40 full, RTX 3090 and A10G half), so
# the product line is read from the name. Data-centre products are excluded: an H20 has the architecture of an H100 and
# a quarter of its rate.

# "GeForce GTX" has no tensor cores, and suffixes such as "D" mark throttled products: neither may match.
_PRODUCT_LINES = {
    "geforce": r"^(?:NVIDIA )?GeForce RTX \d{4}(?: (?:Ti|SUPER|Laptop GPU|with Max-Q Design))*$",
    "workstation": r"^(?:NVIDIA )?RTX (?:A\d{3,4}|\d{3,4} Ada Generation|PRO \d{3,4} Blackwell)"
    r"(?: (?:Generation )?Laptop GPU)?$",
}


def derive_peak(facts: DeviceFacts, dtype: str) -> Peak | None:
    """Multiprocessors x FLOP per clock x boost clock; None if that would be a guess.

    >>> card = DeviceFacts("NVIDIA RTX A1000", "cuda", 18, compute_capability=(8, 6), clock_mhz=1462.5)
    >>> derive_peak(card, "bf16").flops_per_s / 1e12
    26.9568
    """
    row = _row_for(facts)
    if row is None or facts.unit_count is None or facts.clock_mhz is None:
        return None
    flop_per_clock = row["flop_per_clock_per_sm"].get(dtype)
    if flop_per_clock is None:
        return None
    return Peak(
        flops_per_s=facts.unit_count * flop_per_clock * facts.clock_mhz * 1e6,
        device=facts.name,
        dtype=dtype,
        source=f"not in the table; {facts.unit_count} multiprocessors x {flop_per_clock} FLOP per clock "
        f"x {facts.clock_mhz:g} MHz (the driver's boost clock); rate: {row['source']}",
        kind="derived",
        confidence="low",
    )


def _row_for(facts: DeviceFacts) -> dict[str, Any] | None:
    if facts.compute_capability is None:
        return None
    name = " ".join(facts.name.split())
    architecture = ".".join(map(str, facts.compute_capability))
    rows: list[dict[str, Any]] = read_table("arch_rates.json")
    for row in rows:
        is_of_line = re.search(_PRODUCT_LINES[row["product_line"]], name, re.IGNORECASE)
        if is_of_line and row["compute_capability"] == architecture:
            return row
    return None
