"""Products of one sparse and one dense matrix: every stored number meets one row of the dense factor."""

from math import prod
from typing import Any

import torch

from flopwatch.flops.formulas.registry import OpCall, OpFlops

STORED_NUMBERS = "products of sparse matrices count the numbers that are stored in them: another batch may store others"

_PRODUCTS = {
    "aten::mm": ("self", "mat2"),
    "aten::addmm": ("mat1", "mat2"),
    "aten::_sparse_addmm": ("mat1", "mat2"),
    "aten::mv": ("self", "vec"),
}


def sparse_product_flops(call: OpCall) -> OpFlops | None:
    """The FLOPs of a product with exactly one sparse factor, None for anything else."""
    names = _PRODUCTS.get(call.func._schema.name.removesuffix("_"))
    if names is None:
        return None
    left, right = (call.arguments[name] for name in names)
    if (left.layout is torch.strided) == (right.layout is torch.strided):
        return None
    if right.layout is torch.strided:
        stored, meets = _stored(left), prod(right.shape[1:])
    else:
        stored, meets = _stored(right), left.shape[0]
    return None if stored is None else OpFlops(2 * stored * meets, note=STORED_NUMBERS)


def _stored(matrix: Any) -> int | None:
    if matrix.layout is torch.sparse_coo:
        return int(matrix._values().numel())
    if matrix.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return int(matrix.values().numel())
    return None
