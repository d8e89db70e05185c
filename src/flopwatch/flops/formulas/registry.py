"""Registers and finds the FLOP formulas of ops, names the compute type of a product, and finds an op's tensors.

Formulas are registered by the op's qualified name (`aten::mm`), so the package of an op need not be installed. Our
formulas take precedence over torch's registry, which also contains formulas that users have registered with torch.
"""

from __future__ import annotations  # earlier torch releases raise an error for `OpOverload[...]`

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry as torch_registry

from flopwatch.errors import InputError
from flopwatch.records.flops import AttentionConvention
from flopwatch.spellings import COMPUTE_TYPES
from flopwatch.torch_internals.ops import OpOverload, OpOverloadPacket, op_name, op_schema


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of one op. `arguments` are named as in the op's schema, and include defaults.

    In a backward op, `needs_grad` says for each input of the forward op whether it needs a gradient; empty if unknown.
    """

    func: OpOverload
    arguments: Mapping[str, Any]
    out: Any
    attention: AttentionConvention = "full"
    needs_grad: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class OpFlops:
    """FLOPs of one call: `needed` by the model, and `extra` FLOPs that the kernel executes in addition.

    `dtype` is the compute type if it differs from the activation's type, as in a kernel that quantises its input.
    """

    needed: int
    extra: int = 0
    note: str | None = None
    dtype: str | None = None


Formula = Callable[[OpCall], OpFlops | int | None]
"""Returns the FLOPs of a call, or None if this call cannot be counted, although other calls of the op can."""

_formulas: dict[str, Formula] = {}
kernel_formulas: dict[str, Callable[..., int]] = {}
"""The user's formulas of Triton kernels, such as `triton::my_kernel`, which are no ops."""


def formula(*names: str) -> Callable[[Formula], Formula]:
    def register(function: Formula) -> Formula:
        _formulas.update(dict.fromkeys(names, function))
        return function

    return register


