"""Formulas for the FLOPs of one op: torch's own, and ours where torch has none or a wrong one.

A multiply-add is 2 FLOPs. Importing this package registers all of our formulas.
"""

from flopwatch.flops.formulas import attention, layers, matrices
from flopwatch.flops.formulas.registry import Formula, OpCall, OpFlops, bind, find_formula, register_formula

__all__ = [
    "Formula",
    "OpCall",
    "OpFlops",
    "attention",
    "bind",
    "find_formula",
    "layers",
    "matrices",
    "register_formula",
]
