"""Finds out whether anything but shapes decides a model's FLOPs: values in the batch, activations, random draws.

During a count, every real tensor carries its origins: the names of what it was computed from (arguments of the batch,
random draws, weights). If such a tensor becomes a Python number, a Python decision or a size (`item`, `nonzero`, a mask
used as an index), its origins are recorded. If a random draw is among them, the count is right for that draw only. If a
size depends on values, the count is right for that batch only.
"""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flopwatch.flops.batch_contents import tensors_of
from flopwatch.flops.formulas.registry import find_formula, tensors_in
from flopwatch.flops.tracing.counter import Execute
from flopwatch.records.flops import FlopCount
from flopwatch.torch_internals.autograd import frames_from
from flopwatch.torch_internals.ops import FakeTensor, OpOverload, op_name

CHANCE = "a random draw"
WEIGHTS = "activations"
ONE_DRAW = "a random draw decides what the model computes, so another draw may cost other FLOPs than this count says"
# Attributes set on a tensor during a count: what its values were computed from, and what its size was computed from.
_ORIGIN = "_flopwatch_origin"
_SIZED = "_flopwatch_sized_by"
_LIBRARIES = ("transformers", "diffusers", "timm", "torchvision", "peft", "accelerate", "trl", "opacus", "lightning")
_NOTHING: frozenset[str] = frozenset()
_UNIFORM = "_flopwatch_is_uniform"
_aten = torch.ops.aten
_UNIFORM_DRAWS = {_aten.rand, _aten.rand_like, _aten.uniform, _aten.uniform_}
_COMPARISONS = {_aten.lt, _aten.le, _aten.gt, _aten.ge}
# Ops whose output size depends on values, although they lack torch's tag for such ops.
_SIZES_BY_VALUE = {"aten::_pack_padded_sequence", "aten::_pad_packed_sequence", "aten::repeat_interleave"}
# Methods that return values to Python without an op, so a dispatch mode does not see these reads.
_PYTHON_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class Steering:
    """Records which origins (arguments of the batch, `CHANCE`, `WEIGHTS`) decide a model's sizes and control flow.

    Attributes:
        sizes: Origins of sizes of matrix products, and of values that the model's own code reads and may branch on.
        reads: Origins of values that libraries read, and of sizes that no matrix product has used so far.
    """

    def __init__(self) -> None:
        self.sizes: set[str] = set()
        self.reads: set[str] = set()

    def note_read(self, origin: frozenset[str]) -> None:
        """A library's own code reads values for checks, positions and logging only; the model's may branch on them."""
        if origin:
            names = (str(frame.f_globals.get("__name__", "")) for frame in frames_from(sys._getframe(1)))
            packages = (name.partition(".")[0] for name in names)
            package = next((package for package in packages if package not in ("torch", "flopwatch")), None)
            (self.reads if package is None or package in _LIBRARIES else self.sizes).update(origin)

    def add_to(self, count: FlopCount) -> FlopCount:
        notes = (*count.notes, ONE_DRAW) if CHANCE in self.sizes | self.reads else count.notes
        return replace(count, notes=notes, steered_by=tuple(sorted(self.sizes)), values_read=tuple(sorted(self.reads)))

    def name(self, batch: Any, weights: Iterable[torch.Tensor] = ()) -> None:
        """Record on each real tensor of a batch its argument's name, as the origin of its values; on weights too."""
        for tensor in weights:
            _mark(tensor, _ORIGIN, frozenset({WEIGHTS}))
        for path, tensor in tensors_of(batch).items():
            if not isinstance(tensor, FakeTensor):
                _mark(tensor, _ORIGIN, frozenset({path.partition(".")[0]}))

    def _follow_sizes(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """If input sizes depend on values, mark the results too; if the op is a matrix product, update `sizes`."""
        if func.overloadpacket is _aten.index:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            origin = _origins(masks) | _sized([i for i in args[1] if i is not None])
            if origin:
                self.reads |= origin
                _mark(out, _SIZED, origin)
                return
        origin = _sized(args)
        if not origin:
            return
        if find_formula(func) is not None:
            self.sizes |= origin
        plain = [tuple(value.shape) for value in args if isinstance(value, torch.Tensor) and not _sized(value)]
        # The shapes in `plain` do not depend on values, so a result with one of these shapes is not marked.
        _mark([leaf for leaf in tensors_in(out) if tuple(leaf.shape) not in plain], _SIZED, origin)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        origin = _origins(args) | _origins(kwargs)
        tags = func.tags
        self._follow_sizes(func, args, out)
        if torch.Tag.nondeterministic_seeded in tags:
            origin = origin | {CHANCE}
        if not origin:
            return
        # A comparison that gives the same result for every random draw does not depend on chance.
        if _is_certain(func, args):
            origin = origin - {CHANCE}
        if torch.Tag.data_dependent_output in tags or op_name(func) == "aten::_local_scalar_dense":
            self.note_read(origin)
        elif func.overloadpacket is _aten.index:
            pass  # only a mask used as an index makes the size depend on values, and `_follow_sizes` handles that
        elif torch.Tag.dynamic_output_shape in tags or op_name(func) in _SIZES_BY_VALUE:
            _mark(out, _SIZED, origin)
            self.reads |= origin
        real = [leaf for leaf in tensors_in(out) if not isinstance(leaf, FakeTensor)]
        _mark(real, _ORIGIN, origin)
        for leaf in real if func.overloadpacket in _UNIFORM_DRAWS else ():
            setattr(leaf, _UNIFORM, True)


def _mark(values: Any, name: str, origin: frozenset[str]) -> None:
    for tensor in tensors_in(values):
        setattr(tensor, name, getattr(tensor, name, _NOTHING) | origin)


def _is_certain(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an op compares a uniform draw with 0 or 1, so that every draw gives the same result."""
    if func.overloadpacket not in _COMPARISONS or not getattr(args[0], _UNIFORM, False):
        return False
    bound = args[1]
    if isinstance(bound, torch.Tensor):
        if bound.numel() != 1 or isinstance(bound, FakeTensor):
            return False
        bound = float(bound)
    return bool(bound <= 0 or bound >= 1)


def following(execute: Execute, steering: Steering) -> Execute:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = execute(func, args, kwargs)
        if isinstance(func, OpOverload):
            steering.follow(func, args, kwargs, out)
        return out

    return run


class PythonReads(TorchFunctionMode):
    """Records values that Python code reads from a tensor without an op, such as with `tolist`."""

    def __init__(self, steering: Steering) -> None:
        self._steering = steering

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _PYTHON_READS:
            self._steering.note_read(_origins(args))
        if func is torch.Tensor.data_ptr and type(args[0]) is FakeTensor:
            return 0  # as torch returns, which also shows the user a warning
        return func(*args, **(kwargs or {}))


@contextmanager
def python_draws(steering: Steering) -> Iterator[None]:
    """Record a random draw if the block uses Python's or numpy's global generator, as models do to drop layers."""
    numpy: Any = sys.modules.get("numpy")

    def state() -> Any:
        name, keys, *rest = (None, b"") if numpy is None else numpy.random.get_state()
        return random.getstate(), name, bytes(keys), rest

    before = state()
    try:
        yield
    finally:
        if state() != before:
            steering.sizes.add(CHANCE)


def _gathered(values: Any, name: str) -> frozenset[str]:
    return _NOTHING.union(*(getattr(tensor, name, _NOTHING) for tensor in tensors_in(values)))


_origins = partial(_gathered, name=_ORIGIN)
_sized = partial(_gathered, name=_SIZED)
