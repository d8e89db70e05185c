"""What a process trains: its optimizers, the modules that own their parameters, and the calls of these modules.

`FirstStep` counts the first step of a training, which begins before it is known that there is one.
"""

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from flopwatch.clock import monotonic_seconds
from flopwatch.flops.tracing import regions
from flopwatch.flops.tracing.live import LiveStep, is_capturing, may_compile, obstacle
from flopwatch.guard import Guard
from flopwatch.monitor.counting.batch_reader import BatchReader, Reading
from flopwatch.monitor.counting.call_kinds import CallKind
from flopwatch.monitor.counting.calls import CallListener, RootCalls, batch_of_call
from flopwatch.monitor.run import MonitoredRun
from flopwatch.monitor.timing.tape import FIRST
from flopwatch.records.flops import AttentionConvention
from flopwatch.torch_internals.autograd import (
    compile_seconds,
    compiled_original,
    current_graph_task_id,
    recorded_operations,
)
from flopwatch.torch_internals.modules import compiled_call
from flopwatch.torch_internals.ops import dispatch_mode_stack

_MOST_BATCHES = 1000
_MOST_STEPS_WITHOUT_END = 100
"""If the optimizer that ends steps pauses during so many steps of another one, that one ends steps from then on."""


class Optimizers:
    """Knows the optimizers of the process, and which of them ends a step.

    Attributes:
        has_changed: Whether a new optimizer has stepped. Whoever has looked for its model sets this to False.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._last: weakref.ref[Optimizer] | None = None
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._steps_of_others = 0
        self._are_several: bool | None = None
        self._depths: Counter[int] = Counter()
        """How often an optimizer's `step` is under way, by the optimizer's id."""
        self.has_changed = False

    @property
    def last(self) -> Optimizer | None:
        """The optimizer whose step ends a step of the training."""
        return None if self._last is None else self._last()

    def begins(self, optimizer: Optimizer) -> bool:
        """Note that a `step` begins. Returns whether it is the first one of this optimizer."""
        self._depths[id(optimizer)] += 1
        is_new = optimizer not in self._known
        self._known.add(optimizer)
        return is_new

    def ends(self, optimizer: Optimizer) -> bool:
        """Note that a `step` ends. False if it is that of a parent class, called by the optimizer's own `step`."""
        depth = self._depths.pop(id(optimizer), 1) - 1
        if depth > 0:
            self._depths[id(optimizer)] = depth
        return depth <= 0

    def forget_running(self) -> None:
        """Forget the steps that are under way; an optimizer that has raised an exception did not end its step."""
        self._depths.clear()

    def parameters(self) -> list[torch.Tensor]:
        return [p for optimizer in self._stepped for group in optimizer.param_groups for p in group["params"]]

    def stepped(self, optimizer: Optimizer) -> bool | None:
        """Whether this optimizer step ends a step of the training; None if that is not known before its next one."""
        is_first, last = optimizer not in self._stepped, self.last
        self._stepped.add(optimizer)
        if is_first:
            self.has_changed = True
            self._last, self._steps_of_others = weakref.ref(optimizer), 0
            if self._are_several is None:
                self._are_several = _are_several()
            return None if self._are_several and (last is not None or len(self._stepped) == 1) else True
        if optimizer is not last:
            self._steps_of_others += 1
            if last is not None and self._steps_of_others < _MOST_STEPS_WITHOUT_END:
                return False
            self._last = weakref.ref(optimizer)
        self._steps_of_others = 0
        return True