def register_formula(
    op: str | OpOverloadPacket[Any, Any] | OpOverload[Any, Any], *, replace: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function that returns the FLOPs of an op.

    The function gets the arguments of the op's call, and the op's result as `out`. Read only the shapes of tensors, not
    their values, because the tensors may be fake. That of a Triton kernel gets the kernel's arguments by their names.

    Args:
        op: `torch.ops.mylib.foo` or its name, `"mylib::foo"`; `"triton::name"` for the Triton kernel of this name.
        replace: True replaces a formula that is already registered.

    Example:
        >>> @register_formula("mylib::scale_and_multiply")
        ... def scale_and_multiply_flops(a, b, scale, *, out):
        ...     return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    """
    name = op_name(op) if isinstance(op, OpOverload) else str(op)
    name = name if isinstance(op, str) else name.replace(".", "::", 1)  # a packet is printed as `mylib.foo`
    if "::" not in name:
        raise InputError(f"the name of an op must have the form 'mylib::foo', got {name!r}")
    if (name in _formulas or name in kernel_formulas) and not replace:
        raise InputError(f"{name} has a formula already; pass replace=True to replace it")

    def register(function: Callable[..., int]) -> Callable[..., int]:
        if name.startswith("triton::"):
            kernel_formulas[name] = function
            return function

        _formulas[name] = partial(_called, function, "out")
        return function

    return register


def find_formula(func: OpOverload[Any, Any]) -> Formula | None:
    """Return our formula for an op, else torch's, else None. An in-place op (`addmm_`) has the plain op's formula."""
    name = op_name(func)
    ours = _formulas.get(name) or _formulas.get(name.removesuffix("_"))
    if ours is not None:
        return ours
    theirs = torch_registry.get(func.overloadpacket)
    return None if theirs is None else partial(_called, theirs, "out_val")


def _called(formula: Callable[..., Any], out: str, call: OpCall) -> Any:
    args, kwargs = unbind(call)
    flops = formula(*args, **kwargs, **{out: call.out})
    return int(flops) if out == "out_val" else flops


def bind(func: OpOverload[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    schema = op_schema(func).arguments
    bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    bound.update(zip((argument.name for argument in schema), args, strict=False))
    bound.update(kwargs)
    return {argument.name: bound[argument.name] for argument in schema if argument.name in bound}


def unbind(call: OpCall) -> tuple[list[Any], dict[str, Any]]:
    schema = op_schema(call.func).arguments
    given = call.arguments
    args = [given[item.name] for item in schema if not item.kwarg_only and item.name in given]
    kwargs = {item.name: given[item.name] for item in schema if item.kwarg_only and item.name in given}
    return args, kwargs


FLOAT4: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)
"""Two numbers of four bits in one element; None in torch releases without this type."""

# A complex multiply-add runs as four real ones.
_STORED_AS = {
    "uint8": "int8",
    "qint8": "int8",
    "quint8": "int8",
    "complex128": "fp64",
    "complex64": "fp32",
    "complex32": "fp16",
    "bcomplex32": "bf16",
}
# The names of a product's first factor in op schemas. An addend may come before it, as in `addmm(self, mat1, mat2)`.
_FACTORS = ("mat1", "batch1", "mat", "vec1", "self", "input", "query", "q")


def compute_type(dtype: torch.dtype) -> str:
    """Return the type's name in the table of peak FLOP/s, or torch's own name if the type is not in the table.

    >>> compute_type(torch.bfloat16), compute_type(torch.int64)
    ('bf16', 'int64')
    """
    name = str(dtype).removeprefix("torch.")
    return COMPUTE_TYPES.get(name) or _STORED_AS.get(name, name)


def type_of_product(arguments: Mapping[str, Any]) -> str | None:
    """Return the compute type of an op's first factor, the activation; None if no argument is a tensor.

    Weights of another type (int8 or int4) are converted to the activation's type before the product. If an op converts
    the activation instead, its formula sets `OpFlops.dtype`.
    """
    first = next((arguments[name] for name in _FACTORS if isinstance(arguments.get(name), torch.Tensor)), None)
    if first is None:
        first = next((value for value in arguments.values() if isinstance(value, torch.Tensor)), None)
    return None if first is None else compute_type(first.dtype)


# Containers are taken apart as by torch's private pytree module: tuples, lists, dicts, named tuples, torch's result
# tuples (`torch.return_types`) and the outputs of transformers (`ModelOutput`). Everything else is a leaf, also a
# dataclass or an object of the user's.
_DICTS = (dict, OrderedDict, defaultdict)


def leaves_of(value: Any) -> list[Any]:
    """Return all leaves of a value, in order.

    >>> leaves_of(({"a": 1, "b": [2, None]}, 3))
    [1, 2, None, 3]
    """
    found: list[Any] = []
    _collect(value, found)
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def _collect(value: Any, found: list[Any]) -> None:
    items = _items(value)
    if items is None:
        found.append(value)
    else:
        for item in items:
            _collect(item, found)


def _items(value: Any) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return value
    if kind in _DICTS or (isinstance(value, OrderedDict) and is_dataclass(value)):
        return value.values()
    if isinstance(value, tuple) and (hasattr(kind, "_fields") or kind.__module__ == "torch.return_types"):
        return value
    return None


def map_tensors_in(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the value with `function` applied to its tensors.

    >>> map_tensors_in(lambda tensor: tuple(tensor.shape), {"a": [torch.zeros(2), 3]})
    {'a': [(2,), 3]}
    """
    items = _items(value)
    if items is None:
        return function(value) if isinstance(value, torch.Tensor) else value
    mapped = [map_tensors_in(function, item) for item in items]
    kind: Any = type(value)
    if kind is defaultdict:
        return kind(value.default_factory, zip(value, mapped, strict=True))
    if isinstance(value, dict):
        pairs = dict(zip(value, mapped, strict=True))
        return kind(pairs) if kind in _DICTS else kind(**pairs)
    return kind(*mapped) if hasattr(kind, "_fields") else kind(mapped)
