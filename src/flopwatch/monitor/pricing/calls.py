"""Records which modules a step calls, and with what sizes, without reading a value.

Torch's public hook for all modules sees the outermost calls: while such a call runs, the hook is away, so that the
layers inside are not slowed down. Nothing stays on the user's modules between the calls.
"""

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from types import MemberDescriptorType
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from flopwatch.flops.formulas.free_ops import is_inside_autocast
from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.live import may_compile
from flopwatch.flops.tracing.passes import current_autocast
from flopwatch.flops.tracing.regions import Region
from flopwatch.flops.tracing.replica import unwrap
from flopwatch.torch_internals.autograd import compiled_graphs, current_graph_task_id, recorded_operations
from flopwatch.torch_internals.modules import arguments_by_name, is_in_transform, whole_shape
from flopwatch.torch_internals.ops import stored_count

_MOST_KINDS, _MOST_CALLS, _MOST_ITEMS, _MOST_PARAMETERS = 4096, 4096, 512, 4096
_DEEPEST = 4
_LISTENED_PARAMETERS = 4
"""Number of parameters with a gradient hook. The first, the last and two in between show which parts are trained."""
_MOST_BACKWARDS = 1 << 12
COMPILED, BATCH = "compiled code", "batch"


@dataclass(frozen=True, eq=False, slots=True)
class CallKind:
    """A kind of call: all outermost calls of one module whose arguments have equal types and sizes.

    Attributes:
        family: What is equal for calls that differ in sizes only.
        sizes: All dimensions of all tensors among the arguments.
        module: A number for the module.
        name: The class of the module.
        has_grad: Whether autograd records the call.
        is_training: The module's `training` flag.
        has_parameters: Whether the module has parameters; a loss has none.
        numbers: Whole and floating numbers among the arguments.
    """

    family: Hashable
    sizes: tuple[int, ...]
    module: int
    name: str
    has_grad: bool
    is_training: bool
    has_parameters: bool = True
    numbers: tuple[float, ...] = ()


