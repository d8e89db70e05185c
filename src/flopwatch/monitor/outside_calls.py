"""Which modules besides the watched model a step calls: a teacher, a head, a reward model.

Steps with the same calls of the model and the same autograd operations may still differ in them: a teacher without
gradients joins, a head outside reads more positions. A public hook for all modules is on while a step is open, and is
taken off while the watched model runs, so that its own submodules are called as without a monitor.
"""

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

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
        has_intervals: Whether `intervals` are wanted.
        intervals: Of autograd's sequence numbers, those that the model's own calls took in the step.
    """

    def __init__(self) -> None:
        self.is_listening = True
        self.has_met_compiled_code = False
        self.has_intervals = True
        self.intervals: list[tuple[int, int]] = []
        self._began = 0
        self._model: nn.Module | None = None
        self._hook = _Hook(self)
        self._calls = self._returns = _Place({}, 0)
        self._is_on = False
        self._notes: list[tuple[Any, ...]] = []
        self._thread = 0

    def listen_beside(self, model: nn.Module) -> None:
        self.stop()
        self._model = model
        self._calls = _place_of(register_module_forward_pre_hook(self._hook))
        self._returns = _place_of(model.register_forward_hook(self._come_back))

    def stop(self) -> None:
        self.end()
        self._model, self._calls, self._returns = None, _Place({}, 0), _Place({}, 0)

    def begin(self) -> None:
        """A step begins."""
        if self._model is not None and not self.has_met_compiled_code:
            self._thread, self._is_on = threading.get_ident(), True
            table, key = self._calls
            table[key] = self._hook

    def end(self) -> OutsideWork:
        """The step ends; what was noted in it."""
        is_whole, self._is_on = self._is_on, False  # off, where a call of the model has raised instead of returning
        for table, key in (self._calls, self._returns):
            table.pop(key, None)
        notes = self._notes
        if not is_whole or self.has_met_compiled_code:
            self._notes, self.intervals = [], []
            return OutsideWork()
        if not notes:
            return OutsideWork(0, 0)
        self._notes = []
        return OutsideWork(hash(tuple(notes)), hash(tuple([note[0] for note in notes])))

    def take_intervals(self) -> list[tuple[int, int]]:
        intervals, self.intervals = self.intervals, []
        return intervals

    def note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != self._thread:
            return
        if module is self._model:
            self._step_aside()
        elif self.is_listening and len(self._notes) < _MOST_NOTED and torch._C._current_graph_task_id() == -1:
            # In a backward pass modules run only once more what they ran before.
            weight = module._parameters.get("weight")
            shapes = [fact for value in args for fact in _facts(value)]
            kind = module.__class__, torch.is_grad_enabled()
            self._notes.append((kind, None if weight is None else weight.shape, *shapes))

    def _step_aside(self) -> None:
        """Until the model returns. Where it raises instead, the step ends without having been seen."""
        self._is_on = False
        table, key = self._calls
        table.pop(key, None)
        table, key = self._returns
        table[key] = self._come_back
        if self.has_intervals:
            self._began = autograd_nodes() or 0

    def _come_back(self, *_: Any) -> None:
        table, key = self._returns
        table.pop(key, None)
        table, key = self._calls
        table[key] = self._hook
        self._is_on = True
        if self.has_intervals:
            self.intervals.append((self._began, autograd_nodes() or 0))


def _facts(value: Any) -> Iterator[Any]:
    """Of a tensor, or of those in a list: crops of an image, say. Named arguments are not handed to this hook."""
    if isinstance(value, torch.Tensor):
        yield value.shape
        yield value.requires_grad
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _facts(item)


class _Place(NamedTuple):
    """Where a hook is kept. It is put there and taken away on every step; registering it takes ten times as long."""

    table: Any
    key: int


def _place_of(handle: RemovableHandle) -> _Place:
    place = _Place(handle.hooks_dict_ref(), handle.id)
    handle.remove()
    return place


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
