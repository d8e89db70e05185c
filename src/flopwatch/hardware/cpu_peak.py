"""The peak of a CPU: cores x clock x FLOP per cycle. Never loads torch."""

from functools import cache
from typing import Any

from flopwatch.hardware.cpu import CpuFacts
from flopwatch.hardware.facts import Unknown
from flopwatch.hardware.table import read_table
from flopwatch.records import Peak


def peak_of_cpu(cpu: CpuFacts, dtype: str) -> Peak | Unknown:
    """The peak by formula, or why there is none.

    >>> cpu = CpuFacts("a CPU", frozenset({"avx2", "fma"}), core_count=8, clock_ghz=3.0, clock_source="given")
    >>> peak_of_cpu(cpu, "fp32").flops_per_s
    768000000000.0
    """
    if not cpu.flags or cpu.core_count is None:
        return Unknown("this CPU's instruction sets and cores cannot be read (only Linux tells them)")
    if cpu.clock_ghz is None:
        return Unknown(f"the clock of {cpu.name} cannot be read")
    rate = _best_rate(cpu, dtype)
    if rate is None:
        return Unknown(f"{cpu.name} has no instruction for {dtype} products with a known rate")
    flop_per_cycle, how = rate
    return Peak(
        flops_per_s=cpu.core_count * cpu.clock_ghz * 1e9 * flop_per_cycle,
        device=cpu.name,
        dtype=dtype,
        source=f"{cpu.core_count:g} cores x {cpu.clock_ghz:g} GHz ({cpu.clock_source}) "
        f"x {flop_per_cycle:g} FLOP per cycle ({how})",
        kind="derived",
        confidence="low",
    )


@cache
def _rates() -> dict[str, Any]:
    rates: dict[str, Any] = read_table("cpu_rates.json")
    return rates


def _best_rate(cpu: CpuFacts, dtype: str) -> tuple[float, str] | None:
    identity = dict(cpu.identity)
    best: tuple[float, str] | None = None
    for row in _rates()["rates"]:
        if "flags" in row and not cpu.flags.issuperset(row["flags"]):
            continue
        if "arm_part" in row and identity.get("arm_part") != row["arm_part"]:
            continue
        if dtype not in row["flop_per_cycle"]:
            continue
        reason = _why_half_rate(cpu, row.get("flags", ()))
        flop_per_cycle = row["flop_per_cycle"][dtype] / (2 if reason else 1)
        if best is None or flop_per_cycle > best[0]:
            best = (flop_per_cycle, f"{row['isa']}: {reason or row['source']}")
    return best


def _why_half_rate(cpu: CpuFacts, flags: list[str]) -> str | None:
    for core in _rates()["half_rate_cores"]:
        if core["flag"] in flags and _is_such_a_core(cpu, core):
            return str(core["why"])
    return None


def _is_such_a_core(cpu: CpuFacts, core: dict[str, Any]) -> bool:
    if "name_contains" in core:
        return str(core["name_contains"]) in cpu.name
    identity = dict(cpu.identity)
    if identity.get("vendor_id") != core["vendor_id"] or identity.get("family") != str(core["family"]):
        return False
    lowest, highest = core["models"]
    return bool(lowest <= int(identity.get("model") or -1) <= highest)
