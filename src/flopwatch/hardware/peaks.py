"""The peak FLOP/s of a device by the product table, its architecture or past measurements. Never loads torch."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.files import read_object, write_json
from flopwatch.records.flops import Confidence, Peak
from flopwatch.spellings import COMPUTE_TYPES


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What torch reports about one device; unknown facts are None.

    Attributes:
        name: The name that the driver reports, such as `NVIDIA H100 80GB HBM3`.
        kind: torch's device type: `cuda` (also for ROCm), `xpu`, `mps`, `npu`, `cpu`; empty if only the name is known.
        unit_count: Number of streaming multiprocessors, compute units or cores that are visible; on a MIG slice or an
            AMD partition, fewer than the product has.
        memory_gib: Memory as the driver reports it, which is less than the nominal size.
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
    """Returned in place of a peak or a product that is not known; `reason` tells the user why."""

    reason: str


DTYPES = tuple(dict.fromkeys(COMPUTE_TYPES.values()))


def canonical_dtype(dtype: object) -> str:
    """The name that the product table uses for a compute type, given as a `torch.dtype` or in a common spelling.

    >>> canonical_dtype("torch.bfloat16"), canonical_dtype("half")
    ('bf16', 'fp16')

    Raises:
        InputError: The compute type is not known.
    """
    spelling = str(dtype).strip().lower().removeprefix("torch.").replace("-", "_")
    if spelling in COMPUTE_TYPES:
        return COMPUTE_TYPES[spelling]
    close = get_close_matches(spelling, DTYPES, n=1)
    maybe = f" (did you mean {close[0]!r}?)" if close else ""
    raise InputError(f"dtype {dtype!r} is not known{maybe}; use one of {', '.join(DTYPES)}, or a torch.dtype")


@dataclass(frozen=True, slots=True)
class DistinguishingFacts:
    """Facts that distinguish a product from others whose driver reports the same name, or this generic `name`."""

    sm_count: Sequence[int] | None = None
    memory_gib: Sequence[float] | None = None
    gcn_arch: str | None = None
    name: str = ""

    def allows(self, facts: DeviceFacts) -> bool:
        """Whether no known fact about the device contradicts the condition; unknown facts are ignored."""
        # The driver appends features to the architecture: "gfx942:sramecc+:xnack-".
        arch = facts.gcn_arch.partition(":")[0] if facts.gcn_arch else None
        lowest, highest = self.memory_gib or (0, 0)
        return (
            (self.sm_count is None or facts.unit_count is None or facts.unit_count in self.sm_count)
            and (self.memory_gib is None or facts.memory_gib is None or lowest <= facts.memory_gib <= highest)
            and (self.gcn_arch is None or arch is None or arch == self.gcn_arch)
        )


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One product of the table.

    Attributes:
        match: Regular expressions for the names that the driver reports.
        contains: Words in lower case; every name that matches contains at least one. They are checked first, because
            compiling all regular expressions is slow. If empty, the expressions are always tried.
        when: Facts that distinguish this product from others with the same name; None if the name is enough.
        default_for_name: Whether to choose this product if several have the same name and no fact tells them apart;
            None chooses it if it has no `when`.
        match_generic: A name that many products report, and the facts that must all be known and match.
        sm_count: Streaming multiprocessors, compute units or cores of the whole product.
        torch_multi_processor_count: The same as torch counts it: on AMD's RDNA architecture, work-group processors.
        peak_tflops: Dense teraFLOP/s by compute type, with 32-bit accumulation.
    """

    id: str
    name: str
    vendor: str
    match: Sequence[str]
    peak_tflops: Mapping[str, float]
    source: str
    confidence: Confidence
    contains: Sequence[str] = ()
    when: DistinguishingFacts | None = None
    default_for_name: bool | None = None
    match_generic: DistinguishingFacts | None = None
    sm_count: int | None = None
    torch_multi_processor_count: int | None = None
    notes: str = ""

    @property
    def unit_count(self) -> int | None:
        return self.torch_multi_processor_count or self.sm_count


@cache
def load_accelerators() -> tuple[Accelerator, ...]:
    found = []
    for row in read_table("accelerators.json"):
        facts = {name: DistinguishingFacts(**row[name]) for name in ("when", "match_generic") if name in row}
        found.append(Accelerator(**{**row, **facts}))
    return tuple(found)


@cache
def read_table(file_name: str) -> Any:
    return json.loads(Path(__file__).with_name(file_name).read_text(encoding="utf-8"))


# Some products have a vector rate and a faster matrix rate for the same type: fp64 on NVIDIA's tensor cores, fp32 and
# fp64 on AMD's matrix cores. cuBLAS and rocBLAS use the matrix rate, so it comes first. Relative to the vector rate, a
# good matmul would have an MFU near 2.
_MATMUL_RATES = {"fp64": ("fp64_tensor", "fp64_matrix", "fp64"), "fp32": ("fp32_matrix", "fp32")}
_RATES_BEHIND_A_DTYPE = {"fp64_tensor", "fp64_matrix", "fp32_matrix", "fp32_packed"}
_USUAL_TRAINING_DTYPES = ("bf16", "fp16", "fp32")
_MOST_SUGGESTIONS = 4
# Suggest a product if both names share a word with a digit, such as H100, or if difflib's similarity is above 0.5.
_TOO_FAR = (0, 0.5)


