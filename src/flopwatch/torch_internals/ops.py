"""Private names of torch's dispatcher and of tensors, with their checks."""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from flopwatch.torch_internals import CHECKS, declare

OpOverload: Any = type(torch.ops.aten.mm.default)
OpOverloadPacket: Any = type(torch.ops.aten.mm)

# --- The dispatcher ---------------------------------------------------------------------------------------------------

_SCHEMA = declare("torch._ops.OpOverload._schema")


def _probe_schema() -> bool:
    mm, add = torch.ops.aten.mm.default, torch.ops.aten.add_.Tensor
    schema, writes = getattr(mm, _SCHEMA), getattr(add, _SCHEMA)
    names = [argument.name for argument in schema.arguments]
    alpha = writes.arguments[2]
    return (
        names == ["self", "mat2"]
        and not schema.is_mutable
        and writes.is_mutable
        and writes.arguments[0].alias_info.is_write
        and alpha.kwarg_only
        and alpha.default_value == 1
    )


CHECKS[(_SCHEMA,)] = _probe_schema


def op_schema(op: Any) -> Any:
    """The names and defaults of an op's arguments, and which of them it writes to."""
    return op._schema


def op_name(op: Any) -> str:
    """The qualified name of an op without its overload (`aten::add`), because formulas apply to all overloads."""
    return op.name().partition(".")[0]  # type: ignore[no-any-return]


def short_op_name(op: Any) -> str:
    return op.__name__.partition(".")[0]  # type: ignore[no-any-return]


def can_decompose(op: Any) -> bool:
    return bool(op.has_kernel_for_dispatch_key("CompositeImplicitAutograd"))


_KEYS = {"cpu": "CPU", "cuda": "CUDA", "hpu": "HPU", "meta": "Meta", "mps": "MPS", "mtia": "MTIA", "xpu": "XPU"}


def has_kernel(op: Any, device_types: Iterable[str]) -> bool:
    """Whether an op has a kernel for one of these device types; True for a type that is not in the table."""
    return any(name not in _KEYS or op.has_kernel_for_dispatch_key(_KEYS[name]) for name in device_types)


def aten_packet(name: str) -> Any:
    """An op of the aten namespace; if the torch release lacks it, an object that is equal to no op."""
    return getattr(torch.ops.aten, name, None) or object()


# Private ops, which users run through public functions such as `torch.nn.functional.ctc_loss`.
CTC_LOSS = aten_packet("_ctc_loss")
CTC_LOSS_BACKWARD = aten_packet("_ctc_loss_backward")
GROUPED_MM = aten_packet("_grouped_mm")
PIN_MEMORY = aten_packet("_pin_memory")
TO_COPY = aten_packet("_to_copy")
FUSED_SDP_CHOICE = aten_packet("_fused_sdp_choice")
"""Returns the kernel that `scaled_dot_product_attention` would choose, as the integer value of an `SDPBackend`."""

_STACK = declare("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
dispatch_mode_stack: Callable[[], list[Any]] = getattr(sys.modules[TorchDispatchMode.__module__], _STACK, list)
"""The active dispatch modes, the innermost last."""


def _probe_stack() -> bool:
    with TorchDispatchMode() as outer, TorchDispatchMode() as inner:
        seen = list(dispatch_mode_stack())
    return [id(mode) for mode in seen] == [id(outer), id(inner)] and not dispatch_mode_stack()


CHECKS[(_STACK,)] = _probe_stack


@contextmanager
def modes_off() -> Iterator[None]:
    """Switch off all dispatch modes, so that the user's modes, such as another counter, do not receive flopwatch's ops.

    The methods of the base class are called, because `FlopCounterMode`, for example, prints its table on exit.
    """
    modes = dispatch_mode_stack()
    for mode in reversed(modes):
        TorchDispatchMode.__exit__(mode, None, None, None)
    try:
        yield
    finally:
        for mode in modes:
            TorchDispatchMode.__enter__(mode)


_OPDEFS = declare("torch._library.custom_ops.OPDEFS")
_INIT_FN = declare("torch._library.custom_ops.CustomOpDef._init_fn")


def python_body(op: Any) -> Callable[..., Any] | None:
    """The Python function of a `torch.library.custom_op`; None if unknown, or if a device has a kernel of its own."""
    definition: Any = getattr(sys.modules.get("torch._library.custom_ops"), _OPDEFS, {}).get(op_name(op))
    if definition is None or has_kernel(op, ("cpu", "cuda", "xpu")):
        return None
    body = getattr(definition, _INIT_FN, None)
    names = [argument.name for argument in op_schema(op).arguments]
    return body if inspect.isfunction(body) and list(inspect.signature(body).parameters) == names else None


_HIGHER_ORDER_OPS = ("cond", "flex_attention", "flex_attention_backward", "map_impl", "scan", "while_loop", "wrap")


def receive_higher_order_ops(mode_class: type[TorchDispatchMode]) -> None:
    """Let dispatch modes of this class receive higher-order ops, such as `flex_attention`, like other ops.

    The attribute `supports_higher_order_operators` has this effect since torch 2.9. In earlier releases such an op
    raises an error under a dispatch mode, unless a handler for the class of the mode is registered with the op.
    """
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    for name in _HIGHER_ORDER_OPS:
        op: Any = getattr(torch.ops.higher_order, name, None)
        if op is not None and mode_class not in op.python_key_table:
            # The default binds this op, not that of the last turn.
            op.py_impl(mode_class)(lambda mode, *args, op=op, **kwargs: mode.__torch_dispatch__(op, (), args, kwargs))


# --- Tensors ----------------------------------------------------------------------------------------------------------

_VERSION = declare("torch.Tensor._version")
_never_again = itertools.count()


def _counter_of(kind: type) -> Callable[[torch.Tensor], int]:
    return attrgetter(_VERSION) if hasattr(kind, _VERSION) else lambda _: next(_never_again)


tensor_version = _counter_of(torch.Tensor)
"""A counter that every in-place write increments. If torch has none, each call returns a new number."""


def needs_values(error: BaseException) -> bool:
    return type(error).__module__ == FakeTensorMode.__module__


def coo_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._values()


def stored_count(tensor: torch.Tensor) -> int:
    return int((coo_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()).shape[0])


# --- Attention --------------------------------------------------------------------------------------------------------


def is_flex_attention(func: Any) -> bool:
    name = getattr(func, "name", None)
    return inspect.ismethod(name) and name() == "flex_attention"


def is_identity_score(score_mod: Any) -> bool:
    """Whether a `score_mod` of `flex_attention` returns the score itself, as the one that torch uses for None does."""
    score = object()
    try:
        return score_mod(score, 0, 0, 0, 0) is score
    except Exception:  # noqa: BLE001 - a function of the user, which expects tensors
        return False


def is_flex_device_check(frame: FrameType) -> bool:
    """Whether `frame` is in `flex_attention`, which checks `requires_grad` to reject a backward pass on the CPU."""
    return frame.f_globals.get("__name__") == "torch.nn.attention.flex_attention"
