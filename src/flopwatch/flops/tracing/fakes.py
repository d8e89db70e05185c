"""Makes fake tensors (shapes without storage) and runs ops on them, even ops that torch's fake tensors cannot run.

Parameters, floating-point buffers and floating-point inputs become fake. Everything else (token ids, grids, masks,
random draws) stays real, because the model's control flow may need its values. Torch's fake mode is not entered: an op
with a fake argument runs on fake tensors, any other op really runs.

Common ops bypass the fake mode to save time: the mode describes, hashes and caches every call, which takes several
times as long as the meta kernel that it calls in the end. Here, ops with a C++ meta kernel call it directly, and
elementwise ops, whose meta kernels are slow, follow a simple rule. Unusual cases (other types, strides, broadcasts,
known values) still go to the fake mode.
"""

from __future__ import annotations  # earlier torch releases raise an error for `OpOverload[...]`

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, cast

import torch

from flopwatch.errors import UntraceableError
from flopwatch.flops.formulas import bind
from flopwatch.flops.tree import leaves_of, map_tensors_in
from flopwatch.torch_internals.ops import (
    CTC_LOSS,
    CTC_LOSS_BACKWARD,
    FAKE_TENSOR_LOGGER,
    GROUPED_MM,
    TO_COPY,
    UNSAFE_VIEW,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    kernels_on_fakes,
    modes_off,
    op_packet,
    runs_kernels_on_fakes,
)

_CPU = torch.device("cpu")
_aten = torch.ops.aten

_WITH_META_KERNEL = """
alias.default bmm.default clone.default detach.default expand.default mm.default permute.default select.int slice.Tensor
t.default transpose.int unsqueeze.default view.default
"""
SHAPED_BY_TORCH = {
    TO_COPY.default,
    UNSAFE_VIEW.default,
    *(attrgetter(name)(_aten) for name in _WITH_META_KERNEL.split()),
}
"""Ops with one output, whose shape and strides a C++ meta kernel computes."""
_ELEMENTWISE = """
add.Scalar add.Tensor cos.default div.Scalar div.Tensor exp.default gelu.default gelu_backward.default mul.Scalar
mul.Tensor neg.default pow.Tensor_Scalar relu.default rsqrt.default sigmoid.default silu.default sin.default sub.Tensor
tanh.default tanh_backward.default threshold_backward.default
"""
ELEMENTWISE = {attrgetter(name)(_aten) for name in _ELEMENTWISE.split()}
"""Ops whose output is contiguous and of the inputs' type if all inputs are contiguous and of one floating type."""
# Keyword arguments of elementwise ops that do not change the type or shape of the output.
_KEEP_THE_TYPE = {"alpha", "approximate"}
# With any other keyword argument, an op in `SHAPED_BY_TORCH` runs in the fake mode.
_COPY_OPTIONS = {"dtype", "device", "memory_format", "non_blocking"}


