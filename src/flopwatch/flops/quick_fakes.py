"""What the commonest ops give for fake tensors, without the long way through torch's fake mode.

The fake mode describes and hashes every call and keeps what it gave, which takes several times as long as torch's own
shape function (kernel of the meta device) where that is written in C++. Those ops go to it at once, with the tensors
the fake mode would have given it. Elementwise ops have slow shape functions, but a plain rule. Whatever is not plain
(other types, strides, broadcasts, a known value) is left to the fake mode.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_CPU = torch.device("cpu")
_aten = torch.ops.aten

SHAPED_BY_TORCH = {
    _aten._to_copy.default,
    _aten._unsafe_view.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.mm.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
}
"""One tensor out, shaped and strided by C++ code."""
ELEMENTWISE = {
    _aten.add.Scalar,
    _aten.add.Tensor,
    _aten.cos.default,
    _aten.div.Scalar,
    _aten.div.Tensor,
    _aten.exp.default,
    _aten.gelu.default,
    _aten.gelu_backward.default,
    _aten.mul.Scalar,
    _aten.mul.Tensor,
    _aten.neg.default,
    _aten.pow.Tensor_Scalar,
    _aten.relu.default,
    _aten.rsqrt.default,
    _aten.sigmoid.default,
    _aten.silu.default,
    _aten.sin.default,
    _aten.sub.Tensor,
    _aten.tanh.default,
    _aten.tanh_backward.default,
    _aten.threshold_backward.default,
}
"""For floating tensors of one type they give that type."""
_KEEP_THE_TYPE = {"alpha", "approximate"}
_COPY_OPTIONS = {"dtype", "device", "memory_format", "non_blocking"}


def quick_answer(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FakeTensor | None:
    """The result of an op whose tensors are all fakes of this mode; None where the mode itself has to be asked."""
    if func in SHAPED_BY_TORCH and kwargs.keys() <= _COPY_OPTIONS:
        # There is one device only, and to name it would make a real tensor.
        kept = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format")}
        return _shaped_by_torch(mode, func, args, kept)
    if func in ELEMENTWISE and kwargs.keys() <= _KEEP_THE_TYPE:
        return _elementwise(mode, args)
    return None


def _shaped_by_torch(
    mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FakeTensor | None:
    if any(type(value) is FakeTensor and not _is_plain(value) for value in args):
        return None
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    return FakeTensor(mode, out, _CPU)


def _elementwise(mode: FakeTensorMode, args: tuple[Any, ...]) -> FakeTensor | None:
    tensors = [value for value in args if type(value) is FakeTensor]
    if any(type(value) not in (FakeTensor, int, float, bool) for value in args):
        return None
    dtype = tensors[0].dtype
    largest = max(tensors, key=_size) if len(tensors) > 1 else tensors[0]
    for tensor in tensors:
        if tensor.dtype != dtype or not _is_plain(tensor) or not tensor.is_contiguous():
            return None
        if tensor is not largest and not _broadcasts(tensor.shape, largest.shape):
            return None
    if not dtype.is_floating_point:
        return None
    with in_kernel_invocation_manager(mode):
        out = torch.empty(largest.shape, dtype=dtype, device="meta")
    return FakeTensor(mode, out, _CPU)


def _is_plain(tensor: FakeTensor) -> bool:
    """Dense, and without a value that the fake mode would calculate with."""
    return tensor.layout is torch.strided and tensor.constant is None and tensor.real_tensor is None


def _size(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.dim(), tensor.numel()


def _broadcasts(small: torch.Size, large: torch.Size) -> bool:
    if small == large:
        return True
    return len(small) <= len(large) and all(
        own in (1, size) for own, size in zip(reversed(small), reversed(large), strict=False)
    )
