"""Unwraps a model, copies its hooks, follows which module of its stand-in runs, and restores the state outside of it.

That state (`undisturbed`) is the random generators, the autocast cache, dispatch modes and compiled code. The module
`copies` makes the stand-in, the copy of the model that is counted.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flopwatch.flops.tracing.outside import names_in
from flopwatch.guard import Guard
from flopwatch.random_state import same_random_states
from flopwatch.torch_internals.autograd import compiled_original
from flopwatch.torch_internals.modules import hook_tables
from flopwatch.torch_internals.ops import modes_off


def unwrap(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif (original := compiled_original(module)) is not None:
            module = original
        else:
            return module


class _Now(threading.local):
    """The paths of the modules that run in this thread."""

    def __init__(self) -> None:
        self.paths = [""]


class ModuleStack:
    """Keeps the path of the running module (`""` is the model), and how the counted copy differs from the model."""

    def __init__(self) -> None:
        self._now = _Now()
        self.left_hooks: list[str] = []
        self.wrapped_weights: dict[str, None] = {}
        self.failed_in: str | None = None

    def notes(self) -> Iterator[str | None]:
        yield left_hooks_note(self.left_hooks)
        if self.wrapped_weights:
            kinds = ", ".join(self.wrapped_weights)
            yield f"weights of type {kinds} count as plain tensors, so the compute type of their products is not known"

    @property
    def current(self) -> str:
        return self._now.paths[-1]

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        self._now.paths.append(path)
        has_returned = False
        try:
            yield
            has_returned = True
        finally:
            self._now.paths.pop()
            if not has_returned:
                self.failed_in = self.failed_in or path  # the innermost module raises first


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
        stack.enter_context(same_random_states())
        stack.enter_context(torch.inference_mode(False))
        # In an autocast region of the user, torch would keep the casts of our tensors in memory until the region ends.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        # Hooks that are registered for all modules would also run for the copy of the model.
        tables = [table for table in vars(nn.modules.module).values() if isinstance(table, OrderedDict) and table]
        for table in tables:
            if all(isinstance(key, int) for key in table):
                stack.callback(table.update, OrderedDict(table))
                table.clear()
        # Otherwise the user's own dispatch modes, such as another FLOP counter, would see the ops of the trace.
        stack.enter_context(modes_off())
        # A compiled function whose first run is under a dispatch mode is never compiled afterwards (pytorch issue
        # 140909), so compiled functions run eagerly here, which does not change their state.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


# Hooks of these libraries only use the module that they get (old-style weight norm, captured hidden states), so they
# run without being copied.
_COMPUTE = ("torch.nn.utils.", "transformers.")
# Hooks of these libraries shard, move, time or count a model. The traced copy of the model does not get them.
WATCH_OR_MOVE = (
    *("accelerate.", "composer.", "deepspeed.", "flopwatch.", "lightning.", "lightning_fabric.", "pytorch_lightning."),
    *("ray.", "torch._", "torch.ao.", "torch.distributed.", "torch.fx.", "torch.nn.parallel.", "torch.profiler."),
    *("torch.utils.", "wandb."),
)
_PER_SAMPLE_GRADIENTS = "opacus."
NO_PER_SAMPLE_GRADIENTS = "hardware_flops leaves out the per-sample gradients"
_LEAVE_TRACES = {"print", "open", "input", "exec", "eval", "globals", "breakpoint", "__import__"}


def copy_hooks(module: nn.Module, twin: nn.Module, value: Callable[[Any], Any], left_behind: list[str]) -> None:
    """Fill the empty tables of hooks of `twin`, the copy of `module`; add the names of those left out to `left_behind`.

    `value` returns the copy of an object of the live model. A hook that prints, opens files or fails, such as by
    reading the value of a fake tensor, is left out, and so are backward hooks. Hooks that only move data or observe are
    left out without a note.
    """
    for table in hook_tables():
        kept = vars(twin)[table]
        for key, hook in vars(module)[table].items():
            home, code = _home(hook), getattr(_function(hook), "__code__", None)
            used = frozenset() if code is None else names_in(code)[0]
            if isinstance(hook, bool) or (home.startswith(_COMPUTE) and "backward" not in table):
                kept[key] = hook
            elif home.startswith(WATCH_OR_MOVE):
                continue
            elif "backward" in table or home.startswith(_PER_SAMPLE_GRADIENTS) or not _LEAVE_TRACES.isdisjoint(used):
                left_behind.append(_name(hook))
            else:
                kept[key] = functools.partial(_run_or_leave_out, value(hook), _name(hook), left_behind)


def left_hooks_note(left_behind: list[str]) -> str | None:
    if not left_behind:
        return None
    names = ", ".join(dict.fromkeys(left_behind))
    text = f"{len(left_behind)} hooks of the model were left out, and what they compute is not counted: {names}"
    if any(name.startswith(_PER_SAMPLE_GRADIENTS) for name in left_behind):
        text += f" ({NO_PER_SAMPLE_GRADIENTS})"
    return text


def _run_or_leave_out(hook: Any, name: str, left_behind: list[str], *args: Any, **kwargs: Any) -> Any:
    with Guard("a hook of the model", lambda *_: left_behind.append(name)):
        return hook(*args, **kwargs)
    return None


def _home(hook: Any) -> str:
    hook = _function(hook)
    return str(getattr(hook, "__module__", None) or type(hook).__module__) + "."


def _name(hook: Any) -> str:
    hook = _function(hook)
    return _home(hook) + getattr(hook, "__qualname__", type(hook).__qualname__)


def _function(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook
