"""Linear algebra: what can be counted without running it, and one op that can be counted once its matrix is known.

Eliminations (LU, Cholesky, triangular solves) take the same steps whatever the values are. Decompositions that iterate
do not (singular values, eigenvalues): they are named as ops without a formula.
"""

from math import ceil, isfinite, log2, prod

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flopwatch.errors import UntraceableError
from flopwatch.flops.formulas.registry import OpCall, formula

# The largest 1-norms for which torch takes Taylor polynomials of degree 1, 2, 4, 8, 12 and 18, of 0 to 5 products
# (Bader, Blanes, Casas: Computing the matrix exponential with an optimized Taylor polynomial approximation, Mathematics
# 7(12), 2019; thresholds as in torch's LinearAlgebra.cpp).
_LARGEST_NORMS = {
    torch.float32: (
        *(1.192092800768788e-07, 5.978858893805233e-04, 5.116619363445086e-02),
        *(5.800524627688768e-01, 1.461661507209034, 3.010066362817634),
    ),
    torch.float64: (
        *(2.220446049250313e-16, 2.580956802971767e-08, 3.397168839976962e-04),
        *(4.991228871115323e-02, 2.996158913811580e-01, 1.090863719290036),
    ),
}


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


def lu_flops(shape: tuple[int, ...]) -> int:
    """Gaussian elimination: step k divides m - k numbers and updates the (m - k) x (n - k) block behind them.

    Of a square matrix 2n³/3 - n²/2 - n/6 (Golub and Van Loan, Matrix Computations, 3.2; LAPACK Working Note 41).

    >>> lu_flops((3, 3))
    13
    """
    *batch, rows, columns = shape
    steps = range(1, min(rows, columns) + 1)
    return prod(batch) * sum((rows - k) * (1 + 2 * (columns - k)) for k in steps)


def lu_solve_flops(solution_shape: tuple[int, ...], order: int) -> int:
    """One triangle with ones on its diagonal, one without."""
    return sum(triangular_solve_flops(solution_shape, order, unitriangular=ones) for ones in (True, False))


@formula("aten::linalg_lu_factor_ex", "aten::linalg_lu", "aten::_linalg_det", "aten::_linalg_slogdet")
def _lu(call: OpCall) -> int:
    return lu_flops(call.arguments["A"].shape)


@formula("aten::_linalg_solve_ex")
def _solve(call: OpCall) -> int:
    matrix = call.arguments["A"].shape
    return lu_flops(matrix) + lu_solve_flops(call.out[0].shape, matrix[-1])


@formula("aten::linalg_lu_solve")
def _lu_solve(call: OpCall) -> int:
    return lu_solve_flops(call.out.shape, call.arguments["LU"].shape[-1])


@formula("aten::linalg_inv_ex")
def _inverse(call: OpCall) -> int:
    """Torch solves for the columns of the identity, and makes no use of their zeros."""
    matrix = call.arguments["A"].shape
    return lu_flops(matrix) + lu_solve_flops(matrix, matrix[-1])


@formula("aten::linalg_cholesky_ex")
def _cholesky(call: OpCall) -> int:
    """n³/3 + n²/2 + n/6, its n square roots included (LAPACK Working Note 41, xPOTRF)."""
    *batch, order, _ = (int(size) for size in call.arguments["self"].shape)
    return prod(batch) * (order * (order + 1) * (2 * order + 1) // 6)


@formula("aten::cholesky_solve")
def _cholesky_solve(call: OpCall) -> int:
    order = call.arguments["input2"].shape[-1]
    return 2 * triangular_solve_flops(call.out.shape, order, unitriangular=False)


@formula("aten::linalg_matrix_exp")
def _matrix_exponential(call: OpCall) -> int | None:
    """How many products it takes depends on the norm of each matrix, so its values must be there."""
    matrix = call.arguments["self"]
    if isinstance(matrix, FakeTensor) or matrix.device.type == "meta":
        raise UntraceableError("linalg_matrix_exp runs more or fewer products by the norm of its matrix")
    largest = _LARGEST_NORMS.get(matrix.dtype)
    if largest is None or matrix.device.type != "cpu":
        return None  # other devices may choose in another way
    order = int(matrix.shape[-1])
    if order == 1:
        return 0
    norms = torch.linalg.matrix_norm(matrix.detach(), 1).reshape(-1).tolist()
    if not all(map(isfinite, norms)):
        return None
    products = sum(_products(norm, largest, is_alone=len(norms) == 1) for norm in norms)
    return products * 2 * order * order * order


def _products(norm: float, largest: tuple[float, ...], *, is_alone: bool) -> int:
    """Those of the polynomial, which is the longest one for the matrices of a batch, and the squarings.

    A matrix beyond the last threshold is halved as often as needed, and the result squared as often.
    """
    if is_alone:
        for products, threshold in enumerate(largest):
            if norm <= threshold:
                return products
    squarings = ceil(log2(norm / largest[-1])) if norm else 0
    return len(largest) - 1 + max(0, squarings)
