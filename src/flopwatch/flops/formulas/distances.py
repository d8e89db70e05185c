"""Distances between all pairs of points, and the grids of spatial transformers.

The squared distance of two points is a sum of products over their coordinates, like an element of a matrix product:
|a - b|² = |a|² - 2a·b + |b|². torch takes a matrix product for more than 25 points and a loop over the coordinates for
fewer (ATen/native/Distance.cpp); the mathematics is the same, so both count as that product. Other norms have no
products: they count as element-wise work.
"""

from math import prod

from flopwatch.flops.formulas.matmul import matmul_flops
from flopwatch.flops.formulas.registry import OpCall, OpFlops, formula


@formula("aten::_euclidean_dist")
def _euclidean(call: OpCall) -> OpFlops:
    """The matrix product has two columns more, which carry the norms."""
    pairs, width = prod(call.out.shape), call.arguments["x1"].shape[-1]
    return OpFlops(2 * pairs * width, 2 * pairs * 2)


@formula("aten::_cdist_forward")
def _cdist(call: OpCall) -> int:
    return _product(call, prod(call.out.shape), "x1")


@formula("aten::_cdist_backward")
def _cdist_backward(call: OpCall) -> int:
    """The gradient of the first points: each pair's gradient times the other point's coordinates."""
    return _product(call, prod(call.arguments["grad"].shape), "x1")


@formula("aten::_pdist_forward")
def _pdist(call: OpCall) -> int:
    return _product(call, prod(call.out.shape), "self")


@formula("aten::_pdist_backward")
def _pdist_backward(call: OpCall) -> int:
    """Each pair gives a gradient to both of its points."""
    return 2 * _product(call, prod(call.arguments["grad"].shape), "self")


def _product(call: OpCall, pairs: int, points: str) -> int:
    return 2 * pairs * call.arguments[points].shape[-1] if call.arguments["p"] == 2 else 0


@formula("aten::affine_grid_generator", "aten::cudnn_affine_grid_generator")
def _affine_grid(call: OpCall) -> int:
    """Every position, with a 1 behind its coordinates, meets the transform's matrix."""
    *positions, dims = call.out.shape
    return matmul_flops(prod(positions), dims + 1, dims)
