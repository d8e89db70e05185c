"""Records which modules a step calls, and with what sizes.

Torch's public hook for all modules sees the outermost calls: while such a call runs, the hook is away, so that the
layers inside are not slowed down. Nothing stays on the user's modules between the calls.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.live import may_compile
from flopwatch.flops.tracing.regions import Region
from flopwatch.flops.tracing.replica import unwrap
from flopwatch.guard import caught
from flopwatch.monitor.counting.call_kinds import CallKind, CallKinds, KindOfLast
from flopwatch.torch_internals.autograd import compiled_graphs, current_graph_task_id, recorded_operations
from flopwatch.torch_internals.modules import arguments_by_name

_MOST_MODULES = _MOST_CALLS = 4096


class CallListener(Protocol):
    """An object that is told of outermost calls as they happen."""

    def about_to_call(self) -> None: ...

    def called(self, kind: CallKind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None: ...

    def returned(self, kind: CallKind, output: Any) -> None: ...

    def region_called(self, kind: CallKind) -> Callable[[Any], None] | None:
        """Compiled code is called. Returns a function to call with its outputs, or None."""


def failure_of(action: Callable[..., object], *arguments: Any) -> Exception | None:
    """Call a function that may run code of the user. Returns the exception, which must not stop the training."""
    try:
        action(*arguments)
    except Exception as error:  # noqa: BLE001 - code of the user may raise anything
        caught("what may run code of the user", error)
        return error
    return None


class RootCalls:
    """Records the outermost calls of modules in this thread.

    Attributes:
        calls: The calls since `take`.
        nodes: For each of them, the number of operations that autograd has recorded in it.
        listener: Is told of each call.
        is_listening: False in phases such as evaluation, whose calls belong to no step.
        inside: The hook of the module whose call runs and whose end will be seen; None outside of calls.
    """

    def __init__(self, listener: CallListener | None = None) -> None:
        self.calls: list[CallKind] = []
        self.nodes: list[int] = []
        self.kinds = CallKinds()
        self.is_listening = True
        self.listener = listener
        self._thread = threading.get_ident()
        self._place: _HookEntry | None = None
        self._modules: dict[int, _ReturnHook] = {}
        self.inside: _ReturnHook | None = None
        self._is_on = False
        self._began = 0

    def start(self) -> None:
        self._thread = threading.get_ident()
        regions.install(self)
        regions.listen(self._note_region)
        self._is_on = True
        if self.inside is not None:  # Ctrl-C has ended a call, and torch has not called its hook
            self.inside.remove()
            self.inside = None
        if may_compile():
            self.remove_global_hook()
            return
        if self._place is None:
            handle = register_module_forward_pre_hook(_GlobalHook(self))
            table: Any = handle.hooks_dict_ref()
            self._place = _HookEntry(table, handle.id, table[handle.id])
            handle.remove()
        self._place.table[self._place.key] = self._place.hook

    def stop(self) -> None:
        # Torch would compile code again after a change of its hooks.
        if self._place is not None and not may_compile():
            self._place.table.pop(self._place.key, None)
        self._is_on = False
        regions.listen(None)

    def close(self) -> None:
        """Stop for good."""
        self.stop()
        regions.leave(self)

    def remove_global_hook(self) -> None:
        """Remove the hook for all modules, because it would be compiled into the code of a process that compiles."""
        if self._place is not None and not compiled_graphs():
            self._place.table.pop(self._place.key, None)

    def is_ready(self) -> bool:
        """Whether `start` would change nothing, in a process that does not compile."""
        is_here = self._is_on and self.inside is None and threading.get_ident() == self._thread
        return is_here and regions.state.is_installed and regions.state.listener == self._note_region

    def is_in_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def take(self) -> list[tuple[CallKind, int]]:
        """The calls since the last `take`, each with the number of operations that autograd has recorded in it."""
        calls, self.calls, nodes, self.nodes = self.calls, [], self.nodes, []
        return list(zip(calls, nodes, strict=True))

    def note(self, module: nn.Module, args: tuple[Any, ...], depth: int) -> None:
        """Record a call, and ignore the calls inside of it. Calls in a backward pass, which recompute, are left out."""
        if threading.get_ident() != self._thread or not self.is_listening or current_graph_task_id() != -1:
            return
        listener, place = self.listener, self._place
        if listener is not None:
            listener.about_to_call()
        kwargs = arguments_by_name(depth + 1)
        own = self._modules.get(id(module))
        if own is None or own.module() is not module:
            if len(self._modules) >= _MOST_MODULES:
                self._modules.clear()
            own = self._modules[id(module)] = _ReturnHook(self, module)
        kind = self.kinds.of_call(own.last, module, args, kwargs)
        if len(self.calls) < _MOST_CALLS:
            self.calls.append(kind)
            self.nodes.append(0)
        # With a hook on this layer, torch would not use its fused kernel, which it may use outside of training mode. So
        # calls of the layer's parts are recorded there instead.
        may_be_fused = isinstance(module, nn.TransformerEncoderLayer) and not module.training
        if place is not None and not may_be_fused:
            place.table.pop(place.key, None)
            self._began = recorded_operations() or 0
            self.inside = own
            for table, value in own.tables:
                table()[own.key] = value
        if listener is not None:
            listener.called(kind, module, args, kwargs)

    def call_ended(self, kind: CallKind | None, output: Any) -> None:
        self.inside = None
        if self.calls and self.calls[-1] is kind:
            self.nodes[-1] = (recorded_operations() or 0) - self._began
        if self._is_on and self._place is not None and not may_compile():
            self._place.table[self._place.key] = self._place.hook
        if self.listener is not None and kind is not None:
            self.listener.returned(kind, output)

    def _note_region(self, region: Region, args: tuple[Any, ...]) -> Callable[[Any], None] | None:
        """Record a call of compiled code, as `note` does."""
        if threading.get_ident() != self._thread or not self.is_listening or current_graph_task_id() != -1:
            return None
        if self.listener is not None:
            self.listener.about_to_call()
        kind = self.kinds.of_region(region, args)
        if len(self.calls) < _MOST_CALLS:
            self.calls.append(kind)
            self.nodes.append(0)
        return None if self.listener is None else self.listener.region_called(kind)


def batch_of_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments of a call as a batch. If some were passed by name, the batch has names for all."""
    if not args:
        return dict(kwargs)
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return dict(inspect.signature(unwrap(model).forward).bind(*args, **kwargs).arguments)


