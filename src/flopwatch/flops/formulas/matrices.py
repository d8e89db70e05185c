"""Formulas for products of matrices (dense, grouped, trilinear, quantised, sparse) and for factorisations."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from flopwatch.errors import UntraceableError
from flopwatch.flops.formulas.registry import FLOAT4, OpCall, OpFlops, formula
from flopwatch.torch_internals.ops import FakeTensor, coo_values, op_name


def matmul_flops(rows: int, contracted: int, columns: int) -> int:
    return 2 * rows * contracted * columns


FACTORS = {
    "aten::mm": ("self", "mat2"),
    "aten::_int_mm": ("self", "mat2"),
    "aten::_scaled_mm": ("self", "mat2"),
    "aten::_scaled_mm_v2": ("self", "mat2"),
    "aten::addmm": ("mat1", "mat2"),
    "aten::_addmm_activation": ("mat1", "mat2"),
    "aten::_scaled_addmm": ("mat1", "mat2"),
    "aten::bmm": ("self", "mat2"),
    "aten::baddbmm": ("batch1", "batch2"),
    "aten::addbmm": ("batch1", "batch2"),
    "aten::addr": ("vec1", "vec2"),
    "aten::_sparse_addmm": ("mat1", "mat2"),
    "aten::addmv": ("mat", "vec"),
    "aten::dot": ("self", "tensor"),
    "aten::mv": ("self", "vec"),
}
"""The names of the two factors of a matrix product in the schemas of ops. Addends are left out."""
_OTHERWISE = ("aten::_sparse_addmm", "aten::addmv", "aten::dot", "aten::mv")


@formula(*(name for name in FACTORS if name not in _OTHERWISE))
def _dense_product(call: OpCall) -> int:
    left, right = (call.arguments[name] for name in FACTORS[op_name(call.func).removesuffix("_")])
    # Two fp4 numbers are packed into one element.
    numbers_per_element = 2 if left.dtype is FLOAT4 else 1
    return int(2 * prod(left.shape) * numbers_per_element * right.shape[-1])


@formula("aten::mv", "aten::addmv", "aten::dot", "aten::vdot")
def _product_with_vector(call: OpCall) -> int:
    return int(2 * prod(call.arguments["mat" if "mat" in call.arguments else "self"].shape))


@formula("aten::_foreach_mm")
def _foreach_mm(call: OpCall) -> int:
    pairs = zip(call.arguments["self"], call.arguments["mat2"], strict=True)
    return sum(matmul_flops(left.shape[0], left.shape[1], right.shape[1]) for left, right in pairs)


@formula("aten::linear_backward", "aten::mkldnn_linear_backward")
def _linear_backward(call: OpCall) -> int:
    data, weight = call.arguments["self"], call.arguments["weight"]
    grad_input, grad_weight, _ = call.arguments["output_mask"]
    return matmul_flops(prod(data.shape[:-1]), data.shape[-1], weight.shape[0]) * (int(grad_input) + int(grad_weight))


@formula(
    "aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2", "transformers::grouped_mm_fallback"
)
def _grouped_mm(call: OpCall) -> int:
    """Every row is multiplied with the matrix of one group.

    Two 3-D factors are a plain batched product. Otherwise the groups split the rows, the columns or (for the weight
    gradient, with two 2-D factors) the contracted dimension, so the number of groups does not change the FLOPs.
    """
    left, right = (each.shape for each in list(call.arguments.values())[:2])
    batch = left[0] if len(left) == len(right) == 3 else 1
    return batch * matmul_flops(left[-2], left[-1], right[-1])


@formula("aten::_trilinear")
def _trilinear(call: OpCall) -> int:
    """`nn.Bilinear` multiplies the first two operands, and then the result with the third (ATen's order)."""
    arguments = call.arguments
    first, second, third = (_expanded(arguments[f"i{index}"].shape, arguments[f"expand{index}"]) for index in (1, 2, 3))
    summed = set(arguments["sumdim"])
    whole = [max(sizes) for sizes in zip(first, second, third, strict=True)]
    pair = [max(a, b) for a, b in zip(first, second, strict=True)]
    # Dimensions that the third operand lacks are summed before the multiplication with the third operand.
    left = [1 if axis in summed and third[axis] == 1 else size for axis, size in enumerate(whole)]
    return 2 * prod(pair) + 2 * prod(left)


def _expanded(shape: Sequence[int], expand: Sequence[int]) -> list[int]:
    sizes = list(shape)
    for axis in sorted(expand):
        sizes.insert(axis, 1)
    return sizes


# Quantised products (torch's packed weights, torch.ao, oneDNN, torchao, bitsandbytes) are linear layers: every element
# of the activation is multiplied once per output feature. Packed weights hide their shape, so the number of features is
# read from the output or from an argument. Weight-only kernels convert the weight to the activation's type, dynamic
# kernels quantise the activation and multiply in int8. Sources: schemas of torch 2.13, torchao 0.18, bitsandbytes 0.50.

# Quantised ops, grouped by the name of the activation in their schema.
_ACTIVATION = {
    "self": [
        *("aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu"),
        *("aten::_weight_int4pack_mm_with_scales_and_zeros", "quantized::int4mm_packed_weight_cpu"),
    ],
    "input": ["aten::_mixed_dtypes_linear", "torchao::da8w4_linear_cpu", "torchao::float8_linear_cpu"],
    "X": ["quantized::linear_dynamic_fp16", "quantized::linear_relu_dynamic_fp16", "mkldnn::_linear_pointwise"],
    "qx": ["onednn::qlinear_pointwise"],
    "a": [
        *("ao::blockwise_fp8_gemm", "torchao::blockwise_scaled_mm", "torchao::mx_fp8_bf16"),
        *("torchao::triton_fp8_gemm_1x128_128x1", "torchao::triton_fp8_gemm_1x128_128x128"),
    ],
    "A": ["torchao::scaled_int8_mm"],
}
_IN_INT8 = [
    *(f"quantized::linear{kind}" for kind in ("", "_relu", "_leaky_relu", "_tanh", "_dynamic", "_relu_dynamic")),
    "quantized::linear_with_input_q_dq_qweight_dq_output_fp32",
    "quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32",
    *("_quantized::linear", "_quantized::linear_dynamic"),
]


@formula(*(name for names in _ACTIVATION.values() for name in names))
def _linear(call: OpCall) -> int:
    name = next(key for key, names in _ACTIVATION.items() if op_name(call.func) in names)
    return int(2 * prod(call.arguments[name].shape) * call.out.shape[-1])


@formula(*_IN_INT8)
def _linear_in_int8(call: OpCall) -> OpFlops:
    return OpFlops(2 * prod(call.arguments["X"].shape) * call.out.shape[-1], dtype="int8")


@formula("aten::_dyn_quant_matmul_4bit")
def _dynamic_4bit(call: OpCall) -> OpFlops:
    arguments = call.arguments
    rows = prod(arguments["inp"].shape[:-1])
    return OpFlops(matmul_flops(rows, arguments["in_features"], arguments["out_features"]), dtype="int8")


@formula("bitsandbytes::int8_linear_matmul", "bitsandbytes::int8_scaled_mm")
def _bitsandbytes_int8(call: OpCall) -> int:
    """The shape of A is (..., input features), that of B is (output features, input features)."""
    return int(2 * prod(call.arguments["A"].shape) * call.arguments["B"].shape[0])


@formula("bitsandbytes::int8_mixed_scaled_mm")
def _bitsandbytes_mixed(call: OpCall) -> OpFlops:
    """LLM.int8() multiplies columns with outliers a second time, in the activation's type (arXiv 2208.07339)."""
    activation, features = call.arguments["CA"], call.arguments["CB"].shape[0]
    outliers = call.arguments.get("outlier_cols")
    columns = 0 if outliers is None else outliers.numel()
    rows = prod(activation.shape[:-1])
    needed = matmul_flops(rows, activation.shape[-1], features)
    return OpFlops(needed, matmul_flops(rows, columns, features), dtype="int8")


@formula("bitsandbytes::gemv_4bit", "bitsandbytes::gemm_4bit")
def _bitsandbytes_4bit(call: OpCall) -> int:
    """The argument `shapeB` is the weight's shape before packing: (output features, input features)."""
    return int(2 * prod(call.arguments["A"].shape) * call.arguments["shapeB"][0])


STORED_NUMBERS = (
    "the FLOPs of sparse products depend on the number of stored elements, which may differ in other batches"
)


def sparse_product_flops(call: OpCall) -> OpFlops | None:
    """Return the FLOPs of a product with exactly one sparse factor; None for any other op or layout.

    Every stored element is multiplied with one row or column of the dense factor.
    """
    name = op_name(call.func).removesuffix("_")
    if name not in ("aten::mm", "aten::addmm", "aten::_sparse_addmm", "aten::mv"):
        return None
    left, right = (call.arguments[each] for each in FACTORS[name])
    if (left.layout is torch.strided) == (right.layout is torch.strided):
        return None
    if right.layout is torch.strided:
        stored, products_per_element = _stored(left), prod(right.shape[1:])
    else:
        stored, products_per_element = _stored(right), left.shape[0]
    return None if stored is None else OpFlops(2 * stored * products_per_element, note=STORED_NUMBERS)


def _stored(matrix: Any) -> int | None:
    if matrix.layout is torch.sparse_coo:
        stored = int(coo_values(matrix).numel())
    elif matrix.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        stored = int(matrix.values().numel())
    else:
        return None
    if stored == 0 and isinstance(matrix, FakeTensor):  # `to_sparse` and `coalesce` of a fake tensor store 0 elements
        raise UntraceableError("a fake sparse tensor does not have the number of elements that the real one stores")
    return stored


# LU, Cholesky and triangular solves take the same steps for all values, so they have formulas. Singular values and
# eigenvalues are computed by iteration, and a matrix exponential takes as many products as its norm requires, so these
# ops are reported as uncounted.


@formula("aten::linalg_solve_triangular")
def _solve_triangular(call: OpCall) -> int:
    return triangular_solve_flops(
        call.out.shape, call.arguments["self"].shape[-1], unitriangular=call.arguments["unitriangular"]
    )


def triangular_solve_flops(solution_shape: tuple[int, ...], order: int, *, unitriangular: bool) -> int:
    """Return the FLOPs of solving a triangular system of order n for all right-hand sides.

    Row i takes i multiply-adds and one division per right-hand side, together 2 x n(n-1)/2 + n = n². A diagonal
    of ones needs no divisions, which leaves n² - n (BLAS xTRSM, LAPACK Working Note 41).
    """
    return prod(solution_shape) * (order - 1 if unitriangular else order)


def lu_flops(shape: tuple[int, ...]) -> int:
    """Return the FLOPs of an LU factorisation by Gaussian elimination.

    Step k divides m - k numbers and updates the (m - k) x (n - k) block to their right. For a square matrix this takes
    2n³/3 - n²/2 - n/6 FLOPs (Golub and Van Loan, Matrix Computations, 3.2; LAPACK Working Note 41).

    >>> lu_flops((3, 3))
    13
    """
    *batch, rows, columns = shape
    steps = range(1, min(rows, columns) + 1)
    return prod(batch) * sum((rows - k) * (1 + 2 * (columns - k)) for k in steps)


def lu_solve_flops(solution_shape: tuple[int, ...], order: int) -> int:
    """Return the FLOPs of two triangular solves, of which one has a diagonal of ones."""
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
    """Torch inverts a matrix by solving for all columns of the identity matrix, and does not skip their zeros."""
    matrix = call.arguments["A"].shape
    return lu_flops(matrix) + lu_solve_flops(matrix, matrix[-1])


@formula("aten::linalg_cholesky_ex")
def _cholesky(call: OpCall) -> int:
    """A factorisation takes n³/3 + n²/2 + n/6 FLOPs, including n square roots (LAPACK Working Note 41, xPOTRF)."""
    *batch, order, _ = (int(size) for size in call.arguments["self"].shape)
    return prod(batch) * (order * (order + 1) * (2 * order + 1) // 6)


@formula("aten::cholesky_solve")
def _cholesky_solve(call: OpCall) -> int:
    order = call.arguments["input2"].shape[-1]
    return 2 * triangular_solve_flops(call.out.shape, order, unitriangular=False)
