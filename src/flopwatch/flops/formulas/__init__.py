"""Formulas for the FLOPs of one op: torch's own, and ours where torch has none or a wrong one.

A multiply-add is 2 FLOPs. Importing this package registers all of our formulas.
"""

from flopwatch.flops.formulas import attention, layers, matrices
from flopwatch.flops.formulas.registry import register_formula

formula = register_formula
"""The short name of it for users: `@flopwatch.formula("mylib::foo")`."""

__all__ = ["attention", "formula", "layers", "matrices", "register_formula"]
