"""What the commonest ops give for fake tensors, without the long way through torch's fake mode.

The fake mode describes and hashes every call and keeps what it gave, which takes several times as long as torch's own
shape function (kernel of the meta device) where that is written in C++. Those ops go to it at once, with the tensors
the fake mode would have given it. Elementwise ops have slow shape functions, but a plain rule. Whatever is not plain
(other types, strides, broadcasts, a known value) is left to the fake mode.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_CPU = torch.device("cpu")
_aten = torch.ops.aten

SHAPED_BY_TORCH = {
    _aten._to_copy.default,
    _aten._unsafe_view.default,
    _aten.alias.default,
    _aten.bmm.default,
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


def quick_answer(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op whose tensors are all fakes of this mode; None where the mode itself has to be asked."""
    if func in SHAPED_BY_TORCH and kwargs.keys() <= _COPY_OPTIONS:
        # There is one device only, and to name it would make a real tensor.
        kept = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format")}
        return _shaped_by_torch(mode, func, args, kept)
    if func in ELEMENTWISE and kwargs.keys() <= _KEEP_THE_TYPE:
        return _elementwise(mode, args)
    rule = _RULES.get(func)
    return None if rule is None or kwargs else rule(mode, *args)


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
    return _empty(mode, largest.shape, dtype)


def _addmm(mode: FakeTensorMode, bias: Any, one: Any, other: Any) -> FakeTensor | None:
    shape = torch.Size([one.shape[0], other.shape[-1]])
    fits = one.dim() == other.dim() == 2 and one.shape[1] == other.shape[0] and _broadcasts(bias.shape, shape)
    return _empty(mode, shape, one.dtype) if fits and _are_of_one_type(bias, one, other) else None


def _layer_norm(
    mode: FakeTensorMode, tensor: Any, shape: list[int], weight: Any, bias: Any, _: float
) -> tuple[FakeTensor, ...] | None:
    if not _may_be_normed(tensor, shape, weight, bias):
        return None
    per_row = torch.Size([*tensor.shape[: tensor.dim() - len(shape)], *[1] * len(shape)])
    return tuple(_empty(mode, each, tensor.dtype) for each in (tensor.shape, per_row, per_row))


def _layer_norm_backward(
    mode: FakeTensorMode,
    gradient: Any,
    tensor: Any,
    shape: list[int],
    _: Any,
    __: Any,
    weight: Any,
    bias: Any,
    mask: Any,
) -> tuple[FakeTensor | None, ...] | None:
    if not _may_be_normed(tensor, shape, weight, bias) or gradient.shape != tensor.shape:
        return None
    wanted = zip(mask, (tensor, weight, bias), strict=True)
    return tuple(_empty(mode, each.shape, each.dtype) if is_wanted else None for is_wanted, each in wanted)


def _may_be_normed(tensor: Any, shape: list[int], weight: Any, bias: Any) -> bool:
    """With fp32 throughout: kernels for other types choose the type of the statistics."""
    if weight is None or bias is None or tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        return False
    fits = tuple(tensor.shape[-len(shape) :]) == tuple(weight.shape) == tuple(bias.shape) == tuple(shape)
    return fits and _are_of_one_type(tensor, weight, bias)


_RULES: dict[Any, Callable[..., Any]] = {
    _aten.addmm.default: _addmm,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
}


def quick_loss(mode: FakeTensorMode, func: Any, args: tuple[Any, ...]) -> Any:
    """The same for the loss of class scores, whose targets are real; torch's own way takes it apart."""
    if func is _aten.nll_loss_forward.default:
        scores, target, weight, reduction, _ = args
        if weight is None and _are_rows_of_scores(scores, target):
            losses = target.shape if reduction == 0 else torch.Size()
            return _empty(mode, losses, scores.dtype), _empty(mode, torch.Size(), scores.dtype)
    if func is _aten.nll_loss_backward.default:
        _, scores, target, weight, *_ = args
        if weight is None and _are_rows_of_scores(scores, target):
            return _empty(mode, scores.shape, scores.dtype)
    return None


def _are_rows_of_scores(scores: Any, target: Any) -> bool:
    is_known = type(scores) is FakeTensor and _is_plain(scores) and scores.dtype.is_floating_point
    return is_known and scores.dim() == 2 and scores.is_contiguous() and target.shape == scores.shape[:1]


def _empty(mode: FakeTensorMode, shape: torch.Size, dtype: torch.dtype) -> FakeTensor:
    with in_kernel_invocation_manager(mode):
        out = torch.empty(shape, dtype=dtype, device="meta")
    return FakeTensor(mode, out, _CPU)


def _are_of_one_type(*tensors: Any) -> bool:
    dtype = tensors[0].dtype
    return dtype.is_floating_point and all(
        type(tensor) is FakeTensor and tensor.dtype == dtype and _is_plain(tensor) for tensor in tensors
    )


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
