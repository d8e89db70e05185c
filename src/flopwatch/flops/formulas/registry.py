"""The registry of formulas, and the compute type of a product.

Formulas are registered by the op's qualified name (`aten::mm`), so an op of a package that is not installed can have
one. Ours take precedence over torch's registry, which also contains the formulas that users have given to torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry as torch_registry

from flopwatch.errors import InputError
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals import OpOverload, OpOverloadPacket, op_name, op_packet, op_schema, packet_name


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of one op, its arguments by the names of the op's schema, defaults filled in.

    In a backward op, `needs_grad` says which inputs of the forward op need a gradient, in order; empty if unknown.
    """

    func: OpOverload
    arguments: Mapping[str, Any]
    out: Any
    attention: AttentionConvention = "full"
    needs_grad: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class OpFlops:
    """FLOPs of one call: `needed` by the mathematics, and `extra` ones that the kernel computes beyond that.

    `dtype` is the type of the products if it is not that of the op's first factor (a kernel that quantises its input).
    """

    needed: int
    extra: int = 0
    note: str | None = None
    dtype: str | None = None


Formula = Callable[[OpCall], OpFlops | int | None]
"""Returns None if this call cannot be counted, although other calls of its op can."""

_formulas: dict[str, Formula] = {}


def formula(*names: str) -> Callable[[Formula], Formula]:
    """Register a built-in formula under the ops' qualified names."""

    def register(function: Formula) -> Formula:
        _formulas.update(dict.fromkeys(names, function))
        return function

    return register


def register_formula(
    op: str | OpOverloadPacket[Any, Any] | OpOverload[Any, Any], *, replace: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register what an op costs.

    The function gets the op's arguments as they were passed, and its result as `out`. Tensors may be fake: read shapes,
    not values.

    Args:
        op: `torch.ops.mylib.foo` or its name, `"mylib::foo"`.
        replace: True replaces a formula that is already registered.

    Example:
        >>> @register_formula("mylib::scale_and_multiply")
        ... def scale_and_multiply_flops(a, b, scale, *, out):
        ...     return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    """
    name = op if isinstance(op, str) else _qualified_name(op)
    if "::" not in name:
        raise InputError(f"an op's name looks like 'mylib::foo', got {name!r}")
    if name in _formulas and not replace:
        raise InputError(f"{name} has a formula already; pass replace=True to put yours in its place")

    def register(function: Callable[..., int]) -> Callable[..., int]:
        def as_called(call: OpCall) -> int:
            args, kwargs = unbind(call)
            return function(*args, **kwargs, out=call.out)

        _formulas[name] = as_called
        return function

    return register


def find_formula(func: OpOverload[Any, Any]) -> Formula | None:
    """Our formula for this op, else torch's, else None. In-place variants (`addmm_`) cost what the plain op costs."""
    name = op_name(func)
    ours = _formulas.get(name) or _formulas.get(name.removesuffix("_"))
    if ours is not None:
        return ours
    theirs = torch_registry.get(op_packet(func))
    if theirs is None:
        return None

    def as_called(call: OpCall) -> int:
        args, kwargs = unbind(call)
        return int(theirs(*args, **kwargs, out_val=call.out))

    return as_called


def bind(func: OpOverload[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by the names in the op's schema, in the schema's order."""
    schema = op_schema(func).arguments
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    bound.update(zip((argument.name for argument in schema), args, strict=False))
    bound.update(kwargs)
    return {argument.name: bound[argument.name] for argument in schema if argument.name in bound}


def unbind(call: OpCall) -> tuple[list[Any], dict[str, Any]]:
    """The arguments in the form of a call: positional ones in order, keyword-only ones by name."""
    schema = op_schema(call.func).arguments
    given = call.arguments
    args = [given[item.name] for item in schema if not item.kwarg_only and item.name in given]
    kwargs = {item.name: given[item.name] for item in schema if item.kwarg_only and item.name in given}
    return args, kwargs


def _qualified_name(op: OpOverloadPacket[Any, Any] | OpOverload[Any, Any]) -> str:
    if isinstance(op, OpOverload):
        return str(op_name(op))
    return str(packet_name(op))


# The names in the table of peaks; a test compares them with those of `canonical_dtype`.
_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e5m2fnuz: "fp8",
    torch.float4_e2m1fn_x2: "fp4",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.qint8: "int8",
    torch.quint8: "int8",
    # A complex multiply-add is four real ones of the parts' type.
    torch.complex128: "fp64",
    torch.complex64: "fp32",
    torch.complex32: "fp16",
}
# Names of factors: ops with an addend have it as their first argument, and it may have another type.
_FACTORS = ("mat1", "batch1", "mat", "vec1", "self", "input", "query", "q")


def compute_type(dtype: torch.dtype) -> str:
    """The compute type's name; for a type without a peak, torch's own name.

    >>> compute_type(torch.bfloat16), compute_type(torch.int64)
    ('bf16', 'int64')
    """
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def type_of_product(arguments: Mapping[str, Any]) -> str | None:
    """The type of an op's first factor, which is the activation; None if no argument is a tensor.

    Weights of another type (int8 or int4 storage) are converted to the activation's type before the product. A formula
    of an op that converts the activation instead sets `OpFlops.dtype`.
    """
    first = next((arguments[name] for name in _FACTORS if isinstance(arguments.get(name), torch.Tensor)), None)
    if first is None:
        first = next((value for value in arguments.values() if isinstance(value, torch.Tensor)), None)
    return None if first is None else compute_type(first.dtype)