class TrainedCalls:
    """The calls with gradients of the step that is open, whose arguments are its batches."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers, self._reader = optimizers, BatchReader()
        self.owners: dict[int, bool] = {}
        """By the number of a module, whether it has trained parameters."""
        self._unclear: list[tuple[CallKind, weakref.ref[nn.Module], Reading]] = []
        """Batches whose module may be trained by an optimizer that has not stepped so far."""
        self.names: dict[int, str] = {}
        """Modules with trained parameters that the step has called, by number."""
        self._count = 0
        self._usual: Counter[int] = Counter()
        """By the number of calls of trained modules in a step, how many steps had so many."""

    def is_batch(self, kind: CallKind, module: nn.Module) -> bool:
        """Note a call. Returns whether it is of the first module with trained parameters in the step."""
        if kind.module not in self.owners:
            trained = set(map(id, self._optimizers.parameters()))
            self.owners[kind.module] = any(id(p) in trained for p in module.parameters())
        if self.owners[kind.module]:
            self._count += 1
            self.names[kind.module] = kind.name
        return self.owners[kind.module] and len(self.names) == 1

    def keep(self, kind: CallKind, module: nn.Module, batch: Callable[[], Any]) -> Reading | None:
        """Keep the sizes of a batch until the optimizer of its module has stepped."""
        if not kind.has_parameters or self.names or len(self._unclear) >= _MOST_BATCHES:
            return None
        with Guard("a kept batch"):  # if this fails, the monitor reports it when it reads the next batch
            reading, _ = self._reader.read_checked(batch())
            self._unclear.append((kind, weakref.ref(module), reading))
            return reading
        return None

    def take_kept(self) -> list[Reading]:
        """The batches of modules whose optimizer has stepped since."""
        kept, self._unclear = self._unclear, []
        return [reading for kind, ref, reading in kept if (module := ref()) is not None and self.is_batch(kind, module)]

    def share_nothing_with(self, module: nn.Module) -> bool:
        """Whether a module shares no parameters with those whose batches are kept."""
        kept = (ref() for _, ref, _ in self._unclear)
        return not any(each is not None and share_parameters(module, each) for each in kept)

    def end_step(self) -> bool:
        """End a step. Returns whether it was several, because a GradScaler skips the optimizer after an overflow."""
        count = self._count
        self.forget()
        usual = self._usual.most_common(1)[0][0] if self._usual else 0
        self._usual[count] += bool(count)
        return bool(usual and count > usual and count % usual == 0 and exists(torch.amp.GradScaler))

    def forget(self) -> None:
        self._unclear, self._count = [], 0
        self.names.clear()


def share_parameters(one: nn.Module, other: nn.Module) -> bool:
    return not set(map(id, nn.Module.parameters(one))).isdisjoint(map(id, nn.Module.parameters(other)))


class FoundModel:
    """The model that is trained, and the hook that reads its batches if its process compiles."""

    def __init__(self, called: Callable[..., None]) -> None:
        self._called = called
        self._ref: weakref.ref[nn.Module] | None = None
        self._hook: RemovableHandle | None = None

    @property
    def now(self) -> nn.Module | None:
        return None if self._ref is None else self._ref()

    def is_out_of_date(self) -> bool:
        """Whether the model is gone, or has no hook yet although its process compiles by now."""
        return self._ref is not None and (self._ref() is None or (self._hook is None and may_compile()))

    def set(self, model: nn.Module) -> None:
        self._ref = weakref.ref(model)
        if may_compile():
            self.remove_hook()
            hook = _CallHook(self._called) if compiled_call(model) is None else note_call
            self._hook = model.register_forward_pre_hook(hook, with_kwargs=True)

    def take_compiled_batches(self) -> list[Any]:
        """The batches of a model that was compiled in place; when it was called is not known."""
        model = self.now
        if model is None or compiled_call(model) is None:
            return []
        return [batch_of_call(*call) for call in take_calls(model)]

    def remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()


class _CallHook:
    """The hook on a model with compiled code. In a copy of the model the copied hook does nothing."""

    def __init__(self, called: Callable[..., None] | None) -> None:
        self._called = called

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._called is not None:
            self._called(module, args, kwargs)

    def __deepcopy__(self, memo: Any) -> "_CallHook":
        return _CallHook(None)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A method that does nothing, so that a saved model can be loaded where flopwatch is not installed.
        return getattr, (nullcontext(), "__exit__")


def _are_several() -> bool:
    """Whether the process has several optimizers; an earlier one may only wait for the garbage collector."""
    return exists(Optimizer, more_than=1) and gc.collect() >= 0 and exists(Optimizer, more_than=1)


def exists(kind: type, more_than: int = 0) -> bool:
    """Whether the process has objects of a class, or more than so many."""
    # `isinstance` would read `__class__`, which runs code in objects that load something on first use.
    found = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    # Accelerate wraps an optimizer in another one.
    return sum(not isinstance(getattr(each, "__dict__", {}).get("optimizer"), kind) for each in found) > more_than


def has_optimizer() -> bool:
    """Whether an optimizer was made in this process: torch marks the `step` of its class then."""
    kinds: list[Any] = [Optimizer]
    while kinds:
        kind = kinds.pop()
        if getattr(kind.step, "hooked", False):
            return True
        kinds += kind.__subclasses__()
    return False


def find_trained_modules(parameters: Iterable[torch.Tensor]) -> list[nn.Module]:
    """The modules that own these parameters and may be called in a training step, the likeliest first.

    If some modules contain all of the parameters (a model, and what wraps it), these are returned, the outermost first.
    Otherwise the outermost modules with a part of the parameters are returned, those with most of them first.

    >>> inner = nn.Linear(2, 2)
    >>> outer = nn.Sequential(inner)
    >>> [type(module).__name__ for module in find_trained_modules(inner.parameters())]
    ['Sequential', 'Linear']
    """
    wanted = {id(parameter) for parameter in parameters}
    # `isinstance` would read `__class__`, which runs code in objects that load something on first use.
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in each.__dict__]
    owners = [m for m in modules if any(id(p) in wanted for p in m.parameters(recurse=False))]
    ancestors = _with_ancestors(owners, modules)
    owned = {id(m): sum(id(p) in wanted for p in m.parameters()) for m in ancestors}
    found = len({id(p) for m in owners for p in m.parameters(recurse=False)} & wanted)
    sizes = {id(m): sum(1 for _ in m.modules()) for m in ancestors}
    whole = [m for m in ancestors if owned[id(m)] == found]
    if whole:
        return _until_compiled(sorted(whole, key=lambda m: -sizes[id(m)]))
    inside = {id(child) for m in ancestors for child in m.children()}
    outermost = [m for m in ancestors if id(m) not in inside]
    return sorted(outermost, key=lambda m: -owned[id(m)])


def _with_ancestors(owners: list[nn.Module], modules: list[nn.Module]) -> list[nn.Module]:
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        for child in module.children():
            parents.setdefault(id(child), []).append(module)
    found: dict[int, nn.Module] = {}
    waiting = list(owners)
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting += parents.get(id(module), [])
    return list(found.values())


def _until_compiled(modules: list[nn.Module]) -> list[nn.Module]:
    """Leave out what is inside a compiled module, because a hook there would become part of the compiled code."""
    for number, module in enumerate(modules):
        if compiled_call(module) is not None or compiled_original(module) is not None:
            return modules[: number + 1]
    return modules


# The calls of a model that was compiled in place (`model.compile()`). The compiler traces the hooks of such a model. A
# hook that only appends to a list stays outside the compiled graph, and the compiled code appends in every call. A hook
# that reads a clock or calls the monitor would run once, in the tracing.

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_calls: list[Call] = []
"""Module and arguments of each call with gradients since the last optimizer step."""


def note_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook. It must stay a plain function, and do no more than this."""
    if torch.is_grad_enabled():  # batches of an evaluation would only fill the memory until the next step
        _calls.append((module, args, kwargs))


