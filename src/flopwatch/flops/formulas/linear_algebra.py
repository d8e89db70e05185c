"""Linear algebra with an exact count. Decompositions have none: how often they iterate depends on the values."""

from math import prod

from flopwatch.flops.formulas.registry import OpCall, formula


@formula("aten::linalg_solve_triangular")
def _solve_triangular(call: OpCall) -> int:
    return triangular_solve_flops(
        call.out.shape, call.arguments["self"].shape[-1], unitriangular=call.arguments["unitriangular"]
    )


def triangular_solve_flops(solution_shape: tuple[int, ...], order: int, *, unitriangular: bool) -> int:
    """Row i of a triangle of order n takes i multiply-adds and one division for each right-hand side.

    Together 2 x n(n-1)/2 + n = n², and n² - n where the diagonal is ones (BLAS xTRSM, LAPACK Working Note 41).
    """
    return prod(solution_shape) * (order - 1 if unitriangular else order)
