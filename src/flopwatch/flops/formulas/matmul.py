"""Matrix products: plain, batched, grouped, scaled, with a vector, trilinear."""

from collections.abc import Sequence
from math import prod

import torch

from flopwatch.flops.formulas.registry import OpCall, formula


def matmul_flops(rows: int, contracted: int, columns: int) -> int:
    return 2 * rows * contracted * columns


@formula("aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_int_mm", "aten::mm")
def _mm(call: OpCall) -> int:
    left = call.arguments["self"]
    (rows, contracted), columns = left.shape, call.arguments["mat2"].shape[1]
    numbers_per_element = 2 if left.dtype is torch.float4_e2m1fn_x2 else 1
    return matmul_flops(rows, contracted * numbers_per_element, columns)


@formula("aten::addmm", "aten::_addmm_activation")
def _addmm(call: OpCall) -> int:
    (rows, contracted), columns = call.arguments["mat1"].shape, call.arguments["mat2"].shape[1]
    return matmul_flops(rows, contracted, columns)


@formula("aten::bmm")
def _bmm(call: OpCall) -> int:
    batch, rows, contracted = call.arguments["self"].shape
    return matmul_flops(batch * rows, contracted, call.arguments["mat2"].shape[2])


@formula("aten::_foreach_mm")
def _foreach_mm(call: OpCall) -> int:
    pairs = zip(call.arguments["self"], call.arguments["mat2"], strict=True)
    return sum(matmul_flops(left.shape[0], left.shape[1], right.shape[1]) for left, right in pairs)


@formula("aten::linear_backward", "aten::mkldnn_linear_backward")
def _linear_backward(call: OpCall) -> int:
    data, weight = call.arguments["self"], call.arguments["weight"]
    grad_input, grad_weight, _ = call.arguments["output_mask"]
    return matmul_flops(prod(data.shape[:-1]), data.shape[-1], weight.shape[0]) * (int(grad_input) + int(grad_weight))


@formula("aten::baddbmm", "aten::addbmm")
def _baddbmm(call: OpCall) -> int:
    batch, rows, contracted = call.arguments["batch1"].shape
    return matmul_flops(batch * rows, contracted, call.arguments["batch2"].shape[2])


@formula("aten::mv")
def _mv(call: OpCall) -> int:
    rows, contracted = call.arguments["self"].shape
    return matmul_flops(rows, contracted, 1)


@formula("aten::addmv")
def _addmv(call: OpCall) -> int:
    rows, contracted = call.arguments["mat"].shape
    return matmul_flops(rows, contracted, 1)


@formula("aten::dot", "aten::vdot")
def _dot(call: OpCall) -> int:
    return matmul_flops(1, call.arguments["self"].shape[0], 1)


@formula("aten::addr")
def _addr(call: OpCall) -> int:
    return matmul_flops(call.arguments["vec1"].shape[0], 1, call.arguments["vec2"].shape[0])


@formula("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2")
def _grouped_mm(call: OpCall) -> int:
    return grouped_mm_flops(call.arguments["self"].shape, call.arguments["mat2"].shape)


@formula("transformers::grouped_mm_fallback")
def _grouped_mm_fallback(call: OpCall) -> int:
    return grouped_mm_flops(call.arguments["input"].shape, call.arguments["weight"].shape)


def grouped_mm_flops(a_shape: Sequence[int], b_shape: Sequence[int]) -> int:
    """FLOPs of a grouped matmul: every row meets one group's matrix, so the groups do not multiply.

    3-D by 3-D is a plain batched product. In the other cases the groups cut the rows, the columns or (2-D by 2-D,
    the weight gradient) the contracted dimension of one matrix, and together they are that whole matrix once.
    """
    if len(a_shape) == len(b_shape) == 3:
        return a_shape[0] * matmul_flops(a_shape[1], a_shape[2], b_shape[2])
    return matmul_flops(a_shape[-2], a_shape[-1], b_shape[-1])


@formula("aten::_trilinear")
def _trilinear(call: OpCall) -> int:
    """`nn.Bilinear`: contract the first two operands, then the result with the third (ATen's order)."""
    arguments = call.arguments
    first, second, third = (_expanded(arguments[f"i{index}"].shape, arguments[f"expand{index}"]) for index in (1, 2, 3))
    summed = set(arguments["sumdim"])
    whole = [max(sizes) for sizes in zip(first, second, third, strict=True)]
    pair = [max(a, b) for a, b in zip(first, second, strict=True)]
    # Dimensions only the first two share are summed away before the third operand joins.
    left = [1 if axis in summed and third[axis] == 1 else size for axis, size in enumerate(whole)]
    return 2 * prod(pair) + 2 * prod(left)


def _expanded(shape: Sequence[int], expand: Sequence[int]) -> list[int]:
    sizes = list(shape)
    for axis in sorted(expand):
        sizes.insert(axis, 1)
    return sizes
