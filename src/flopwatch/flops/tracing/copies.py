"""Copies a model, its batch and all that they reach for a run that is counted, so that the originals never change.

Tensors become fake tensors or aliases of the real ones, and every other object is rebuilt as `copy.deepcopy` would do,
with one memo, so that what was one object stays one. Wrappers that change how a model runs but not what it computes
(`torch.compile`, DDP, FSDP2, tensor parallelism) are removed. What code reaches by name (globals, class attributes,
closures) is replaced for the time of the run, see `outside`.
"""

import functools
import io
import operator
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from flopwatch.errors import FlopwatchError, InputError, UntraceableError
from flopwatch.flops.tracing.outside import Outside
from flopwatch.flops.tracing.replica import WATCH_OR_MOVE, ModuleStack, copy_hooks, unwrap
from flopwatch.library_internals import SHARDED_FORWARDS
from flopwatch.torch_internals.modules import COMPILED_CALL, LocalBatchNorm, hook_tables

TensorMap = Callable[[torch.Tensor], torch.Tensor]

_ATOMIC = {
    *(int, float, complex, bool, str, bytes, object, type(None), type(Ellipsis), range, slice, CodeType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
}
_CONTAINERS = {
    *(dict, list, set, OrderedDict),
    *(weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
}
# Objects of these libraries run, move or feed a model, or belong to the process, so they are not copied.
_SHARED = (
    *WATCH_OR_MOVE,
    *("asyncio.", "concurrent.", "datasets.", "logging.", "multiprocessing.", "pyarrow.", "socket.", "subprocess."),
    *("_thread.", "threading.", "torch.optim."),
)
_LARGE_ARRAY = 2**26


class NotCopyableError(UntraceableError):
    """The model uses an object that cannot be copied, and that a run would change."""


class _NotCopied:
    """Stands for a generator or an open file, which cannot be copied: any use of it ends the count."""

    def __init__(self, kind: type) -> None:
        self.__dict__["kind"] = kind.__name__

    def _refuse(self, *_: Any) -> Any:
        kind = self.__dict__["kind"]
        raise NotCopyableError(f"the model uses a {kind}, which cannot be copied, so that counting would change it")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such names are also asked for by code that only looks
            raise AttributeError(name)
        self._refuse()

    __iter__ = __next__ = __enter__ = __exit__ = __call__ = __setattr__ = _refuse


class Copies:
    """The copies for one run; the stack gets to know which module of the copy runs, and how it differs."""

    def __init__(self, map_tensor: TensorMap, stack: ModuleStack) -> None:
        self._map_tensor = map_tensor
        self._stack = stack
        self._copies: dict[int, Any] = {}
        # An id is only unique while its object lives, so the originals are kept until the run is over.
        self._originals: list[Any] = []
        self._paths: dict[int, str] = {}
        self._copied_modules: list[tuple[nn.Module, nn.Module]] = []
        self._outside = Outside(self.value)
        self.in_place = self._outside.replaced

    def all_of(self, model: nn.Module, *others: Any) -> tuple[Any, ...]:
        try:
            self._name(model, "")
            twins = tuple(map(self.value, (model, *others)))
            for original, twin in self._copied_modules:  # the list grows, because hooks may reach other modules
                copy_hooks(original, twin, self.value, self._stack.left_hooks)
            self._outside.follow()
        except RecursionError:
            raise NotCopyableError("the model or its batch has objects that are nested too deeply to copy") from None
        return twins

    def _name(self, module: nn.Module, path: str) -> None:
        """Name a module and those in it by their places in the tree, before one is met as an attribute."""
        module = unwrap(module)
        if id(module) in self._paths:
            return
        if isinstance(module, torch.jit.ScriptModule):
            raise UntraceableError(
                f"module {path or type(module).__name__!r} is TorchScript, whose code cannot be run on other "
                "tensors; count the Python module it was made from"
            )
        self._paths[id(module)] = path
        for table in hook_tables():
            self._remember(vars(module)[table], OrderedDict())
        for name, child in nn.Module.named_children(module):
            self._name(child, f"{path}.{name}".lstrip("."))

    def _module(self, module: nn.Module) -> nn.Module:
        original = unwrap(module)
        if id(original) in self._copies:
            return self._copies[id(original)]  # type: ignore[no-any-return]
        self._name(original, type(module).__name__)
        twin: nn.Module = object.__new__(_plain_class(original))
        self._remember(original, twin)
        if module is not original:
            self._remember(module, twin)
        for name, value in list(vars(original).items()):
            is_sharded = name == "forward" and getattr(value, "__module__", None) in SHARDED_FORWARDS
            if name != COMPILED_CALL and not is_sharded:
                vars(twin)[name] = self.value(value)
        self._outside.add_class(type(twin))
        self._copied_modules.append((original, twin))
        # A call of the module calls this attribute, so the running module is known without a hook.
        vars(twin)[COMPILED_CALL] = functools.partial(_call_inside, twin, self._stack, self._paths[id(original)])
        return twin

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMIC or isinstance(value, Enum):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, torch.Tensor):
            return self._remember(value, self._tensor(value))
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, FunctionType | type | ModuleType):
            self._outside.add(value)
            return value
        if isinstance(value, MethodType):
            return MethodType(self.value(value.__func__), self.value(value.__self__))
        if kind is tuple:
            items = tuple(map(self.value, value))
            return value if all(map(operator.is_, items, value)) else items
        return self._container(value) if kind in _CONTAINERS else self._object(value)

    def _container(self, value: Any) -> Any:
        twin = self._remember(value, type(value)())
        if isinstance(value, list):
            twin.extend(value if _ATOMIC.issuperset(map(type, value)) else map(self.value, value))
        elif isinstance(value, set | weakref.WeakSet):
            twin.update(map(self.value, value))
        else:
            twin.update({self.value(key): self.value(item) for key, item in value.items()})
        return twin

    def _object(self, value: Any) -> Any:
        kind = type(value)
        self._outside.add_class(kind)
        if isinstance(value, torch.Generator):
            return self._remember(value, value.clone_state())
        if isinstance(value, threading.local) or (hasattr(kind, "__del__") and not _is_read_on(value)):
            return self._share(value)
        if isinstance(value, io.IOBase | RemovableHandle):
            is_shared = value in (sys.stdout, sys.stderr)
        else:
            is_data = isinstance(value, torch.utils.data.Dataset | torch.utils.data.DataLoader | torch.optim.Optimizer)
            is_shared = is_data or f"{kind.__module__}.".startswith(_SHARED)
        if is_shared:
            return self._remember(value, value)
        if hasattr(kind, "cache_clear"):  # a function with functools.lru_cache
            return self._remember(value, self._outside.cached(value))
        if kind is weakref.ref:
            referent = value()
            return value if referent is None else self._remember(value, weakref.ref(self.value(referent)))
        if hasattr(kind, "setflags") and value.nbytes > _LARGE_ARRAY:
            twin = self._remember(value, value.view())
            twin.setflags(write=False)  # a model that writes to it fails, and is not counted
            return twin
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and 3.13 warn of itertools
                parts = value.__reduce_ex__(4)
            return self._remember(value, value) if isinstance(parts, str) else self._rebuilt(value, *parts)
        except (FlopwatchError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 - a class of the user, whose objects cannot be pickled
            return self._remember(value, _NotCopied(kind)) if _is_read_on(value) else self._share(value)

    def _share(self, value: Any) -> Any:
        """Let the copy use the object itself, but with copies of its attributes."""
        self._remember(value, value)
        self._outside.add_names(getattr(value, "__dict__", {}))
        return value

    def _rebuilt(self, value: Any, make: Any, arguments: Any, *rest: Any) -> Any:
        """Return a new object from what `__reduce_ex__` returned, as `copy.deepcopy` does."""
        twin = self._remember(value, self.value(make)(*self.value(arguments)))
        state, items, pairs, set_state = (*rest, None, None, None, None)[:4]
        set_state = set_state or getattr(type(twin), "__setstate__", None)
        if state is not None and set_state is not None:
            set_state(twin, self.value(state))
        elif state is not None:
            for part in state if isinstance(state, tuple) else (state,):  # attributes, and slots if there are any
                for name, item in (part or {}).items():
                    object.__setattr__(twin, name, self.value(item))
        for item in items or ():
            twin.append(self.value(item))
        for key, item in pairs or ():
            twin[self.value(key)] = self.value(item)
        return twin

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_lazy(tensor):
            raise InputError("the model has lazy parameters without a shape; run one batch through the model first")
        # A DTensor only shards a plain tensor. Other wrappers, such as torchao's, change how products run: note them.
        if hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "placements"):
            self._stack.wrapped_weights[type(tensor).__name__] = None
        mapped = self._map_tensor(tensor)
        if isinstance(tensor, nn.Parameter):
            mapped = nn.Parameter(mapped, requires_grad=tensor.requires_grad)
        elif tensor.requires_grad:
            mapped.requires_grad_()
        for name, value in getattr(tensor, "__dict__", {}).items():
            if value is None or isinstance(value, bool | int | float | str):
                setattr(mapped, name, value)
        return mapped

    def _remember(self, original: Any, twin: Any) -> Any:
        self._originals.append(original)
        self._copies[id(original)] = twin
        self._copies[id(twin)] = twin
        return twin


