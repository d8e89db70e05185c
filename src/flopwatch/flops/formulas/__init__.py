"""What one op costs: torch's formulas where they are right, ours where torch has none or is wrong.

A multiply-add is 2 FLOPs. Importing this package registers every built-in formula.
"""

from flopwatch.flops.formulas import attention
from flopwatch.flops.formulas import layers as convolution
from flopwatch.flops.formulas import layers as distances
from flopwatch.flops.formulas import layers as encoder
from flopwatch.flops.formulas import layers as recurrent
from flopwatch.flops.formulas import matrices as linear_algebra
from flopwatch.flops.formulas import matrices as matmul
from flopwatch.flops.formulas import matrices as quantised
from flopwatch.flops.formulas import matrices as sparse
from flopwatch.flops.formulas.registry import Formula, OpCall, OpFlops, bind, find_formula, register_formula

__all__ = [
    "Formula",
    "OpCall",
    "OpFlops",
    "attention",
    "bind",
    "convolution",
    "distances",
    "encoder",
    "find_formula",
    "linear_algebra",
    "matmul",
    "quantised",
    "recurrent",
    "register_formula",
    "sparse",
]
