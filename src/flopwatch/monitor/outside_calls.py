"""Which modules besides the watched model a step calls: a teacher, a head, a reward model.

Steps with the same calls of the model and the same autograd operations may still differ in them: a teacher without
gradients joins, a head outside reads more positions. A public hook for all modules is on while a step is open, and is
taken off while the watched model runs, so that its own submodules are called as without a monitor.
"""

import threading
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from flopwatch.monitor.watched_step import autograd_nodes

_MOST_NOTED = 4096
"""Calls of modules in one step; further ones are not told apart."""


class OutsideWork:
    """What ran outside the model in one step, as two numbers that change with it; None where it was not seen.

    Attributes:
        sized: With all sizes.
        unsized: Without sizes.
    """

    __slots__ = ("sized", "unsized")

    def __init__(self, sized: int | None = None, unsized: int | None = None) -> None:
        self.sized = sized
        self.unsized = unsized

    def add_products(self, products: int) -> None:
        """Those in the loss's graph, outside the model; 0 where there are none."""
        if products:
            self.sized = hash((self.sized, products))


class OutsideCalls:
    """Notes the calls of other modules in a step, in the thread that has opened it.

    Attributes:
        is_listening: False in phases that are not the training's.
        has_met_compiled_code: True once a compiler has read the hook: it is never put on again then.
        intervals: Of autograd's sequence numbers, which the model's own calls took in the step.
    """

    def __init__(self) -> None:
        self.is_listening = True
        self.has_met_compiled_code = False
        self.intervals: list[tuple[int, int]] = []
        self._began = 0
        self._model: nn.Module | None = None
        self._handle: RemovableHandle | None = None
        self._until_return: RemovableHandle | None = None
        self._notes: list[tuple[Any, ...]] = []
        self._thread = 0
        self._hook = _Hook(self)

    def begin(self, model: nn.Module) -> None:
        self._notes, self.intervals = [], []
        if self.has_met_compiled_code:
            return
        self._model, self._thread = model, threading.get_ident()
        self._handle = register_module_forward_pre_hook(self._hook)

    def end(self) -> OutsideWork:
        """Take the hook off; what was noted since `begin`."""
        is_whole = self._handle is not None  # else the model's own call has not returned: it has raised
        for handle in (self._handle, self._until_return):
            if handle is not None:
                handle.remove()
        self._handle = self._until_return = self._model = None
        notes, self._notes = self._notes, []
        if not is_whole or self.has_met_compiled_code:
            return OutsideWork()
        if not notes:
            return OutsideWork(0, 0)
        return OutsideWork(hash(tuple(notes)), hash(tuple([note[0] for note in notes])))

    def note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        if module is self._model:
            self._step_aside(module)
        elif self.is_listening and len(self._notes) < _MOST_NOTED and torch._C._current_graph_task_id() == -1:
            # In a backward pass modules run only once more what they ran before.
            weight = module._parameters.get("weight")
            shapes = [value.shape for value in args if isinstance(value, torch.Tensor)]
            kind = module.__class__, torch.is_grad_enabled()
            self._notes.append((kind, None if weight is None else weight.shape, *shapes))

    def _step_aside(self, model: nn.Module) -> None:
        """Until the model returns. Where it raises instead, the step ends without having been seen."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
            self._began = autograd_nodes() or 0
            self._until_return = model.register_forward_hook(self._come_back)

    def _come_back(self, *_: Any) -> None:
        if self._until_return is not None:
            self._until_return.remove()
            self._until_return = None
            self.intervals.append((self._began, autograd_nodes() or 0))
            self._handle = register_module_forward_pre_hook(self._hook)


class _Hook:
    """What is registered with torch: an error of ours ends the noting, not the call."""

    def __init__(self, calls: OutsideCalls) -> None:
        self._calls = calls

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            _note_compilation(self)
            return
        try:
            self._calls.note(module, args)
        except Exception:
            self._calls._notes.append((type(module), "not described"))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_compilation(hook: _Hook) -> int:
    """Run by the compiler while it reads the hook: leaves nothing in the compiled function."""
    hook._calls.has_met_compiled_code = True
    return 0
