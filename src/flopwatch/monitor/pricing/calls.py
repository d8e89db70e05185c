"""Records the shapes of the arguments with which a step calls the model, by a hook that reads no tensor values.

FLOPs are computed from these calls and not from the batch that a loop gives to the monitor, because a loop can call the
model twice, without gradients, or with a part of the batch.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, nn, strided
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from flopwatch.errors import InputError
from flopwatch.flops.batch_contents import Description, describe
from flopwatch.flops.tracing.passes import AutocastState, current_autocast, is_any_autocast_on
from flopwatch.flops.tracing.replica import unwrap
from flopwatch.torch_internals import compiled_call, current_graph_task_id, own_parameters, recorded_operations

PACKING = (
    "cu_seq_lens_q",
    "cu_seqlens",
    "cu_seqlens_q",
    "cu_seq_lens_k",
    "cu_seqlens_k",
    "max_length_q",
    "max_length_k",
    "position_ids",
)
"""Names of arguments that say where packed documents begin and end. Calls that differ only in these arguments are of
one kind, because the lengths of documents are read from the batch."""
_tensor_facts = attrgetter("shape", "dtype", "requires_grad", "layout")
_LISTENED_PARAMETERS = 4
"""Number of parameters with a gradient hook. The first, the last and two in between show which parts are trained."""
_MOST_BACKWARDS = 1 << 12
_MOST_KINDS = 4096
_MOST_PARAMETERS = 4096


@dataclass(eq=False)
class CallKind:
    """A kind of call: all calls of the model whose arguments are equal, apart from the values in tensors.

    Other classes keep only weak references to kinds, so that memory is freed when `CallListener` drops a kind.

    Attributes:
        description: Structure and shapes of the arguments.
        has_grad: Whether autograd records the call.
        is_training: The model's `training` flag.
        autocast: The autocast state around the call; None if unknown.
        trainable: A hash of which parameters require a gradient.
        example: The arguments of the first such call, kept until its FLOPs are counted.
        is_per_batch: True if FLOPs must be counted for each call separately, because they depend on tensor values.
    """

    description: Description
    has_grad: bool
    is_training: bool
    autocast: AutocastState | None
    trainable: int
    example: Any = field(default=None, repr=False)
    is_per_batch: bool = False

    @property
    def family(self) -> tuple[Any, ...]:
        """The properties that are equal for all calls whose FLOPs follow the same formula (law)."""
        return self.description.structure, self.has_grad, self.is_training, self.autocast, self.trainable


class CallListener:
    """Records the calls of one module in each step.

    Attributes:
        is_listening: False during evaluation and similar phases, and while flopwatch itself runs the model.
        compiled_autocast: The autocast state in which the model was compiled; None if it was not compiled.
        is_compiled: True once the model ran inside a compiled function, where hooks do not run.
        unseen: Number of calls that were not recorded, because their arguments cannot be described.
    """

    def __init__(self, on_call: Callable[[bool], None] = lambda has_grad: None) -> None:
        self.is_listening = True
        self._on_call = on_call
        self.compiled_autocast: AutocastState | None = None
        self.is_compiled = False
        self.unseen = 0
        self.has_been_called = False
        self.keeps_next = False
        """Whether the arguments of the next call are kept, to check the FLOP formula with them."""
        self.calls: list[tuple[CallKind, Any]] = []
        """Calls since the step began, each with its arguments, or with None if these are not needed."""
        self.backwards = 0
        """How many gradients each hooked parameter got in the step, as digits of a number in base `_MOST_BACKWARDS`."""
        self._kinds: dict[Any, tuple[CallKind, None]] = {}
        self._last_key: Any = None
        self._last_call: tuple[CallKind, None] | None = None
        self._trained: list[bool] = []
        self._trained_hash = hash(())
        self._handle: RemovableHandle | None = None
        self._gradient_handles: list[RemovableHandle] = []
        self._model: weakref.ref[nn.Module] | None = None
        self._parameters: list[nn.Parameter] = []

    def listen_to(self, model: nn.Module) -> None:
        self.stop()
        self._model = weakref.ref(model)
        self.forget()
        self.look_at_parameters()
        if compiled_call(model) is not None and type(model).__module__.startswith("torch.nn"):
            # If the compiled model is of a class of torch.nn, such as Sequential, a hook would change its compilation.
            self.is_compiled = True
            return
        self._handle = model.register_forward_pre_hook(_Hook(self), with_kwargs=True)
        self._listen_to_gradients()

    def _listen_to_gradients(self) -> None:
        """Register hooks on a few parameters, to see how often backward passes reach each part of the model."""
        self._stop_listening_to_gradients()
        trained = [p for p in self._parameters if p.requires_grad and p.is_leaf and type(p) is nn.Parameter]
        last = len(trained) - 1
        chosen = dict.fromkeys(last * part // (_LISTENED_PARAMETERS - 1) for part in range(_LISTENED_PARAMETERS))
        for part, index in enumerate(chosen if trained else ()):
            hook = partial(self._note_backward, _MOST_BACKWARDS**part)
            self._gradient_handles.append(trained[index].register_post_accumulate_grad_hook(hook))

    def _stop_listening_to_gradients(self) -> None:
        for handle in self._gradient_handles:
            handle.remove()
        self._gradient_handles.clear()

    def _note_backward(self, of_part: int, _: torch.Tensor) -> None:
        if self.is_listening:
            self.backwards += of_part

    def look_at_parameters(self) -> None:
        """Store the model's parameters for `note`, because listing them takes longer than all the rest of `note`."""
        model = self._model() if self._model is not None else None
        self._parameters = list(model.parameters())[:_MOST_PARAMETERS] if model is not None else []

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._stop_listening_to_gradients()
        self.begin_step()

    def forget(self) -> None:
        """Drop the stored `CallKind`s, because the model has changed."""
        self._kinds.clear()
        self._last_key = self._last_call = None

    def begin_step(self) -> None:
        """Drop the calls that were recorded before the step."""
        self.calls, self.backwards = [], 0

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self.is_listening or self._model is None or module is not self._model():
            return
        self.has_been_called = True
        has_grad = is_grad_enabled()
        self._on_call(has_grad)
        trained = [p.requires_grad for p in self._parameters]
        if trained != self._trained:
            self._trained, self._trained_hash = trained, hash(tuple(trained))
            self._listen_to_gradients()
        autocast = current_autocast() if is_any_autocast_on() else None
        key: list[Any] = [has_grad, module.training, self._trained_hash, autocast]
        for value in args:
            if type(value) is Tensor and value.layout is strided:
                key.append(_tensor_facts(value))
            else:
                key.append(_quick(value))
        for name, value in kwargs.items():
            if name not in PACKING:
                key += name, _quick(value)
        call = self._last_call
        if call is None or key != self._last_key:
            call = self._looked_up(key, module, args, kwargs)
            if call is None:
                self.unseen += 1
                return
            self._last_key, self._last_call = key, call
        kind = call[0]
        if kind.is_per_batch or self.keeps_next:
            self.keeps_next = False
            self.calls.append((kind, as_batch(module, args, kwargs)))
        else:
            self.calls.append(call)

    def _looked_up(
        self, key: list[Any], module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[CallKind, None] | None:
        """Find or create the kind of call for this key; None if part of the key cannot be hashed."""
        quick = tuple(key)
        try:
            call = self._kinds.get(quick)
        except TypeError:
            return None
        if call is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            example = as_batch(module, args, kwargs)
            call = CallKind(describe(example), key[0], key[1], current_autocast(), key[2], example), None
            self._kinds[quick] = call
        return call


def as_batch(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments of a call as a batch. If some were passed by name, the batch has names for all."""
    plain = {name: value for name, value in kwargs.items() if name not in PACKING or has_image_axes(value)}
    if not args:
        return plain
    if not plain:
        return args[0] if len(args) == 1 and isinstance(args[0], torch.Tensor) else args
    signature = inspect.signature(unwrap(module).forward)
    bound = dict(signature.bind(*args, **plain).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and name in bound:
            bound |= bound.pop(name)
        elif parameter.kind is parameter.VAR_POSITIONAL and name in bound:
            raise InputError("cannot count the FLOPs of a call with both *args and named arguments; use one of the two")
    return bound


def has_image_axes(positions: Any) -> bool:
    """Whether position ids have a third dimension, for the axes of images (time, height and width)."""
    return isinstance(positions, torch.Tensor) and positions.dim() > 2


def _quick(value: Any) -> Any:
    """A hashable key for a value; fast for tensors and plain values."""
    if isinstance(value, Tensor):
        return _tensor_facts(value) if value.layout is strided else describe(value)
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    return describe(value)


_hooks: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()
"""Hooks by their `key`. Torch 2.6 fails to compile a call whose argument is the hook itself; a string is a constant."""


class _Hook:
    """The hook on the model. In a copy of the model, such as an EMA of its weights, the copied hook does nothing."""

    def __init__(self, listener: CallListener | None) -> None:
        self._listener = listener
        self.key = str(id(self))
        _hooks[self.key] = self

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling():
            _note_compilation(self.key)
            return
        listener = self._listener
        if listener is not None:
            try:
                listener.note(module, args, kwargs)
            except Exception:
                self._listener = None  # stop recording: FLOPs of later steps are not exact, but the training goes on
                listener.unseen += 1

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return _Hook(None)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A method that does nothing, so that a saved model can be loaded where flopwatch is not installed.
        return getattr, (nullcontext(), "__exit__")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_compilation(key: str) -> int:
    """Record that the model is compiled. This runs while the compiler traces the hook, not in the compiled code."""
    listener = _hooks[key]._listener
    if listener is not None:
        listener.is_compiled = True
        listener.compiled_autocast = current_autocast()
    return 0


_MOST_NOTED = 4096
"""The maximum number of calls of modules outside the model that are recorded in one step."""


class OutsideWork:
    """Two hashes of a step's calls of modules outside the model; both are None if these calls are unknown.

    Attributes:
        sized: Hash of the modules and of the shapes of their arguments.
        unsized: Hash of the modules only.
    """

    __slots__ = ("sized", "unsized")

    def __init__(self, sized: int | None = None, unsized: int | None = None) -> None:
        self.sized = sized
        self.unsized = unsized

    def add_products(self, products: int) -> None:
        """Include `products`, a hash of the matrix products from the model's output to the loss; 0 means none."""
        if products:
            self.sized = hash((self.sized, products))


class OutsideCalls:
    """Records which other modules a step calls besides the model, such as a teacher, a head or a reward model.

    During a step, a public torch hook for all modules is set in the thread that opened the step. While the model runs,
    the hook is removed, so that the model's own submodules are not slowed down.

    Attributes:
        is_listening: False in phases such as evaluation.
        has_met_compiled_code: True once torch.compile has compiled the hook; from then on the hook is not set again.
        has_intervals: Whether `intervals` are recorded.
        intervals: Ranges of autograd's sequence numbers that belong to the model's calls in the step.
    """

    def __init__(self) -> None:
        self.is_listening = True
        self.has_met_compiled_code = False
        self.has_intervals = True
        self.intervals: list[tuple[int, int]] = []
        self._began = 0
        self._model: nn.Module | None = None
        self._hook = _OutsideHook(self)
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
        if self._model is not None and not self.has_met_compiled_code:
            self._thread, self._is_on = threading.get_ident(), True
            table, key = self._calls
            table[key] = self._hook

    def end(self) -> OutsideWork:
        """End the step; return what was recorded in it."""
        is_whole, self._is_on = self._is_on, False  # `is_whole` is False if a call of the model has raised
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
        elif self.is_listening and len(self._notes) < _MOST_NOTED and current_graph_task_id() == -1:
            # Calls inside a backward pass are ignored, because they only recompute activations.
            weight = own_parameters(module).get("weight")
            shapes = [fact for value in args for fact in _facts(value)]
            kind = module.__class__, torch.is_grad_enabled()
            self._notes.append((kind, None if weight is None else weight.shape, *shapes))

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record a call that began before `begin`, and is still under way."""
        if self._is_on:
            self.note(module, args)

    def _step_aside(self) -> None:
        """Remove the hook until this call of the model returns. If it raises, `end` returns an empty `OutsideWork`."""
        self._is_on = False
        table, key = self._calls
        table.pop(key, None)
        table, key = self._returns
        table[key] = self._come_back
        if self.has_intervals:
            self._began = recorded_operations() or 0

    def _come_back(self, *_: Any) -> None:
        table, key = self._returns
        table.pop(key, None)
        table, key = self._calls
        table[key] = self._hook
        self._is_on = True
        if self.has_intervals:
            self.intervals.append((self._began, recorded_operations() or 0))


def _facts(value: Any) -> Iterator[Any]:
    """Yield shape and `requires_grad` of a tensor, or of all tensors in a list."""
    if isinstance(value, torch.Tensor):
        yield value.shape
        yield value.requires_grad
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _facts(item)


class _Place(NamedTuple):
    """A hook's entry in torch's dict of hooks. Writing the entry is ten times as fast as registering the hook."""

    table: Any
    key: int


def _place_of(handle: RemovableHandle) -> _Place:
    place = _Place(handle.hooks_dict_ref(), handle.id)
    handle.remove()
    return place


class _OutsideHook:
    """A forward pre-hook of all modules, which passes each call to `OutsideCalls.note` and never raises."""

    def __init__(self, calls: OutsideCalls) -> None:
        self._calls = calls
        self.key = str(id(self))
        _hooks[self.key] = self

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            _note_outside_compilation(self.key)
            return
        try:
            self._calls.note(module, args)
        except Exception:
            self._calls._notes.append((type(module), "not described"))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_outside_compilation(key: str) -> int:
    """Record that the hook is being compiled. The compiler calls this as it traces the hook; compiled code does not."""
    _hooks[key]._calls.has_met_compiled_code = True
    return 0