class CallListener(Protocol):
    """What wants to know of the outermost calls as they happen."""

    def about_to_call(self) -> None: ...

    def called(self, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None: ...

    def returned(self, kind: CallKind, output: Any) -> None: ...

    def region_called(self, kind: CallKind) -> Callable[[Any], None] | None:
        """Compiled code is called; what is returned is called with its outputs."""


class PassListener(Protocol):
    """What times forward and backward passes."""

    def forward_begins(self) -> None: ...

    def forward_ends(self, output: Any) -> None: ...

    def region_begins(self) -> Callable[[Any], None] | None: ...

    def gradient_arrived(self) -> None: ...


class RootCalls:
    """Records the outermost calls of modules in this thread.

    Attributes:
        calls: The calls since `take`.
        nodes: For each of them, the number of operations that autograd has recorded in it.
        listener: Is told of each call.
        is_listening: False in phases such as evaluation, whose calls belong to no step.
        reads_numbers: Whether calls that differ in a number among their arguments are of different kinds. Most numbers
            (an index, a step) change nothing, so it is False until counts of equal calls differ.
    """

    def __init__(self, listener: CallListener | None = None) -> None:
        self.calls: list[CallKind] = []
        self.nodes: list[int] = []
        self.is_listening = True
        self.reads_numbers = False
        self.listener = listener
        self._thread = threading.get_ident()
        self._place: _Place | None = None
        self._kinds: dict[Any, CallKind] = {}
        self._modules: dict[int, tuple[weakref.ref[nn.Module], int, _ReturnHook]] = {}
        self._inside: _ReturnHook | None = None
        """The hook of the module whose call runs; None outside of calls."""
        self._is_on = False
        self._began = 0

    def start(self) -> None:
        """Listen from now on, in this thread."""
        self._thread = threading.get_ident()
        regions.install()
        regions.listen(self._note_region)
        if may_compile():
            self.leave_modules()
        elif self._place is None:
            self._place = _place_of(register_module_forward_pre_hook(_GlobalHook(self)))
        self._is_on = True
        if self._inside is not None:  # a call that ended by Ctrl-C, after which torch calls no hooks
            self._inside.remove()
            self._inside = None
        self._set_hook(True)

    def stop(self) -> None:
        self._set_hook(False)
        self._is_on = False
        regions.listen(None)

    def leave_modules(self) -> None:
        """Where code is compiled, only its calls are recorded. A hook for all modules would be compiled into it."""
        if self._place is not None and not compiled_graphs():
            self._place.remove()

    def _note_region(self, region: Region, args: tuple[Any, ...]) -> Callable[[Any], None] | None:
        """Record a call of compiled code, as `note` does."""
        if threading.get_ident() != self._thread or not self.is_listening or current_graph_task_id() != -1:
            return None
        if self.listener is not None:
            self.listener.about_to_call()
        sizes, has_grad, weight = region.sizes(args), is_grad_enabled(), region.weight(args)
        model = -1 - region.number if weight is None else id(weight)
        key = COMPILED, region.number, has_grad, model, sizes
        kind = self._kinds.get(key)
        if kind is None:
            # Without gradients, it may be an evaluation: whether the module is in training mode is not seen.
            kind = self._keep(key, CallKind(key[:3], sizes, model, COMPILED, has_grad, has_grad, weight is not None))
        if len(self.calls) < _MOST_CALLS:
            self.calls.append(kind)
            self.nodes.append(0)
        return None if self.listener is None else self.listener.region_called(kind)

    def batch_kind(self, batch: Any) -> CallKind:
        """A batch of the monitor, as if it were a call."""
        facts: list[Any] = []
        _add_facts(batch, facts, [], attrgetter("shape"), _DEEPEST)
        key = BATCH, *facts
        kind = self._kinds.get(key)
        if kind is None:
            structure, sizes = _divided(facts)
            kind = self._keep(key, CallKind((BATCH, *structure), sizes, -1, BATCH, False, True, False))
        return kind

    def _keep(self, key: Any, kind: CallKind) -> CallKind:
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[key] = kind
        return kind

    def _set_hook(self, is_on: bool) -> None:
        """Insert or remove the hook. Torch would compile code again after a change, so that there is none from then."""
        if self._place is None or may_compile():
            return
        if is_on:
            self._place.insert()
        else:
            self._place.remove()

    @property
    def is_inside(self) -> bool:
        """Whether a call runs whose end will be seen."""
        return self._inside is not None

    def is_in_thread(self) -> bool:
        """Whether this is the thread of the training."""
        return threading.get_ident() == self._thread

    def take(self) -> list[tuple[CallKind, int]]:
        """The calls since the last time, each with the number of operations that autograd has recorded in it."""
        calls, self.calls, nodes, self.nodes = self.calls, [], self.nodes, []
        return list(zip(calls, nodes, strict=True))

    def note(self, module: nn.Module, args: tuple[Any, ...], depth: int) -> None:
        """Record a call and listen again when it returns. Calls in a backward pass recompute activations only."""
        if threading.get_ident() != self._thread or not self.is_listening or current_graph_task_id() != -1:
            return
        if self.listener is not None:
            self.listener.about_to_call()
        kwargs = arguments_by_name(depth + 1)
        kind = self._kind(module, args, kwargs)
        if len(self.calls) < _MOST_CALLS:
            self.calls.append(kind)
            self.nodes.append(0)
        # Torch runs such a layer by another kernel if it has a hook, so that its parts are recorded instead.
        if self._place is not None and not isinstance(module, nn.TransformerEncoderLayer):
            self._place.remove()
            self._began = recorded_operations() or 0
            self._inside = self._modules[id(module)][2]
            self._inside.insert(kind)
        if self.listener is not None:
            self.listener.called(kind, module, args, kwargs)

    def came_back(self, kind: CallKind, output: Any) -> None:
        self._inside = None
        if self.calls and self.calls[-1] is kind:
            self.nodes[-1] = (recorded_operations() or 0) - self._began
        if self._is_on:
            self._set_hook(True)
        if self.listener is not None:
            try:
                self.listener.returned(kind, output)
            except Exception:  # must not reach the user's call
                return

    def _kind(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallKind:
        facts: list[Any] = []
        numbers: list[float] = []
        shape_of = whole_shape if is_in_transform() else attrgetter("shape")
        for value in args:
            _add_facts(value, facts, numbers, shape_of, _DEEPEST)
        for name, value in kwargs.items():
            facts.append(name)
            _add_facts(value, facts, numbers, shape_of, _DEEPEST)
        autocast = current_autocast() if is_inside_autocast() else None
        head = self._number(module), is_grad_enabled(), module.training, autocast
        key = (*head, *facts, *(numbers if self.reads_numbers else ()))
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._keep(key, _new_kind(module, head, facts, tuple(numbers), self.reads_numbers))
        return kind

    def _number(self, module: nn.Module) -> int:
        known = self._modules.get(id(module))
        if known is None or known[0]() is not module:
            if len(self._modules) >= _MOST_KINDS:
                self._modules.clear()
            hook = _ReturnHook(self, module)
            known = self._modules[id(module)] = weakref.ref(module), next(_numbers), hook
        return known[1]


_numbers = itertools.count()


def _new_kind(
    module: nn.Module, head: tuple[Any, ...], facts: list[Any], numbers: tuple[float, ...], reads_numbers: bool
) -> CallKind:
    structure, sizes = _divided(facts)
    family = (*head, *structure, *(numbers if reads_numbers else ()))
    name, has_parameters = type(module).__name__, next(nn.Module.parameters(module), None) is not None
    return CallKind(family, sizes, head[0], name, head[1], head[2], has_parameters, numbers)


def _divided(facts: list[Any]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """What stays equal when only sizes differ, and the sizes."""
    structure = tuple(len(fact) if isinstance(fact, torch.Size) else fact for fact in facts)
    return structure, tuple(size for fact in facts if isinstance(fact, torch.Size) for size in fact)


def _add_facts(
    value: Any, facts: list[Any], numbers: list[float], shape_of: Callable[[Tensor], torch.Size], depth: int
) -> None:
    """Add what shapes the cost of a call with this argument. Texts and the values of numbers do not."""
    kind = type(value)
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            facts += kind, value.dtype, str(value.layout), _stored(value)
        else:
            facts += shape_of(value), value.dtype, value.requires_grad
    elif value is None or kind is bool:
        facts.append(value)
    elif kind is int or kind is float:
        facts.append(kind)
        numbers.append(value)
    elif isinstance(value, str | bytes | type | nn.Module) or callable(value) or not depth:
        facts.append(kind)
    elif isinstance(value, dict | list | tuple):
        # A class of the user may compute items when they are asked for, so the methods of the plain classes are used.
        size = dict.__len__(value) if isinstance(value, dict) else len(list(plain_iterator(value)))
        facts += kind, size
        if isinstance(value, dict):
            facts += map(str, islice(dict.keys(value), _MOST_ITEMS))
        items = dict.values(value) if isinstance(value, dict) else plain_iterator(value)
        for item in islice(items, _MOST_ITEMS):
            _add_facts(item, facts, numbers, shape_of, depth - 1)
    elif kind.__module__ == "numpy":
        facts += kind, getattr(value, "shape", ())
    else:
        facts.append(kind)
        for item in islice(_held_by(value), _MOST_ITEMS):
            _add_facts(item, facts, numbers, shape_of, depth - 1)


def _held_by(value: Any) -> Iterator[Any]:
    """What an object holds in its attributes and slots, without calling code of its class."""
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        for member in vars(cls).values():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # the slot is empty
                    yield member.__get__(value)


def plain_iterator(value: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    return list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)


def _stored(value: Tensor) -> Any:
    """How many elements a sparse tensor stores, which decides the FLOPs of its products; of others, their number."""
    try:
        return tuple(value.shape), stored_count(value)
    except Exception:  # a nested tensor has no shape
        return value.numel()


class TrainedParameters:
    """Which parameters of the model are trained, and how often a backward pass reached four of them.

    Attributes:
        backwards: How many gradients each of the four got, as digits of a number in base `_MOST_BACKWARDS`.
    """

    def __init__(self, model: nn.Module, on_gradient: Callable[[], None] = lambda: None) -> None:
        self.backwards = 0
        self._on_gradient = on_gradient
        self._model = weakref.ref(model)
        self._parameters = [weakref.ref(p) for p in islice(nn.Module.parameters(model), _MOST_PARAMETERS)]
        self._flags: list[bool] = []
        self._hash = 0
        self._handles: list[RemovableHandle] = []

    def state(self) -> int:
        """A hash of which parameters are trained."""
        flags = [(p := ref()) is not None and p.requires_grad for ref in self._parameters]
        if flags != self._flags:
            self._flags, self._hash = flags, hash(tuple(flags))
            self._listen()
        return self._hash

    def take(self) -> int:
        backwards, self.backwards = self.backwards, 0
        return backwards

    def stop(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _listen(self) -> None:
        self.stop()
        found = [p for ref in self._parameters if (p := ref()) is not None]
        trained = [p for p in found if p.requires_grad and p.is_leaf and type(p) is nn.Parameter]
        last = len(trained) - 1
        chosen = dict.fromkeys(last * part // (_LISTENED_PARAMETERS - 1) for part in range(_LISTENED_PARAMETERS))
        for part, index in enumerate(chosen if trained else ()):
            hook = partial(_count_backward, weakref.ref(self), _MOST_BACKWARDS**part)
            self._handles.append(trained[index].register_post_accumulate_grad_hook(hook))


def _count_backward(owner: "weakref.ref[TrainedParameters]", of_part: int, _: Tensor) -> None:
    found = owner()
    if found is not None:
        found.backwards += of_part
        found._on_gradient()


def batch_of_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a call as a batch. If some were passed by name, the batch has names for all."""
    if not args:
        return dict(kwargs)
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return dict(inspect.signature(unwrap(model).forward).bind(*args, **kwargs).arguments)


class _Place(NamedTuple):
    """A hook's entry in torch's dict of hooks. Writing the entry is ten times as fast as registering the hook."""

    table: Any
    key: int
    hook: Callable[..., None]

    def insert(self) -> None:
        self.table[self.key] = self.hook

    def remove(self) -> None:
        self.table.pop(self.key, None)


def _place_of(handle: RemovableHandle) -> _Place:
    table: Any = handle.hooks_dict_ref()
    place = _Place(table, handle.id, table[handle.id])
    handle.remove()
    return place


class _GlobalHook:
    """A forward pre-hook of all modules, which never raises. Once the process compiles, it does nothing."""

    def __init__(self, calls: RootCalls) -> None:
        self._calls = weakref.ref(calls)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():  # first, so that the compiler needs to look at nothing else
            return
        calls = self._calls()
        if calls is None:
            return
        if may_compile():
            calls.leave_modules()
            return
        try:
            calls.note(module, args, 1)
        except Exception:  # the call is not recorded; the number of autograd's operations still shows it
            return


class _ReturnHook:
    """Listens for outermost calls again when a call of one module has returned or raised.

    It is in torch's tables of the module only while the module runs.
    """

    def __init__(self, calls: RootCalls | None, module: nn.Module | None) -> None:
        self._calls, self._kind = calls, cast("CallKind | None", None)
        self._tables: list[Any] = []
        if module is not None:
            handle = module.register_forward_hook(self, always_call=True)
            tables = [handle.hooks_dict_ref(), *(each() for each in handle.extra_dict_ref)]
            self._tables = [(weakref.ref(table), table[handle.id]) for table in tables if handle.id in table]
            self._key = handle.id
            handle.remove()

    def insert(self, kind: CallKind) -> None:
        self._kind = kind
        for table, value in self._tables:
            table()[self._key] = value

    def remove(self) -> None:
        for table, _ in self._tables:
            (table() or {}).pop(self._key, None)

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        self.remove()
        if self._calls is not None and self._kind is not None:
            self._calls.came_back(self._kind, output)

    def __deepcopy__(self, memo: Any) -> "_ReturnHook":  # a module that is copied inside of its own call
        return _ReturnHook(None, None)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A method that does nothing, so that a module saved inside of its call can be loaded without flopwatch.
        return getattr, (nullcontext(), "__exit__")
