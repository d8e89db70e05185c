"""What one op costs: torch's formulas where they are right, ours where torch has none or a wrong one.

A multiply-add is 2 FLOPs. Importing this package registers every built-in formula.
"""

from flopwatch.flops.formulas import attention, convolution, encoder, matmul, recurrent
from flopwatch.flops.formulas.registry import OpCall, OpFlops, bind, find_formula, register_formula

__all__ = [
    "OpCall",
    "OpFlops",
    "attention",
    "bind",
    "convolution",
    "encoder",
    "find_formula",
    "matmul",
    "recurrent",
    "register_formula",
]
