"""Copies the hooks of a live model to its stand-in, the copy that is counted.

A hook that prints, opens files or fails, such as by reading the value of a fake tensor, is left out, and a note says
so. Hooks that only move data or observe are left out without a note.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from flopwatch.flops.tracing.outside import names_in
from flopwatch.torch_internals.modules import module_tables

Value = Callable[[Any], Any]
Extra = Callable[[str], AbstractContextManager[None]]

# Hooks of these libraries only use the module that they get (old-style weight norm, captured hidden states), so they
# run without being copied.
_COMPUTE = ("torch.nn.utils.", "transformers.")
# Hooks of these libraries shard, move, time or count a model. The traced copy of the model does not get them.
WATCH_OR_MOVE = (
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
_LEAVE_TRACES = {"print", "open", "input", "exec", "eval", "globals", "breakpoint", "__import__"}


class HookCopies:
    """Copies the hooks of one live model to its stand-in; `left_behind` gets the names of those that are left out.

    `value` returns the stand-in's version of an object of the live model, and `extra` the context in which a hook runs.
    """

    def __init__(self, value: Value, left_behind: list[str], extra: Extra) -> None:
        self._value = value
        self._left_behind = left_behind
        self._extra = extra

    def fill(self, module: nn.Module, twin: nn.Module) -> None:
        """Fill the empty tables of hooks of `twin`, the copy of `module`."""
        kept, names = vars(twin), module_tables()
        for table in names.running_hooks:
            copies = ((key, self._copy(hook)) for key, hook in getattr(module, table).items())
            kept[table].update((key, hook) for key, hook in copies if hook is not None)
        runs = {key for table in names.running_hooks for key in kept[table]}
        for table in names.hook_options:
            kept[table].update((key, value) for key, value in getattr(module, table).items() if key in runs)
        for table in names.backward_hooks:
            for key, hook in getattr(module, table).items():
                copy = self._per_sample(hook)
                # The copy becomes a forward hook, because torch warns about backward hooks if no input needs gradients.
                if copy is not None:
                    kept[names.running_hooks[1]][key] = functools.partial(_when_gradient_comes, copy)
                elif not _is_quiet(hook):
                    self._left_behind.append(_name(hook))

    def _per_sample(self, hook: Any) -> Any:
        """Return a copy of Opacus's hook that computes per-sample gradients; None for any other hook."""
        bound: Any = hook.func if isinstance(hook, functools.partial) else hook
        owner = getattr(bound, "__self__", None)
        if f"{type(owner).__module__}.{type(owner).__qualname__}" != _GRAD_SAMPLE_MODULE:
            return None
        return functools.partial(_run_per_sample, self._extra, self._value(hook), _name(hook), self._left_behind)

    def _copy(self, hook: Any) -> Any:
        if _home(hook).startswith(_COMPUTE):
            return hook
        if _is_quiet(hook):
            return None
        if _home(hook).startswith(_PER_SAMPLE_GRADIENTS):
            copy = self._per_sample(hook)
            self._left_behind += [] if copy else [_name(hook)]
            return copy
        if _leaves_traces(hook):
            self._left_behind.append(_name(hook))
            return None
        return functools.partial(_run_or_leave_out, self._value(hook), _name(hook), self._left_behind)


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
    return _home(hook).startswith(WATCH_OR_MOVE)


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


def _leaves_traces(hook: Any) -> bool:
    """Return whether the code of a hook names a function whose effects outlive the call."""
    code = getattr(_function(hook), "__code__", None)
    return code is not None and not _LEAVE_TRACES.isdisjoint(names_in(code)[0])