def quick_answer(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an op on fake tensors of this mode; None if the op has to run in the mode itself."""
    if func in SHAPED_BY_TORCH and kwargs.keys() <= _COPY_OPTIONS:
        # `device` is left out, because with it the meta kernel would allocate a real tensor.
        kept = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format")}
        return _shaped_by_torch(mode, func, args, kept)
    if func in ELEMENTWISE and kwargs.keys() <= _KEEP_THE_TYPE:
        return _elementwise(mode, args)
    rule = _RULES.get(func)
    return None if rule is None or kwargs else rule(mode, *args)


def _shaped_by_torch(
    mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FakeTensor | None:
    if not runs_kernels_on_fakes() or any(type(value) is FakeTensor and not _is_plain(value) for value in args):
        return None
    with kernels_on_fakes(mode):
        out = func(*args, **kwargs)
    return FakeTensor(mode, out, _CPU)


def _elementwise(mode: FakeTensorMode, args: tuple[Any, ...]) -> FakeTensor | None:
    tensors = [value for value in args if type(value) is FakeTensor]
    if any(type(value) not in (FakeTensor, int, float, bool) for value in args):
        return None
    dtype = tensors[0].dtype
    # The result has the shape of the largest operand if all others broadcast to it.
    largest = max(tensors, key=_size) if len(tensors) > 1 else tensors[0]
    for tensor in tensors:
        if tensor.dtype != dtype or not _is_plain(tensor) or not tensor.is_contiguous():
            return None
        if tensor is not largest and not _broadcasts(tensor.shape, largest.shape):
            return None
    # Torch may promote integers to another type, so the type of the result is not known here.
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
    """Return whether all tensors are contiguous fp32, and weight and bias have the shape `shape`.

    If so, all outputs of the layer norm are fp32. For other types, the kernel chooses the type of mean and rstd.
    """
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
    """Return the fake result of `nll_loss` or its backward, which the fake mode would decompose; otherwise None."""
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
    return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), _CPU)


def _are_of_one_type(*tensors: Any) -> bool:
    dtype = tensors[0].dtype
    return dtype.is_floating_point and all(
        type(tensor) is FakeTensor and tensor.dtype == dtype and _is_plain(tensor) for tensor in tensors
    )


def _is_plain(tensor: FakeTensor) -> bool:
    """Return whether a tensor is dense and has no values. If it had values, the fake mode would compute with them."""
    return tensor.layout is torch.strided and tensor.constant is None and tensor.real_tensor is None


def _size(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.dim(), tensor.numel()


def _broadcasts(small: torch.Size, large: torch.Size) -> bool:
    if small == large:
        return True
    return len(small) <= len(large) and all(
        own in (1, size) for own, size in zip(reversed(small), reversed(large), strict=False)
    )


_INDEXED_BY_MASK = {_aten.index, _aten.index_put, _aten.index_put_}


class Faker:
    """Makes fake tensors, all with the same `FakeTensorMode`, and runs ops on them."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor for a floating-point tensor, and a CPU copy of any other tensor."""
        if tensor.layout is not torch.strided:
            raise UntraceableError(f"torch has no fake tensors of layout {tensor.layout} (shape {tuple(tensor.shape)})")
        if tensor.is_floating_point() or tensor.is_complex():
            return self._empty(tensor.shape, tensor.dtype)
        if tensor.device.type == "meta":
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=_CPU)
        return _values_here(tensor).detach().to(_CPU, copy=True)

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        with modes_off():
            return FakeTensor(self._mode, torch.empty(shape, dtype=dtype, device="meta"), _CPU)

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op. Every device argument becomes the CPU, because nothing may run on an accelerator."""
        if (
            _are_fake(args)
            and not any(isinstance(value, torch.Tensor) for value in kwargs.values())
            and isinstance(func, OpOverload)
        ):
            return self._run_on_fakes(func, args, kwargs)
        args, kwargs = map_tensors_in(self._localised, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}
        if any(isinstance(leaf, FakeTensor) for leaf in leaves_of((args, kwargs))):
            # torch would make these tensors fake too, but it would warn about those that are not leaves of the graph.
            args, kwargs = map_tensors_in(self._faked, (args, kwargs))
            answer = self._answer(func, args, kwargs)
            if answer is not None:
                return answer
        return func(*args, **kwargs)

    def _run_on_fakes(self, func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op by calling the fake mode directly, which is faster than through the tensors' own dispatch."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}
        answer: Any = quick_answer(self._mode, func, args, kwargs)
        if answer is None:
            answer = self._answer(func, args, kwargs)
        if answer is None:
            answer = self._mode.dispatch(func, (FakeTensor,), args, kwargs)
        return func(*args, **kwargs) if answer is NotImplemented else answer

    def _localised(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if isinstance(tensor, torch.nn.Parameter):
            raise UntraceableError(
                f"the model uses a parameter of shape {tuple(tensor.shape)} that is not among its parameters()"
            )
        return tensor if tensor.device == _CPU else self.tensor(tensor)

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        is_real = not isinstance(tensor, FakeTensor) and (tensor.is_floating_point() or tensor.is_complex())
        return self.tensor(tensor) if is_real else tensor

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an op that torch's fake tensors cannot run; None for all other ops."""
        packet = op_packet(func) if isinstance(func, OpOverload) else None
        if packet in _INDEXED_BY_MASK:
            return func(args[0], _mask_to_positions(args[1]), *args[2:], **kwargs)
        if packet is GROUPED_MM:
            return self._grouped_mm(bind(func, args, kwargs))
        if packet is _aten.bincount:
            return self._bincount(bind(func, args, kwargs))
        if packet is CTC_LOSS:
            return self._ctc_loss(bind(func, args, kwargs))
        if packet is CTC_LOSS_BACKWARD:
            log_probs = bind(func, args, kwargs)["log_probs"]
            return self._empty(log_probs.shape, log_probs.dtype)
        return None if kwargs else quick_loss(self._mode, func, args)

    def _grouped_mm(self, arguments: dict[str, Any]) -> torch.Tensor:
        """Return the result of a grouped matmul of any type, because torch's meta kernel accepts bf16 only."""
        a, b, offsets = arguments["self"], arguments["mat2"], arguments["offs"]
        groups = [] if a.dim() != b.dim() else [a.shape[0] if a.dim() == 3 else offsets.shape[0]]
        shape = torch.Size([*groups, a.shape[-2], b.shape[-1]])
        return self._empty(shape, arguments["out_dtype"] or a.dtype)

    def _bincount(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return `minlength` counts, as if all ids in the input were smaller; None if `minlength` is not given."""
        size = arguments["minlength"]
        return self._empty(torch.Size([size]), torch.int64) if size else None

    def _ctc_loss(self, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = arguments["log_probs"]
        time, batch = log_probs.shape[:2]
        # The kernel puts a blank before, between and after n target tokens (Graves et al., ICML 2006): 2n + 1 states.
        longest = max(int(length) for length in arguments["target_lengths"])
        losses = self._empty(torch.Size([batch]), log_probs.dtype)
        return losses, self._empty(torch.Size([batch, time, 2 * longest + 1]), log_probs.dtype)


def _are_fake(values: Iterable[Any]) -> bool:
    """Return whether an op's arguments contain a fake tensor and no real one."""
    found = False
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            found = True
        elif isinstance(value, torch.Tensor | Mapping):
            return False
        elif kind in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
            if not _are_fake(value):
                return False
            found = True
    return found


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Silence torch's log of ops whose shapes do not fit, because torch also raises an error, which we report."""
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _values_here(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a replicated DTensor. Raises for a sharded one, which would need a collective."""
    placements = getattr(tensor, "placements", ())
    if not all(placement.is_replicate() for placement in placements):
        raise UntraceableError(f"the values of a tensor of shape {tuple(tensor.shape)} are spread over ranks")
    return cast("Any", tensor).to_local() if placements else tensor


def _mask_to_positions(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace real boolean masks by the positions that they select, so that the size of the result is known."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or isinstance(index, FakeTensor) or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
        else:
            positions += index.nonzero().unbind(-1)
    return positions
