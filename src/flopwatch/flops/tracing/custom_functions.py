"""Finds products that a custom autograd function recomputes, as memory-saving losses and manual checkpointing do.

Such a function saves its inputs and multiplies them again in its backward pass. A recomputed product is recognised by
its op and its values, which are those of a product in the function's forward pass. The products for gradients differ:
they have another factor, or contract another dimension.

`Values` finds out whether two tensors hold the same values without reading them, by value numbering (Cocke and
Schwartz, Programming Languages and Their Compilers, 1970). The content of every storage has a number. An unknown
storage gets a new number. The number of an op's result is determined by the op, the numbers of its inputs and its other
arguments, so the same op on the same values gives the same number again. A write gives a storage another number.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from itertools import permutations
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.autograd.function import BackwardCFunction

from flopwatch.flops.formulas.matrices import FACTORS
from flopwatch.flops.formulas.registry import bind, leaves_of, tensors_in
from flopwatch.torch_internals.autograd import (
    current_autograd_node,
    current_graph_task_id,
    engine_code,
    recorded_operations,
    runs_forward_again,
    runs_forward_code,
    saves_through_hooks,
    sequence_nr,
)
from flopwatch.torch_internals.ops import TO_COPY, OpOverload, op_name, op_schema

_aten = torch.ops.aten
_COPIES = {_aten.clone, TO_COPY}


class Value(NamedTuple):
    """Tensors with equal `Value`s have equal elements. `content` is a number for what their storage contains."""

    content: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Content(NamedTuple):
    number: int
    shift: int
    """If this storage is a copy, add this to an offset in it to get the offset in the original storage."""
    is_from_forward: bool


class ByStorage:
    """Values by storage. An entry of a storage that has been freed is not found, even if another gets its address."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Any], Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def get(self, storage: Any) -> Any:
        entry = self._entries.get(id(storage))
        return None if entry is None or entry[0]() is not storage else entry[1]

    def put(self, storage: Any, value: Any) -> None:
        self._entries[id(storage)] = ref(storage), value

    def drop(self, storage: Any) -> None:
        self._entries.pop(id(storage), None)