class _HookEntry(NamedTuple):
    """A hook's entry in torch's dict of hooks. Writing the entry is ten times as fast as registering the hook."""

    table: Any
    key: int
    hook: Callable[..., None]


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
            calls.remove_global_hook()
            return
        try:
            calls.note(module, args, 1)
        except Exception as error:  # noqa: BLE001 - autograd's number of operations still shows the difference
            caught("a call of a module", error)


class _ReturnHook:
    """Listens for outermost calls again when a call of one module has returned or raised.

    It is in torch's tables of the module only while the module runs.
    """

    def __init__(self, calls: RootCalls, module: nn.Module) -> None:
        self.module, self.last = weakref.ref(module), KindOfLast()
        self._calls = calls
        handle = module.register_forward_hook(self, always_call=True)
        self.key = handle.id
        tables = [handle.hooks_dict_ref(), *(each() for each in handle.extra_dict_ref)]
        self.tables: list[Any] = [(weakref.ref(table), table[self.key]) for table in tables if self.key in table]
        handle.remove()

    def remove(self) -> None:
        for table, _ in self.tables:
            (table() or {}).pop(self.key, None)

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        for table, _ in self.tables:
            (table() or {}).pop(self.key, None)
        failure_of(self._calls.call_ended, self.last.kind, output)

    def __deepcopy__(self, memo: Any) -> Callable[..., Any]:  # a module that is copied inside of its own call
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A method that does nothing, so that a module saved inside of its call can be loaded without flopwatch.
        return getattr, (nullcontext(), "__exit__")