def take_calls(module: nn.Module) -> list[Call]:
    """The calls of this module with gradients since the last time; they are forgotten."""
    calls = [call for call in _calls if call[0] is module]
    _calls.clear()
    return calls


_MOST_CALLS = 1000
_WARNING_OF_HOOKS = r"Using `torch.compile\(module\)` when there are global hooks"
"""Torch warns so if a compiled module is called while our hook for all modules exists."""
MAYBE_EVALUATED = (
    "before the first step, a module was called without gradients that the step does not train; whether that was an "
    "evaluation or belongs to the step is not known"
)


class FirstStep:
    """Records the calls of the first step, counts what it runs, and hands both over to the monitor.

    Attributes:
        evaluated: What may have been evaluated before the step.
    """

    def __init__(self, listener: CallListener, attention: AttentionConvention) -> None:
        self._attention = attention
        self._calls: RootCalls | None = RootCalls(listener)
        self._live: LiveStep | None = None
        self._nodes: int | None = None
        self._batches: list[int] = []
        """The numbers of the modules that the step has called with batches. The first one's are its micro-batches."""
        self.evaluated = _Evaluated()
        self._began: float | None = None
        self._compiled_before = 0.0
        """What `compile_seconds` was when the step began."""
        self._ended = 0.0
        self._optimizer: tuple[Any, ...] | None = None
        """The optimizer step that is under way, with its arguments."""
        known = len(warnings.filters)
        warnings.filterwarnings("ignore", _WARNING_OF_HOOKS)
        self._filter = warnings.filters[0] if len(warnings.filters) > known else None
        self._calls.start()

    def note_call(self, module: nn.Module | None) -> bool:
        """Begin the step if it has not begun, and note a call. False if it has too many calls for one step."""
        if self._began is None:
            self._began, self._nodes = monotonic_seconds(), recorded_operations()
            self._compiled_before = compile_seconds()
            is_unsuitable = dispatch_mode_stack() or torch.is_inference_mode_enabled() or is_capturing()
            if obstacle() is None and not is_unsuitable and not regions.state.is_calling:
                self._live = LiveStep(self._attention)
                if self._optimizer is not None:  # the call comes from the optimizer's closure
                    self._live.enter_optimizer(*self._optimizer)
        if module is None or self._calls is None:
            return True
        if self._live is not None:
            self._live.note_call()
        return len(self._calls.calls) <= _MOST_CALLS

    def note_batch(self, kind: CallKind, batch: Reading | None) -> None:
        if batch is not None:
            self._batches.append(kind.module)
            if self._live is not None and kind.module == self._batches[0]:
                self._live.set_axes(batch.layout.axes)

    def leave_out(self, kept: int | None = 0) -> None:
        """Leave out what ran so far, except for this number of the newest calls; None keeps all calls."""
        if self.evaluated.began is None:
            self.evaluated.began, self.evaluated.compiled_before = self._began, self._compiled_before
        self._began = None
        if self._live is not None:
            self._live.end()
            self._live = None
        if self._calls is not None and kept is not None:
            left_out = len(self._calls.calls) - kept
            del self._calls.calls[:left_out], self._calls.nodes[:left_out]

    def was_evaluated(self, kind: CallKind, module: nn.Module | None) -> bool:
        """Whether a model that is called was evaluated before, so that the step may begin only with this call."""
        if module is None:  # where the step is counted as it runs, the counter leaves out evaluations itself
            return self._live is None and kind.module in self.evaluated.regions
        return any(share_parameters(module, each) for each in self.evaluated.modules)

    def optimizer_begins(self, *call: Any) -> None:
        self._optimizer = call
        if self._live is not None:
            self._live.enter_optimizer(*call)

    def optimizer_ended(self) -> None:
        self._optimizer, self._ended = None, monotonic_seconds()
        if self._live is not None:
            self._live.leave_optimizer()

    def stop(self) -> None:
        """Give up the first step. Its count cannot be ended in a backward pass; then this must be called again."""
        if self._live is not None and current_graph_task_id() == -1:
            self._live.end()
            self._live = None
        if self._calls is not None:
            self._calls.close()
            self._warn_again()
        self._calls = None

    def hand_over(self, run: MonitoredRun) -> None:
        live, calls, self._live, self._calls = self._live, self._calls, None, None
        if calls is not None:
            self._warn_again()
            run.counter.take_over(live, calls, self._nodes)

    def why_inexact(self, calls: TrainedCalls) -> str | None:
        is_unclear = self.evaluated.began is not None and any(map(calls.share_nothing_with, self.evaluated.modules))
        return MAYBE_EVALUATED if is_unclear else None

    def note_times(self, run: MonitoredRun) -> None:
        """Tell the run when its first step began, and how long an evaluation before it took."""
        if self.evaluated.began is not None:
            compiled = self.evaluated.compiled_after - self.evaluated.compiled_before
            seconds = self.evaluated.ended - self.evaluated.began
            run.spent_before_first_step("eval", seconds - compiled, compiled)
        if self._began is not None:
            micro_batches = self._batches.count(self._batches[0]) if self._batches else 0
            run.tape.compiled_before = self._compiled_before
            run.tape.add(FIRST, (self._ended - self._began, micro_batches))

    def _warn_again(self) -> None:
        # In a process that compiles the hook stays, and so must the filter.
        if self._filter in warnings.filters and not may_compile():
            cast("list[Any]", warnings.filters).remove(self._filter)


class _Evaluated:
    """What may have been evaluated before the first step, and from when until when.

    Attributes:
        modules: Modules that were called without gradients, in evaluation mode.
        regions: Numbers of the models whose compiled code was called without gradients; their mode is not seen.
    """

    def __init__(self) -> None:
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.regions: set[int] = set()
        self.began: float | None = None
        self.ended = 0.0
        self.compiled_before = self.compiled_after = 0.0
        """What `compile_seconds` was when it began, and when it ended."""

    def end(self) -> None:
        self.ended, self.compiled_after = monotonic_seconds(), compile_seconds()

    def add(self, kind: CallKind, module: nn.Module | None) -> None:
        if module is None:
            self.regions.add(kind.module)
        else:
            self.modules.add(module)
