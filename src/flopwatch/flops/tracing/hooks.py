"""Copies the hooks of a live model to its stand-in, the copy that is counted, without access to the user's objects.

A hook is copied if everything that it can reach can be copied: the function is rebuilt with its closure, defaults and
globals mapped to modules, tensors and containers of the stand-in. A hook that holds anything else (a logger, a file, an
object of the user's) is left out, and a note says so. Hooks that only move data or observe are left out without a note.
"""

import builtins
import dis
import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from flopwatch.torch_internals import module_tables

Value = Callable[[Any], Any]
Extra = Callable[[str], AbstractContextManager[None]]

# Hooks of these libraries only use the module that they get (old-style weight norm, captured hidden states), so they
# run without being copied.
_COMPUTE = ("torch.nn.utils.", "transformers.")
# Hooks of these libraries shard, move, time or count a model. The traced copy of the model does not get them.
_WATCH_OR_MOVE = (
    "accelerate.",
    "composer.",
    "deepspeed.",
    "flopwatch.",
    "lightning.",
    "lightning_fabric.",
    "pytorch_lightning.",
    "ray.",
    "torch._",
    "torch.ao.",
    "torch.distributed.",
    "torch.fx.",
    "torch.nn.parallel.",
    "torch.profiler.",
    "torch.utils.",
    "wandb.",
)
_PER_SAMPLE_GRADIENTS = "opacus."
_GRAD_SAMPLE_MODULE = "opacus.grad_sample.grad_sample_module.GradSampleModule"
# Python modules whose functions have no side effects that outlive the call.
_PURE_MODULES = ("torch", "math", "numpy", "functools", "itertools", "operator", "collections", "einops", "typing")
_LEAVE_TRACES = {"print", "open", "input", "exec", "eval", "globals", "setattr", "delattr", "breakpoint", "__import__"}
_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice)


class HookNotCopyableError(Exception):
    """The hook reaches something that cannot be copied."""


