"""Unwraps a model, follows which module of its stand-in runs, and restores the state outside of the model.

That state (`undisturbed`) is the random generators, the autocast cache, dispatch modes and compiled code. The module
`copies` makes the stand-in, the copy of the model that is counted.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flopwatch.flops.tracing.hooks import left_hooks_note
from flopwatch.random_state import same_random_states
from flopwatch.torch_internals.autograd import compiled_original, current_graph_task_id
from flopwatch.torch_internals.ops import modes_off


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
