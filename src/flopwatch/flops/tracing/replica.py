"""Makes a stand-in for a live model: a copy with the same modules and code, other tensors, and copies of the hooks.

The live model does not change. Each module is copied shallowly, and its parameters and buffers are replaced by fake
tensors or by aliases of the real ones, so a forward pass only writes to the stand-in. Wrappers that change how a model
runs but not what it computes (`torch.compile`, DDP, FSDP2, tensor parallelism) are removed. `undisturbed` restores the
state outside the model: random generators, autocast cache, dispatch modes, compiled code.
"""

import copy
import functools
import random
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from flopwatch.errors import InputError, UntraceableError
from flopwatch.flops.tracing.hooks import HookCopies, left_hooks_note
from flopwatch.library_internals import SHARDED_FORWARDS
from flopwatch.torch_internals import (
    LocalBatchNorm,
    call_slot,
    class_before_sharding,
    compiled_original,
    current_graph_task_id,
    global_hook_tables,
    modes_off,
    module_tables,
    own_buffers,
    own_modules,
    own_parameters,
)

TensorMap = Callable[[torch.Tensor], torch.Tensor]


def unwrap(module: nn.Module) -> nn.Module:
    """Remove the wrappers that do not change what a model computes."""
    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif (original := compiled_original(module)) is not None:
            module = original
        else:
            return module


class _Now(threading.local):
    """The paths of the modules that run in this thread, and for each the id of the backward pass that called it."""

    def __init__(self) -> None:
        self.paths = [""]
        self.tasks = [-1]


class ModuleStack:
    """Keeps the path of the running module (`""` is the model), and how the counted copy differs from the model."""

    def __init__(self) -> None:
        self._now = _Now()
        self.left_hooks: list[str] = []
        self.wrapped_weights: dict[str, None] = {}
        self.failed_in: str | None = None

    def notes(self) -> Iterator[str | None]:
        """Yield notes for the user on how the copy that is counted differs from the model."""
        yield left_hooks_note(self.left_hooks)
        if self.wrapped_weights:
            kinds = ", ".join(self.wrapped_weights)
            yield f"weights of type {kinds} count as plain tensors, so the compute type of their products is not known"

    @property
    def current(self) -> str:
        return self._now.paths[-1]

    @property
    def is_inside(self) -> bool:
        return len(self._now.paths) > 1

    @property
    def entered_in(self) -> int:
        """The id of the backward pass in which the running module was called; -1 if it was called outside of one."""
        return self._now.tasks[-1]

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        self._now.paths.append(path)
        self._now.tasks.append(current_graph_task_id())
        try:
            yield
        except Exception:
            self.failed_in = self.failed_in or path  # the innermost module raises first
            raise
        finally:
            self._now.paths.pop()
            self._now.tasks.pop()


def replicate(model: nn.Module, map_tensor: TensorMap, stack: ModuleStack) -> nn.Module:
    """Return a copy of the module tree; a tensor that occurs twice (tied weights) is mapped once."""
    replicator = _Replicator(map_tensor, stack)
    twin = replicator.module(model, "")
    replicator.copy_hooks()
    return twin