class HookCopies:
    """Copies the hooks of one live model to its stand-in, the copy that is counted.

    Args:
        value: Returns the stand-in's version of an object of the live model.
        left_behind: Receives the names of hooks that are left out with a note.
        extra: Takes a hook's name, and returns the context manager under which the hook runs.
    """

    def __init__(self, value: Value, left_behind: list[str], extra: Extra) -> None:
        self._value = value
        self._left_behind = left_behind
        self._extra = extra
        self._functions: dict[int, Any] = {}

    def tables(self, module: nn.Module) -> dict[str, Any]:
        """Return the dicts of hooks for the copy of `module`, by their attribute names in `nn.Module`."""
        kept: dict[str, Any] = {}
        names = module_tables()
        for table in names.running_hooks:
            hooks = getattr(module, table)
            copies = ((key, self._copy(hook)) for key, hook in hooks.items())
            kept[table] = OrderedDict((key, hook) for key, hook in copies if hook is not None)
        runs = {key for table in names.running_hooks for key in kept[table]}
        for table in names.hook_options:
            entries = getattr(module, table)
            kept[table] = OrderedDict((key, value) for key, value in entries.items() if key in runs)
        for table in names.backward_hooks:
            kept[table] = OrderedDict()
            for key, hook in getattr(module, table).items():
                copy = self._per_sample(hook)
                # The copy becomes a forward hook, because torch warns about backward hooks if no input needs gradients.
                if copy is not None:
                    kept[names.forward_hooks][key] = functools.partial(_when_gradient_comes, copy)
                elif not _is_quiet(hook):
                    self._left_behind.append(_name(hook))
        return kept

    def _per_sample(self, hook: Any) -> Any:
        """Return a copy of Opacus's hook that computes per-sample gradients; None for any other hook."""
        bound: Any = hook.func if isinstance(hook, functools.partial) else hook
        owner = getattr(bound, "__self__", None)
        if f"{type(owner).__module__}.{type(owner).__qualname__}" != _GRAD_SAMPLE_MODULE:
            return None
        twin: Any = MethodType(bound.__func__, self._value(owner))
        if isinstance(hook, functools.partial):
            twin = functools.partial(twin, *hook.args, **hook.keywords)
        return functools.partial(_run_per_sample, self._extra, twin, _name(hook), self._left_behind)

    def _copy(self, hook: Any) -> Any:
        if _home(hook).startswith(_COMPUTE):
            return hook
        if _is_quiet(hook):
            return None
        if _home(hook).startswith(_PER_SAMPLE_GRADIENTS):
            copy = self._per_sample(hook)
            self._left_behind += [] if copy else [_name(hook)]
            return copy
        try:
            return functools.partial(_run_or_leave_out, self._mapped(hook), _name(hook), self._left_behind)
        except HookNotCopyableError:
            self._left_behind.append(_name(hook))
            return None

    def _mapped(self, value: Any) -> Any:
        """Return the copied model's counterpart of `value`, an object that a hook of the live model uses."""
        if isinstance(value, FunctionType):
            return value if _is_library(value.__module__) else self._function(value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(self._mapped(value.__func__), self._value(value.__self__))
        if isinstance(value, functools.partial):
            arguments = map(self._mapped, value.args)
            named = {name: self._mapped(item) for name, item in value.keywords.items()}
            return functools.partial(self._mapped(value.func), *arguments, **named)
        if isinstance(value, torch.Tensor | nn.Module):
            return self._value(value)
        if type(value) in (list, tuple, set, dict, OrderedDict, defaultdict):
            for item in _contents(value):
                self._mapped(item)
            return self._value(value)
        if isinstance(value, ModuleType) and _is_library(value.__name__):
            return value
        if isinstance(value, (type, BuiltinFunctionType, *_PLAIN)):
            return value
        raise HookNotCopyableError(type(value).__name__)

    def _function(self, function: FunctionType) -> FunctionType:
        if id(function) in self._functions:
            return self._functions[id(function)]  # type: ignore[no-any-return]
        used = {name: function.__globals__[name] for name in _globals_used(function)}
        names = {"__builtins__": builtins, "__name__": function.__module__}
        cells = [CellType() for _ in function.__closure__ or ()]
        twin = FunctionType(function.__code__, names, function.__name__, None, tuple(cells))
        self._functions[id(function)] = twin  # stored first, because the function may refer to itself
        names.update({name: self._mapped(value) for name, value in used.items()})
        for cell, original in zip(cells, function.__closure__ or (), strict=True):
            cell.cell_contents = self._mapped(_content(original))
        twin.__defaults__ = None if function.__defaults__ is None else tuple(map(self._mapped, function.__defaults__))
        named = function.__kwdefaults__
        twin.__kwdefaults__ = None if named is None else {name: self._mapped(item) for name, item in named.items()}
        return twin


def left_hooks_note(left_behind: list[str]) -> str | None:
    """Return a note that names the hooks which were not run; None if there are none."""
    if not left_behind:
        return None
    names = ", ".join(dict.fromkeys(left_behind))
    text = f"{len(left_behind)} hooks of the model were left out, and what they compute is not counted: {names}"
    if any(name.startswith(_PER_SAMPLE_GRADIENTS) for name in left_behind):
        text += " (hardware_flops leaves out the per-sample gradients)"
    return text


def _run_or_leave_out(hook: Any, name: str, left_behind: list[str], *args: Any, **kwargs: Any) -> Any:
    """Run a hook. If it fails, such as by reading the value of a fake tensor, add `name` to `left_behind`."""
    try:
        return hook(*args, **kwargs)
    except Exception:
        left_behind.append(name)
        return None


def _run_per_sample(extra: Extra, hook: Any, name: str, left_behind: list[str], module: nn.Module, *args: Any) -> None:
    with extra(name):
        _run_or_leave_out(hook, name, left_behind, module, *args)


def _when_gradient_comes(hook: Any, module: nn.Module, args: Any, out: Any) -> None:
    """Run a backward hook when the gradient of the module's first output is known."""
    first = out[0] if isinstance(out, list | tuple) else out
    if isinstance(first, torch.Tensor) and first.requires_grad:
        first.register_hook(lambda gradient: hook(module, None, (gradient,)))


def _is_quiet(hook: Any) -> bool:
    return _home(hook).startswith(_WATCH_OR_MOVE)


def _home(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__) + "."


def _name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return _home(hook) + getattr(hook, "__qualname__", type(hook).__qualname__)


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _PURE_MODULES


def _contents(container: Any) -> Iterator[Any]:
    yield from container.values() if isinstance(container, dict) else container


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError as error:
        raise HookNotCopyableError("the hook uses a name that is not bound yet") from error


def _globals_used(function: FunctionType) -> set[str]:
    """Return the global names that a function and the functions inside it read."""
    names: set[str] = set()
    for instruction in _instructions(function.__code__):
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"):
            raise HookNotCopyableError(str(instruction.argval))
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(str(instruction.argval))
    if any(name in _LEAVE_TRACES for name in names):
        raise HookNotCopyableError("the hook calls a function that has side effects")
    return {name for name in names if name in function.__globals__}


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