def find_accelerator(facts: DeviceFacts) -> Accelerator | Unknown:
    """Find a device in the product table by its name, and by other facts if several products have the same name.

    >>> find_accelerator(DeviceFacts("NVIDIA H100 80GB HBM3")).id
    'h100-sxm5-80gb'
    >>> find_accelerator(DeviceFacts("NVIDIA RTX A1000"))
    Unknown(reason="no product in the table reports the name 'NVIDIA RTX A1000'")
    """
    name, records = " ".join(facts.name.split()), load_accelerators()
    lowered = name.lower()
    namesakes = [record for record in records if lowered in (record.id, record.name.lower())]
    if not namesakes:
        likely = [each for each in records if not each.contains or any(part in lowered for part in each.contains)]
        namesakes = [record for record in likely if any(_matches(pattern, name) for pattern in record.match)]
    if not namesakes:
        return _find_by_generic_name(name, facts)
    fitting = namesakes
    if len(fitting) > 1:
        fitting = [record for record in fitting if record.when is None or record.when.allows(facts)]
    if len(fitting) > 1:
        defaults = [(record, record.default_for_name) for record in fitting]
        fitting = [record for record, is_one in defaults if (record.when is None if is_one is None else is_one)]
    if len(fitting) == 1:
        return fitting[0]
    return Unknown(
        f"{len(namesakes)} products in the table report the name {name!r}, but none of them has {_known(facts)}"
    )


def peak_of_record(record: Accelerator, facts: DeviceFacts, dtype: str | None = None) -> Peak | Unknown:
    """The peak of a product by its datasheet, scaled down if only a part of the device is visible.

    >>> slice_of_it = DeviceFacts("NVIDIA A100-SXM4-40GB MIG 1g.5gb", unit_count=14)
    >>> peak = peak_of_record(find_accelerator(slice_of_it), slice_of_it, "bf16")
    >>> round(peak.flops_per_s / 1e12, 2), round(peak.fraction, 3)
    (40.44, 0.13)

    Args:
        record: The product.
        facts: What the device reports.
        dtype: Compute type as named in the table; None is the first of bf16, fp16 and fp32 that the product has.
    """
    dtype = dtype or next((usual for usual in _USUAL_TRAINING_DTYPES if usual in record.peak_tflops), "fp32")
    rate = next((key for key in _MATMUL_RATES.get(dtype, (dtype,)) if key in record.peak_tflops), None)
    if rate is None:
        others = ", ".join(other for other in record.peak_tflops if other not in _RATES_BEHIND_A_DTYPE)
        return Unknown(f"{record.name} has no dense {dtype} rate; it has {others}")
    fraction = 1.0
    if facts.unit_count is not None and record.unit_count is not None:
        fraction = min(1.0, facts.unit_count / record.unit_count)
    elif re.search(r"\bMIG\b", facts.name, re.IGNORECASE):
        # The MIG profile in the name ("1g.5gb") does not give the fraction: "1g" has 14 of 108 multiprocessors on an
        # A100, and 16 of 132 on an H100.
        return Unknown(
            f"{facts.name!r} is a slice of {record.name}, and how many multiprocessors it has is not known; "
            f"look it up on the machine that has this slice, or look up the whole {record.name}"
        )
    return Peak(
        flops_per_s=round(record.peak_tflops[rate] * 1e12) * fraction,
        device=record.name,
        dtype=dtype,
        source=record.source + (f" (rate {rate}, which matmuls use)" if rate != dtype else ""),
        kind="datasheet",
        confidence=record.confidence,
        fraction=fraction,
    )


def similar_products(name: str) -> list[str]:
    """Names of products in the table that are similar to `name`, the most similar first.

    >>> similar_products("NVIDIA H100 80GB")[0]
    'H100 SXM5 80GB'
    """
    # Imported here, because the import takes a tenth of the start-up time and is rarely needed.
    from difflib import SequenceMatcher

    query = name.lower()
    models = {word for word in query.split() if any(letter.isdigit() for letter in word)}

    def closeness(product: str) -> tuple[int, float]:
        lowered = product.lower()
        shared = sum(any(word.startswith(model) for word in lowered.split()) for model in models)
        return shared, SequenceMatcher(None, query, lowered).ratio()

    ranked = sorted(((closeness(record.name), record.name) for record in load_accelerators()), reverse=True)
    return [product for how_close, product in ranked[:_MOST_SUGGESTIONS] if how_close > _TOO_FAR]


def _matches(pattern: str, name: str) -> bool:
    return re.search(pattern, name, re.IGNORECASE) is not None