class _Replicator:
    def __init__(self, map_tensor: TensorMap, stack: ModuleStack) -> None:
        self._map_tensor = map_tensor
        self._stack = stack
        self._copies: dict[int, Any] = {}
        # An id is only unique while its object lives, so the originals are kept until the copy is done.
        self._originals: list[Any] = []
        self._copied_modules: list[tuple[nn.Module, nn.Module]] = []
        self._hooks = HookCopies(self.value, stack.left_hooks, stack.inside)

    def module(self, module: nn.Module, path: str) -> nn.Module:
        original = unwrap(module)
        if id(original) in self._copies:
            return self._copies[id(original)]  # type: ignore[no-any-return]
        if isinstance(original, torch.jit.ScriptModule):
            raise UntraceableError(
                f"module {path or type(original).__name__!r} is TorchScript, whose code cannot be run on other "
                "tensors; count the Python module it was made from"
            )
        twin: nn.Module = object.__new__(_plain_class(original))
        self._remember(original, twin)
        if module is not original:
            self._remember(module, twin)
        tables = module_tables()
        twin.__dict__[tables.parameters] = {name: self.value(value) for name, value in own_parameters(original).items()}
        twin.__dict__[tables.buffers] = {name: self.value(value) for name, value in own_buffers(original).items()}
        twin.__dict__[tables.modules] = {
            name: None if child is None else self.module(child, f"{path}.{name}".lstrip("."))
            for name, child in own_modules(original).items()
        }
        # Copy attributes after submodules: a module that is both must get its path from its place in the module tree.
        attributes = [(name, value) for name, value in original.__dict__.items() if not _is_left_out(name, value)]
        twin.__dict__.update({name: self.value(value) for name, value in attributes})
        self._copied_modules.append((original, twin))
        # A call of the module calls this attribute, so the running module is known without a hook.
        slot = call_slot()
        call = twin.forward if slot == "forward" else functools.partial(_call_past, twin, slot)
        twin.__dict__[slot] = functools.partial(_call_inside, call, self._stack, path)
        return twin

    def copy_hooks(self) -> None:
        """Copy all hooks. All modules must be copied before, because a hook may refer to any module."""
        for original, twin in self._copied_modules:  # the list grows, because hooks may reach other modules
            twin.__dict__.update(self._hooks.tables(original))

    def value(self, value: Any) -> Any:
        """Return a copy of a tensor, a module, a random generator or a container of these; other objects are shared."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, torch.Tensor):
            return self._remember(value, self._tensor(value))
        if isinstance(value, nn.Module):
            return self.module(value, type(value).__name__)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(self.value(value.__func__), self.module(value.__self__, ""))
        if isinstance(value, FunctionType) and value.__closure__:
            return self._function(value)
        if isinstance(value, functools.partial):
            return functools.partial(self.value(value.func), *map(self.value, value.args), **self.value(value.keywords))
        if type(value) is tuple:
            return tuple(map(self.value, value))
        if type(value) in (list, set):
            return self._remember(value, type(value)(map(self.value, value)))
        if type(value) in (dict, OrderedDict):
            return self._remember(value, type(value)((key, self.value(item)) for key, item in value.items()))
        if type(value) is defaultdict:
            items = {key: self.value(item) for key, item in value.items()}
            return self._remember(value, defaultdict(value.default_factory, items))
        return own_generator(value)

    def _function(self, function: FunctionType) -> FunctionType:
        """Return a function whose closure refers to the copy, not the live model (TRL's fused head needs this)."""
        cells = function.__closure__ or ()
        try:
            contents = [cell.cell_contents for cell in cells]
        except ValueError:  # a closure cell is still empty
            return function
        self._remember(function, function)  # a function may refer to itself
        mapped = [self.value(content) for content in contents]
        if all(new is old for new, old in zip(mapped, contents, strict=True)):
            return function
        twin = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(map(CellType, mapped)),
        )
        twin.__kwdefaults__ = function.__kwdefaults__
        twin.__dict__.update(function.__dict__)
        return cast("FunctionType", self._remember(function, twin))

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_lazy(tensor):
            raise InputError("the model has lazy parameters without a shape; run one batch through the model first")
        # A DTensor only shards a plain tensor. Other wrappers, such as torchao's, change how products run: note them.
        if hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "placements"):
            self._stack.wrapped_weights[type(tensor).__name__] = None
        mapped = self._map_tensor(tensor)
        if isinstance(tensor, nn.Parameter):
            mapped = nn.Parameter(mapped, requires_grad=tensor.requires_grad)
        # Opacus counts calls in attributes of each parameter, and its hooks expect to find them.
        for name, value in getattr(tensor, "__dict__", {}).items():
            if value is None or isinstance(value, bool | int | float | str):
                setattr(mapped, name, value)
        return mapped

    def _remember(self, original: Any, twin: Any) -> Any:
        self._originals.append(original)
        self._copies[id(original)] = twin
        return twin


def own_generator(value: Any) -> Any:
    """Copy a random generator, so that draws do not advance the original. Any other value is returned unchanged."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
        return copy.deepcopy(value)
    return value


def _is_left_out(name: str, value: Any) -> bool:
    return name in module_tables().state or (
        name == "forward" and getattr(value, "__module__", None) in SHARDED_FORWARDS
    )


def _call_inside(call: Callable[..., Any], stack: ModuleStack, path: str, *args: Any, **kwargs: Any) -> Any:
    with stack.inside(path):
        return call(*args, **kwargs)


def _call_past(module: nn.Module, slot: str, *args: Any, **kwargs: Any) -> Any:
    """Continue the call of a module as if its attribute `slot`, to which its calls are redirected, were not set.

    The `__call__` of its own class has run already. Some of transformers' classes checkpoint the layer there.
    """
    redirected, module.__dict__[slot] = module.__dict__[slot], None
    try:
        return nn.Module.__call__(module, *args, **kwargs)
    finally:
        module.__dict__[slot] = redirected


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
            cls = class_before_sharding(cls)
    return LocalBatchNorm if cls is nn.SyncBatchNorm else cls


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Switch off hooks that are registered for all modules, because they would also run for the copy of the model."""
    tables = global_hook_tables()
    saved = [OrderedDict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, entries in zip(tables, saved, strict=True):
            table.update(entries)


@contextmanager
def undisturbed(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """When the block ends, restore all state that a training could notice.

    Args:
        devices: The accelerators that the block uses. The random state of other accelerators is not saved, because
            reading it would create a context, and take memory, on each of them.
    """
    with ExitStack() as stack:
        for device in dict.fromkeys(devices):
            if device.type not in ("cpu", "meta"):
                stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        stack.enter_context(_same_random_states())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(_no_autocast_cache())
        stack.enter_context(without_global_hooks())
        # Otherwise the user's own dispatch modes, such as another FLOP counter, would see the ops of the trace.
        stack.enter_context(modes_off())
        # A compiled function whose first run is under a dispatch mode is never compiled afterwards (pytorch issue
        # 140909), so compiled functions run eagerly here, which does not change their state.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def _same_random_states() -> Iterator[None]:
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    # In an autocast region of the user, torch would keep the casts of our tensors in memory until the region ends.
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
