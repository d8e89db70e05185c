"""The peak of an NVIDIA product that is not in the table, from its architecture. Never loads torch.

Only where that is defensible. The same architecture runs at full rate in one product and at half of it in the next
(compute capability 8.6: A40 full, RTX 3090 half, A10G half), so the product line has to be told from the name, and
data-centre parts are left out: an H20 has the architecture of an H100 and a quarter of its rate.
"""

import re
from typing import Any

from flopwatch.hardware.facts import DeviceFacts
from flopwatch.hardware.table import read_table
from flopwatch.records import Peak

# "GeForce GTX" has no tensor cores, and suffixes such as "D" mark capped products: neither may match.
_PRODUCT_LINES = {
    "geforce": r"^(?:NVIDIA )?GeForce RTX \d{4}(?: (?:Ti|SUPER|Laptop GPU|with Max-Q Design))*$",
    "workstation": r"^(?:NVIDIA )?RTX (?:A\d{3,4}|\d{3,4} Ada Generation|PRO \d{3,4} Blackwell)"
    r"(?: (?:Generation )?Laptop GPU)?$",
}


def derive_peak(facts: DeviceFacts, dtype: str) -> Peak | None:
    """Multiprocessors x FLOP per clock x boost clock; None where that would be a guess.

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
