"""Sees how the model is called: a public hook on the root module notes every call's shapes, and nothing of its values.

What a step costs follows from its calls, not from the batch that a loop hands to the monitor: a loop may call the model
twice, without gradients, or with a part of the batch.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn, strided
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from flopwatch.errors import InputError
from flopwatch.flops.autocast import AutocastState, current_autocast
from flopwatch.flops.replica import unwrap
from flopwatch.flops.structure import Description, describe

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
"""Arguments that tell packed documents apart; their documents are a variable of the law, so they are not in a key."""
_is_any_autocast_enabled: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""One question instead of one for each type of device; private, checked with 2.13, and without it all are asked."""
_tensor_facts = attrgetter("shape", "dtype", "requires_grad", "layout")
_LISTENED_PARAMETERS = 4
"""The first, the last and some between: heads and adapters that are trained in turns are told apart by them."""
_MOST_BACKWARDS = 1 << 12
_MOST_KINDS = 4096
_MOST_PARAMETERS = 4096


@dataclass(eq=False)
class CallKind:
    """All calls of the model that are alike, but for the values of their tensors.

    What is known of a kind is kept under weak references to it, so that the listener's bound holds for all of it.

    Attributes:
        description: Everything the model was given.
        has_grad: Whether autograd records the call.
        is_training: The model's own flag.
        autocast: The autocast state around the call; None where it was not seen.
        trainable: Which parameters require a gradient, as a hash.
        example: The arguments of the first such call, until it was counted.
        is_per_batch: True when every call has to be counted for itself; its arguments are kept until the step ends.
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
        """What must be the same for one law to hold."""
        return self.description.structure, self.has_grad, self.is_training, self.autocast, self.trainable


class CallListener:
    """Notes the calls of one module; `take` hands them over at the end of a step.

    Attributes:
        is_listening: False during evaluation and other phases, and while flopwatch itself runs the model.
        compiled_autocast: The autocast state in which the model was compiled; None while it was not.
        is_compiled: True once the model ran inside a compiled function, where hooks do not run.
        without_grad: Called when the model runs without gradients: work that is no waiting for input.
        unseen: Calls that were not noted, because their arguments are objects of somebody's own (a cache).
    """

    def __init__(self) -> None:
        self.is_listening = True
        self.without_grad: Callable[[], None] = lambda: None
        self.compiled_autocast: AutocastState | None = None
        self.is_compiled = False
        self.unseen = 0
        self.has_been_called = False
        self.keeps_next = False
        """True keeps the arguments of the next call, for a check."""
        self.calls: list[tuple[CallKind, Any]] = []
        """Since the step began, with their arguments where these are asked for."""
        self.backwards = 0
        """How often gradients have reached each of a few parameters since the step began, in one number."""
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
        if model._compiled_call_impl is not None and type(model).__module__.startswith("torch.nn"):
            # Compiled in place, a container of torch's own would be compiled in another way with a hook.
            self.is_compiled = True
            return
        self._handle = model.register_forward_pre_hook(_Hook(self), with_kwargs=True)
        self._listen_to_gradients()

    def _listen_to_gradients(self) -> None:
        """A few parameters tell which parts of the model a backward pass reaches, and how often."""
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
        """The list is kept, because collecting it takes longer than all the rest of a call."""
        model = self._model() if self._model is not None else None
        self._parameters = list(model.parameters())[:_MOST_PARAMETERS] if model is not None else []

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None
        self._stop_listening_to_gradients()
        self.begin_step()

    def forget(self) -> None:
        """The model has changed: what was known of its calls holds no more."""
        self._kinds.clear()
        self._last_key = self._last_call = None

    def begin_step(self) -> None:
        """What was called before belongs to no step."""
        self.calls, self.backwards = [], 0

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self.is_listening or self._model is None or module is not self._model():
            return
        self.has_been_called = True
        has_grad = is_grad_enabled()
        if not has_grad:
            self.without_grad()
        trained = [p.requires_grad for p in self._parameters]
        if trained != self._trained:
            self._trained, self._trained_hash = trained, hash(tuple(trained))
            self._listen_to_gradients()
        autocast = current_autocast() if _is_any_autocast_enabled() else None
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
        """The call of this key, made when it is new; None where something in the key cannot be hashed."""
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
    """The arguments of a call as a batch; positional ones beside named ones go by their names."""
    plain = {name: value for name, value in kwargs.items() if name not in PACKING or _has_axes(value)}
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
            raise InputError("the call has positional arguments without a name beside named ones")
    return bound


def _has_axes(positions: Any) -> bool:
    """Position ids of several axes belong to images."""
    return isinstance(positions, torch.Tensor) and positions.dim() > 2


def _quick(value: Any) -> Any:
    """A key that is cheap for tensors and plain values; everything else is described."""
    if isinstance(value, Tensor):
        return _tensor_facts(value) if value.layout is strided else describe(value)
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    return describe(value)


class _Hook:
    """What is registered with the module. A copy of the model (an average of its weights) copies no monitor along."""

    def __init__(self, listener: CallListener | None) -> None:
        self._listener = listener

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_compiling():
            _note_compilation(self)
            return
        listener = self._listener
        if listener is not None:
            try:
                listener.note(module, args, kwargs)
            except Exception:
                self._listener = None  # the training goes on; the step is told as not seen
                listener.unseen += 1

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return _Hook(None)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _Hook, (None,)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_compilation(hook: _Hook) -> int:
    """Run by the compiler while it reads the hook: leaves nothing in the compiled function."""
    listener = hook._listener
    if listener is not None:
        listener.is_compiled = True
        listener.compiled_autocast = current_autocast()
    return 0
