"""What a step runs, counted op by op with torch's own formulas: the truth that logged FLOPs are held against.

Nothing of flopwatch is used here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from math import prod
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten

_SAME_AS = {
    aten.addmm_: aten.addmm,
    aten.baddbmm_: aten.baddbmm,
}
"""In-place ops that torch has no formula for cost what the others do."""


def _grouped_convolution_backward(grad_out: Any, data: Any, weight: Any, *rest: Any) -> int:
    """Each of the two gradients takes every product of the forward pass once; torch's formula forgets the groups."""
    is_transposed, output_mask = rest[4], rest[7]
    positions = data.shape[2:] if is_transposed else grad_out.shape[2:]
    one = 2 * data.shape[0] * prod(positions) * prod(weight.shape)
    return int(one * (output_mask[0] + output_mask[1]))


_MORE = {
    aten.convolution_backward: _grouped_convolution_backward,
    aten.mv: lambda matrix, vector: 2 * matrix.numel(),
    aten.addmv: lambda added, matrix, vector, **_: 2 * matrix.numel(),
    aten.dot: lambda left, right: 2 * left.numel(),
    aten.vdot: lambda left, right: 2 * left.numel(),
}
"""Products that torch's table has no formula for, or a wrong one."""


@cache
def _is_composite(func: Any) -> bool:
    """Whether torch itself would run the op as others. `silu_backward` could be taken apart, but has a kernel."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")


_recomputations: list[None] = []
"""One for each recomputation that runs."""


@contextmanager
def recomputing() -> Iterator[None]:
    """What runs in here was computed before: a part of a step that the model does not need."""
    _recomputations.append(None)
    try:
        yield
    finally:
        _recomputations.pop()


@contextmanager
def recomputation_told() -> Iterator[None]:
    """While this is open, both kinds of torch's checkpoints tell when they recompute."""
    make_frame, run_reentrant = checkpoint._CheckpointFrame.__init__, checkpoint.CheckpointFunction.forward

    def frame(self: Any, recompute: Callable[..., Any], *args: Any) -> None:
        make_frame(self, _from_call(recompute, 1), *args)

    def forward(ctx: Any, run: Callable[..., Any], *args: Any) -> Any:
        return run_reentrant(ctx, _from_call(run, 2), *args)

    with (
        mock.patch.object(checkpoint._CheckpointFrame, "__init__", frame),
        mock.patch.object(checkpoint.CheckpointFunction, "forward", staticmethod(forward)),
    ):
        yield


def _from_call(run: Callable[..., Any], first: int) -> Callable[..., Any]:
    """The function with its calls from this one on told as recomputation."""
    calls = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        with recomputing() if calls >= first else nullcontext():
            return run(*args, **kwargs)

    return called


class OpCounter(TorchDispatchMode):
    """Counts what runs while it is entered, in this thread and in the backward pass that this thread starts.

    Attributes:
        flops: The sum so far, without what optimizers compute themselves: that is neither the model's nor in MFU.
        recomputed: The part of it that checkpoints ran again.
        optimizer_depth: How many optimizers are making their step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.recomputed = 0
        self.optimizer_depth = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> "OpCounter":
        if not self._hooks:
            self._hooks = [
                register_optimizer_step_pre_hook(self._begin_optimizer),
                register_optimizer_step_post_hook(self._end_optimizer),
            ]
        return super().__enter__()

    def leave(self) -> None:
        self.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()

    def _begin_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """What an optimizer calls back is the training's: Lightning runs all of its steps in closures."""
        self.optimizer_depth += 1
        args = tuple(self._counted(value) if callable(value) and value is not optimizer else value for value in args)
        return args, {name: self._counted(value) if callable(value) else value for name, value in kwargs.items()}

    def _end_optimizer(self, *_: Any) -> None:
        self.optimizer_depth -= 1

    def _counted(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def counted_closure() -> Any:
            depth, self.optimizer_depth = self.optimizer_depth, 0
            result = closure()
            self.optimizer_depth = depth
            return result

        return counted_closure

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = getattr(func, "_overloadpacket", func)
        op = _SAME_AS.get(op, op)
        if op not in flop_registry and op not in _MORE and _is_composite(func):
            with self:  # in inference mode such ops arrive whole
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if self.optimizer_depth:
            return out
        flops = 0
        if op in _MORE:
            flops = _MORE[op](*args, **kwargs)
        elif op in flop_registry:
            flops = flop_registry[op](*args, **kwargs, out_val=out)
        self.flops += flops
        self.recomputed += flops if _recomputations else 0
        return out