def _find_by_generic_name(name: str, facts: DeviceFacts) -> Accelerator | Unknown:
    generic = [(record, record.match_generic) for record in load_accelerators()]
    named = [(record, when) for record, when in generic if when is not None and _matches(when.name, name)]
    if not named:
        return Unknown(f"no product in the table reports the name {name!r}")
    if None in (facts.unit_count, facts.memory_gib, facts.gcn_arch):
        return Unknown(
            f"many products report the name {name!r}, so the device's architecture, units and memory must be known too"
        )
    fitting = [record for record, when in named if when.allows(facts)]
    if len(fitting) == 1:
        return fitting[0]
    return Unknown(f"many products report the name {name!r}, but none in the table has {_known(facts)}")


def _known(facts: DeviceFacts) -> str:
    units = None if facts.unit_count is None else f"{facts.unit_count} units"
    memory = None if facts.memory_gib is None else f"{facts.memory_gib:.1f} GiB"
    return ", ".join(filter(None, (units, memory, facts.gcn_arch))) or "nothing"


# A peak is derived from the architecture only for product lines in which every product has the same rate per unit and
# clock. The line is read from the name, because one architecture has different rates in different lines: of compute
# capability 8.6, an A40 has the full rate, but an RTX 3090 and an A10G have half of it. Data-centre products are left
# out: an H20 has the architecture of an H100, but a quarter of its rate. The expressions must not match "GeForce GTX",
# which has no tensor cores, nor suffixes such as "D", which stand for throttled products.
_PRODUCT_LINES = {
    "geforce": r"^(?:NVIDIA )?GeForce RTX \d{4}(?: (?:Ti|SUPER|Laptop GPU|with Max-Q Design))*$",
    "workstation": r"^(?:NVIDIA )?RTX (?:A\d{3,4}|\d{3,4} Ada Generation|PRO \d{3,4} Blackwell)"
    r"(?: (?:Generation )?Laptop GPU)?$",
}


def derive_peak(facts: DeviceFacts, dtype: str) -> Peak | None:
    """Compute a peak as multiprocessors x FLOP per clock x boost clock; None if a factor is unknown for this device.

    >>> card = DeviceFacts("NVIDIA RTX A1000", "cuda", 18, compute_capability=(8, 6), clock_mhz=1462.5)
    >>> derive_peak(card, "bf16").flops_per_s / 1e12
    26.9568
    """
    name, rows = " ".join(facts.name.split()), list[dict[str, Any]]()
    if facts.compute_capability is not None:
        architecture = ".".join(map(str, facts.compute_capability))
        rows = [row for row in read_table("arch_rates.json") if row["compute_capability"] == architecture]
    row = next((row for row in rows if _matches(_PRODUCT_LINES[row["product_line"]], name)), None)
    flop_per_clock = None if row is None else row["flop_per_clock_per_sm"].get(dtype)
    if row is None or flop_per_clock is None or facts.unit_count is None or facts.clock_mhz is None:
        return None
    return Peak(
        flops_per_s=facts.unit_count * flop_per_clock * facts.clock_mhz * 1e6,
        device=facts.name,
        dtype=dtype,
        source=f"not in the product table; {facts.unit_count} multiprocessors x {flop_per_clock} FLOP per clock "
        f"x {facts.clock_mhz:g} MHz (the driver's boost clock); rate: {row['source']}",
        kind="derived",
        confidence="low",
    )


MEASURABLE = ("fp64", "fp32", "tf32", "bf16", "fp16")
"""Compute types whose matmuls can be timed; tf32 on CUDA only."""


def cache_path() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "flopwatch" / "peaks.json"


def cache_key(device: str, unit_count: int | None, dtype: str) -> str:
    """The beginning of the key of a measurement; torch version and number of threads follow."""
    units = "" if unit_count is None else f" ({unit_count} units)"
    return f"{device}{units}, {dtype}, "


def read_cached_peak(key: str) -> Peak | None:
    try:
        peak = Peak(**read_object(cache_path())[key])
        is_usable = peak.flops_per_s > 0 and peak.kind == "measured"
    except (KeyError, TypeError):
        return None
    return peak if is_usable else None


def write_cached_peak(key: str, peak: Peak) -> None:
    path = cache_path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**read_object(path), key: peak.to_json()})


def fastest_measured(device: str, unit_count: int | None, dtype: str) -> Peak | None:
    """The highest peak that was measured on such a device for this type, with any number of threads; None if none was.

    The highest, because a peak is what the whole device can do: a training may use fewer threads than the measurement.
    """
    beginning = cache_key(device, unit_count, dtype)
    found = [read_cached_peak(key) for key in read_object(cache_path()) if key.startswith(beginning)]
    return max((peak for peak in found if peak is not None), key=lambda peak: peak.flops_per_s, default=None)


def advice_to_measure(dtypes: tuple[str, ...] | list[str]) -> str | None:
    """The command that measures these types; None if none of them can be measured."""
    known = [f" --dtype {dtype}" for dtype in dtypes if dtype in MEASURABLE]
    return None if dtypes and not known else "flopwatch peak --measure" + "".join(known[:1])
