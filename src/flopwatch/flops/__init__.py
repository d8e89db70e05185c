"""Counts the FLOPs of a training step op by op, and fits a formula for the FLOPs of other batch shapes."""

from typing import TYPE_CHECKING

from flopwatch.optional import lazy_exports

if TYPE_CHECKING:
    from flopwatch.flops.conventions import flops_by_convention
    from flopwatch.flops.count import count_flops
    from flopwatch.flops.fit import fit_flops_law
    from flopwatch.flops.formulas import formula, register_formula
    from flopwatch.flops.law import FlopLaw

__all__ = ["FlopLaw", "count_flops", "fit_flops_law", "flops_by_convention", "formula", "register_formula"]

__getattr__ = lazy_exports(
    "flopwatch.flops",
    {
        "FlopLaw": "flopwatch.flops.law",
        "count_flops": "flopwatch.flops.count",
        "fit_flops_law": "flopwatch.flops.fit",
        "flops_by_convention": "flopwatch.flops.conventions",
        "formula": "flopwatch.flops.formulas",
        "register_formula": "flopwatch.flops.formulas",
    },
)