def _is_read_on(value: Any) -> bool:
    """Return whether this is an iterator or a file, which changes when it is read."""
    return isinstance(value, io.IOBase) or hasattr(type(value), "__next__")


def _call_inside(module: nn.Module, stack: ModuleStack, path: str, *args: Any, **kwargs: Any) -> Any:
    """Continue the call of a module as if its attribute to which calls are redirected were not set.

    The `__call__` of its own class has run already. Some of transformers' classes checkpoint the layer there.
    """
    with stack.inside(path):
        redirected, module.__dict__[COMPILED_CALL] = module.__dict__[COMPILED_CALL], None
        try:
            return nn.Module.__call__(module, *args, **kwargs)
        finally:
            module.__dict__[COMPILED_CALL] = redirected


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class before `fully_shard`; for SyncBatchNorm, a batch norm that does not communicate."""
    cls = type(module)
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        if isinstance(module, FullyShardedDataParallel):
            raise UntraceableError(
                "FSDP1 flattens parameters and hides their shapes; count the model before wrapping it, "
                "or use fully_shard"
            )
        if isinstance(module, FSDPModule):
            cls = cast("type[nn.Module]", cls.__mro__[2])  # a new class with the bases (FSDPModule, own class)
    return LocalBatchNorm if cls is nn.SyncBatchNorm else cls