class Values:
    """Gives the content of each storage a number. Equal numbers mean equal content."""

    def __init__(self) -> None:
        self._contents = ByStorage()
        self._numbers: dict[Hashable, int] = {}
        self._made_in_backward: set[int] = set()
        self.draws: Counter[Hashable] = Counter()
        """How often each random draw was made in the running call: a recomputed forward pass repeats its draws."""

    def __bool__(self) -> bool:
        return bool(self._contents)

    def of(self, tensor: torch.Tensor, *, in_backward: bool) -> Value:
        """Return the `Value` of a tensor. `in_backward` is used only if the tensor's storage was not seen before."""
        content = self._content(tensor, in_backward)
        # The stride of a dimension of size 1 is arbitrary.
        strides = tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        offset = int(tensor.storage_offset()) + content.shift
        return Value(content.number, offset, tuple(tensor.shape), strides, tensor.dtype)

    def is_rebuilt(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was first computed in the backward pass, from values of the forward pass alone."""
        content = self._known(tensor)
        return content is not None and content.is_from_forward and content.number in self._made_in_backward

    def is_unknown(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor entered the backward pass from outside: a gradient, or an unpacked saved tensor."""
        content = self._known(tensor)
        return content is None or not content.is_from_forward

    def follow(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, in_backward: bool
    ) -> bool:
        """Record the tensors that an op returns or changes in place; return whether it ran on equal values before."""
        leaves = leaves_of((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._follow_copy(func, args, out, in_backward):
            return False
        key: Hashable = (func, *(self._part(leaf, in_backward) for leaf in leaves))
        # Every draw gives new values, except in a recomputed forward pass, which repeats the draws.
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws[key] += 1
            key = key, self.draws[key]
        is_from_forward = all(self._content(tensor, in_backward).is_from_forward for tensor in tensors)
        ran_before = (key, 0) in self._numbers
        results = list(written(func, args, kwargs))
        given = {storage_of(tensor) for tensor in tensors}
        results += [leaf for leaf in tensors_in(out) if storage_of(leaf) not in given]
        for index, tensor in enumerate(results):
            self._set(tensor, self._number((key, index), in_backward), 0, is_from_forward)
        return ran_before

    def note_outside(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an op outside of custom functions if it copies or writes a storage whose content has a number."""
        if not self._contents:
            return
        if func.overloadpacket in _COPIES and self._known(args[0]) is not None:
            self._follow_copy(func, args, out, in_backward=False)
        if op_schema(func).is_mutable:
            for tensor in written(func, args, kwargs):
                if self._known(tensor) is not None:
                    self._set(tensor, self._number(object(), in_backward=False), 0, is_from_forward=False)

    def _follow_copy(self, func: OpOverload, args: tuple[Any, ...], out: Any, in_backward: bool) -> bool:
        """If an op copies a tensor and keeps strides and type, give both the same content number and return True."""
        if func.overloadpacket not in _COPIES:
            return False
        source = args[0]
        if source.dtype != out.dtype or source.stride() != out.stride() or storage_of(source) is None:
            return False
        if storage_of(out) is not storage_of(source):
            content = self._content(source, in_backward)
            shift = content.shift + int(source.storage_offset()) - int(out.storage_offset())
            self._set(out, content.number, shift, content.is_from_forward)
        return True

    def _content(self, tensor: torch.Tensor, in_backward: bool) -> _Content:
        return self._known(tensor) or self._set(tensor, self._number(object(), in_backward=False), 0, not in_backward)

    def _set(self, tensor: torch.Tensor, number: int, shift: int, is_from_forward: bool) -> _Content:
        storage, content = storage_of(tensor), _Content(number, shift, is_from_forward)
        if storage is not None:
            self._contents.put(storage, content)
        return content

    def _known(self, tensor: torch.Tensor) -> _Content | None:
        return self._contents.get(storage_of(tensor))  # type: ignore[no-any-return]

    def _number(self, key: Hashable, in_backward: bool) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            if in_backward:
                self._made_in_backward.add(self._numbers[key])
        return self._numbers[key]

    def _part(self, leaf: Any, in_backward: bool) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            return self.of(leaf, in_backward=in_backward) if storage_of(leaf) is not None else object()
        return (type(leaf), leaf) if isinstance(leaf, Hashable) else id(leaf)


def written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    if not op_schema(func).is_mutable:
        return
    for index, argument in enumerate(op_schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            yield from tensors_in(value)


def storage_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's storage, which views share; None for sparse and nested tensors.

    Torch keeps the same Python object for as long as the storage lives, so storages are compared by identity.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.untyped_storage()


MAY_RUN_AGAIN = (
    "a product in the backward pass of a custom autograd function may repeat one of its forward pass; "
    "this counts as recomputation"
)
CANNOT_TELL = (
    "saved-tensor hooks replace the tensors that a custom autograd function has saved, so products that the function "
    "recomputes cannot be recognised and count as needed"
)
NOT_FOLLOWED = "products that a custom autograd function recomputes could not be recognised, so they count as needed"

_MATRIX_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("_addmm_activation", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv")
)


class _Call(NamedTuple):
    is_backward: bool
    identity: Hashable
    is_inside_forward: bool
    calls_modules: bool = False


class _Factor(NamedTuple):
    role: Hashable
    value: Hashable
    size: Hashable
    tensor: torch.Tensor


class CustomFunctions:
    """Decides which products of a step are recomputed by custom autograd functions.

    `doubt` is a note for the user about what could not be decided.
    """

    def __init__(self) -> None:
        self.doubt: str | None = None
        self._values = Values()
        self._forwards = _ForwardPasses()
        self._forward: dict[Hashable, None] = {}
        # A key is one factor of a forward product and the size of the other factor. The value says whether
        # saved-tensor hooks were active during that product.
        self._partners: dict[Hashable, bool] = {}
        self._packed_sizes: set[Hashable] = set()
        self._running: Hashable = None
        self._done_in_call: set[Hashable] = set()
        self._last_depth = 0
        self._last_node: int | None = -1

    def runs_again(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, is_product: bool
    ) -> bool:
        """Record an op that has run; return whether it is a matrix product that repeats an earlier one."""
        if self.doubt == NOT_FOLLOWED:
            return False
        try:
            return self._look_at(func, args, kwargs, out, is_product)
        # A tensor subclass may have no storage, or an unknown layout.
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            self.doubt = NOT_FOLLOWED
            return False

    def is_idle(self) -> bool:
        """Whether the running op, if it is no product, need not be recorded. Called by the mode itself, for speed."""
        if self._values or self._forward:
            return False
        return torch.is_grad_enabled() or self._forwards.outermost(sys._getframe(2))[0] is None

    def _look_at(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, is_product: bool
    ) -> bool:
        call = self._call()
        if call is None:
            self._values.note_outside(func, args, kwargs, out)
            return False
        # `_done_in_call` and the number of draws belong to one call of a custom function, so the next call resets them.
        if call.identity != self._running:
            self._running = call.identity
            self._done_in_call.clear()
            self._values.draws.clear()
        again = is_product and self._is_known(_factors(func, bind(func, args, kwargs), self._values, call), call)
        self._values.follow(func, args, kwargs, out, in_backward=call.is_backward)
        return again

    def _is_known(self, factors: list[_Factor], call: _Call) -> bool:
        # The key is a set, because the order of the factors does not matter.
        key = frozenset((factor.role, factor.value) for factor in factors)
        sizes = frozenset((factor.role, factor.size) for factor in factors)
        if call.is_backward:
            if key in self._forward:
                return True
            if self._may_be_known(factors) and not runs_forward_again():
                self.doubt = MAY_RUN_AGAIN
                return True
            # Both factors are unknown, and a forward product of these sizes ran with saved-tensor hooks.
            are_unknown = sizes in self._packed_sizes and all(self._values.is_unknown(each.tensor) for each in factors)
            if are_unknown and not runs_forward_again():
                self.doubt = CANNOT_TELL
        elif not call.calls_modules and key in self._done_in_call:
            return True  # the function computes the same product a second time
        if call.is_inside_forward:
            self._forward[key] = None
            self._done_in_call.add(key)
            packs = saves_through_hooks()
            if packs:
                self._packed_sizes.add(sizes)
            for partner in _partner_keys(factors):
                self._partners[partner] = packs or self._partners.get(partner, False)
        return False

    def _may_be_known(self, factors: list[_Factor]) -> bool:
        """Whether one factor is in a forward product and the other was recomputed or unpacked by saved-tensor hooks."""
        for key, other in zip(_partner_keys(factors), reversed(factors), strict=False):
            packed = self._partners.get(key)
            is_unpacked = bool(packed) and self._values.is_unknown(other.tensor)
            if packed is not None and (is_unpacked or self._values.is_rebuilt(other.tensor)):
                return True
        return False

    def _call(self) -> _Call | None:
        task = current_graph_task_id()
        if task != -1 and self._forward:
            node = current_autograd_node()
            if isinstance(node, BackwardCFunction):
                is_inside_forward = not torch.is_grad_enabled() and self._forwards.outermost()[0] is not None
                return _Call(True, (task, sequence_nr(node)), is_inside_forward)
        # Torch switches grad mode off in a custom function's forward pass, so if it is on, no such function is running.
        if torch.is_grad_enabled():
            return None
        address, depth, calls_modules = self._forwards.outermost()
        if address is None:
            return None
        return _Call(False, self._forward_call(address, depth), True, calls_modules)

    def _forward_call(self, address: int, depth: int) -> Hashable:
        """Return a key for a call of a forward pass, from its frame's address and its autograd node's sequence number.

        The address alone is not enough, because the next call may reuse it. If a custom function calls another one, the
        sequence number changes within the outer call, so then only the address is compared.
        """
        node, running = recorded_operations(), self._running
        is_same = depth > 1 or self._last_depth > 1 or node == self._last_node
        self._last_depth, self._last_node = depth, node
        is_running = is_same and isinstance(running, tuple) and running[:2] == ("forward", address)
        return running if is_running else ("forward", address, node)


class _ForwardPasses:
    """Finds the forward pass of a custom function on the stack, by its code.

    `Function.apply` cannot be searched for: since torch 2.14 it is written in C, so it has no frame.
    """

    def __init__(self) -> None:
        self._of_modules: set[CodeType] = set()
        self._find_codes()

    def _find_codes(self) -> None:
        self._codes = _forward_codes(torch.autograd.Function)
        # Names are compared first, because Python hashes all of a function's code anew each time.
        self._names = {"forward", *(code.co_name for code in self._codes)}

    def outermost(self, frame: FrameType | None = None) -> tuple[int | None, int, bool]:
        """Return the id of the outermost forward frame or None, the nesting depth, and if modules run inside.

        The search begins with `frame`, by default with the caller.
        """
        engine, names = engine_code(), self._names
        found, depth, modules, through_modules = None, 0, False, False
        frame = frame or sys._getframe(1)
        while frame is not None and frame.f_code is not engine:
            code = frame.f_code
            if code.co_name in names and self._has(code):
                found, depth, through_modules = id(frame), depth + 1, modules
            elif runs_forward_code(code):
                modules = True
            frame = frame.f_back
        return found, depth, through_modules

    def _has(self, code: CodeType) -> bool:
        if code.co_name == "forward" and code not in self._codes and code not in self._of_modules:
            self._find_codes()  # the function may have been defined in this step
            if code not in self._codes:
                self._of_modules.add(code)
        return code in self._codes


def _forward_codes(function: type[Any]) -> set[CodeType]:
    forward = inspect.unwrap(function.forward)
    codes = {forward.__code__} if hasattr(forward, "__code__") else set()
    subclasses: list[type] = function.__subclasses__()
    return codes.union(*map(_forward_codes, subclasses))


def _factors(func: OpOverload, arguments: Mapping[str, Any], values: Values, call: _Call) -> list[_Factor]:
    """Return the factors of a product, in a form that is the same for A x B and for its transpose B' x A'."""
    name = op_name(func).removesuffix("_")
    if name in _MATRIX_PRODUCTS:  # addends are ignored, because they do not change the product
        left, right = (arguments[each] for each in FACTORS[name])
        return [_matrix(left, -1, values, call), _matrix(right, -2 if right.dim() > 1 else -1, values, call)]
    is_attention = "attention" in name and "backward" not in name
    kind = "attention" if is_attention else name
    tensors = {key: each for key, each in arguments.items() if isinstance(each, torch.Tensor) and key != "out"}
    if is_attention:  # other arguments are ignored, because they depend on whether gradients are needed
        tensors = {key: tensors[key] for key in ("query", "key", "value") if key in tensors} or tensors
    settings = [] if is_attention else [repr(each) for each in arguments.values() if not isinstance(each, torch.Tensor)]
    return [
        _Factor((kind, key, *settings), values.of(each, in_backward=call.is_backward), tuple(each.shape), each)
        for key, each in tensors.items()
    ]


def _matrix(tensor: torch.Tensor, contracted: int, values: Values, call: _Call) -> _Factor:
    """Describe a factor of a matrix product as if `contracted`, the dimension summed over, were its last dimension."""
    value = values.of(tensor, in_backward=call.is_backward)
    dims = tensor.dim()
    summed = dims + contracted
    kept = [dim for dim in range(max(0, dims - 2), dims) if dim != summed]
    order = [*range(dims - 2), *kept, summed]
    sizes = [value.sizes[dim] for dim in order]
    strides = [value.strides[dim] for dim in order]
    if not kept:  # treat a vector as a matrix with one row
        sizes.insert(-1, 1)
        strides.insert(-1, 0)
    pairs = list(zip(sizes, strides, strict=True))
    layout = (*(pair for pair in pairs[:-2] if pair[0] != 1), *pairs[-2:])
    return _Factor("matrix", (value.content, value.offset, value.dtype, layout), tuple(sizes), tensor)


def _partner_keys(factors: list[_Factor]) -> list[Hashable]:
    if len(factors) != 2:
        return []
    return [(one.role, one.value, other.role, other.size) for one, other in permutations(factors)]
