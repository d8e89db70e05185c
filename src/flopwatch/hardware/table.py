"""The product table that ships with the package, read on first use. Never loads torch."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flopwatch.hardware.facts import DeviceFacts
from flopwatch.records.flops import Confidence


@dataclass(frozen=True, slots=True)
class Condition:
    """What a device must report, besides its name, to be one product and not its namesake."""

    unit_counts: tuple[int, ...] | None = None
    memory_gib: tuple[float, float] | None = None
    gcn_arch: str | None = None

    def allows(self, facts: DeviceFacts) -> bool:
        """True unless a known fact contradicts; an unknown one does not."""
        # gcnArchName carries features: "gfx942:sramecc+:xnack-".
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
        contains: Each name that can match holds one of these (lower case): saves compiling patterns. Empty: try always.
        when: Tells it from products that report the same name.
        is_default_for_name: Taken when several products report the name and nothing tells them apart.
        generic_name: A name many products report; this one is meant only if every fact of `generic_when` is there.
        generic_when: See `generic_name`.
        unit_count: Units of the whole device, as torch counts them.
        peak_tflops: Dense teraFLOP/s by compute type, with 32-bit accumulation.
        source: Who says so.
        confidence: How far the source can be trusted.
        notes: What a reader should know.
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
    """The content of a JSON file that ships beside this module."""
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
