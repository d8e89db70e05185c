"""Finds out whether anything but shapes decides a model's FLOPs: values in the batch, activations, random draws.

During a count, every real tensor carries its origins: the names of what it was computed from (arguments of the batch,
random draws, weights). If such a tensor becomes a Python number, a Python decision or a size (`item`, `nonzero`, a mask
used as an index), its origins are recorded. If a random draw is among them, the count is right for that draw only. If a
size depends on values, the count is right for that batch only.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flopwatch.flops.batch_contents import tensors_of
from flopwatch.flops.formulas.registry import find_formula
from flopwatch.flops.tree import tensors_in
from flopwatch.records.flops import FlopCount
from flopwatch.torch_internals.ops import FakeTensor, OpOverload, op_name, op_packet

Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

CHANCE = "a random draw"
WEIGHTS = "activations"
ONE_DRAW = "a random draw decides what the model computes, so another draw may cost other FLOPs than this count says"
# Attributes set on a tensor during a count: what its values were computed from, and what its size was computed from.
_ORIGIN = "_flopwatch_origin"
_SIZED = "_flopwatch_sized_by"
# These libraries read tensor values only for checks, positions and logging, which do not change the FLOPs.
_LIBRARIES = ("transformers", "diffusers", "timm", "torchvision", "peft", "accelerate", "trl", "opacus", "lightning")
_NOTHING: frozenset[str] = frozenset()
_UNIFORM = "_flopwatch_is_uniform"
_aten = torch.ops.aten
_UNIFORM_DRAWS = {_aten.rand, _aten.rand_like, _aten.uniform, _aten.uniform_}
_COMPARISONS = {_aten.lt, _aten.le, _aten.gt, _aten.ge}
# Ops whose output size depends on values, although they lack torch's tag for such ops.
_SIZES_BY_VALUE = {"aten::_pack_padded_sequence", "aten::_pad_packed_sequence", "aten::repeat_interleave"}
# Ops that run more or fewer matrix products, depending on their input's values.
_PRODUCTS_BY_VALUE = {"aten::linalg_matrix_exp"}
# Methods that return values to Python without an op, so a dispatch mode does not see these reads.
_PYTHON_READS = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
}


class Steering:
    """Records which origins (arguments of the batch, `CHANCE`, `WEIGHTS`) decide a model's sizes and control flow.

    Attributes:
        sizes: Origins of sizes of matrix products, and of values that the model's own code reads and may branch on.
        reads: Origins of values that libraries read, and of sizes that no matrix product has used so far.
    """

    def __init__(self) -> None:
        self.sizes: set[str] = set()
        self.reads: set[str] = set()

    def _note_read(self, origin: frozenset[str]) -> None:
        if origin:
            (self.reads if _is_library_reading() else self.sizes).update(origin)

    def name(self, batch: Any, weights: Iterable[torch.Tensor] = ()) -> None:
        """Record on each real tensor of a batch its argument's name, as the origin of its values; on weights too."""
        for tensor in weights:
            _set_origin(tensor, frozenset({WEIGHTS}))
        for path, tensor in tensors_of(batch).items():
            if not isinstance(tensor, FakeTensor):
                _set_origin(tensor, frozenset({path.partition(".")[0]}))

    def _follow_sizes(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """If input sizes depend on values, mark the results too; if the op is a matrix product, update `sizes`."""
        if op_packet(func) is _aten.index:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            origin = _origins(masks) | _sized([i for i in args[1] if i is not None])
            if origin:
                self.reads |= origin
                _set_sized(out, origin)
                return
        origin = _sized(args)
        if not origin:
            return
        if find_formula(func) is not None:
            self.sizes |= origin
        plain = [tuple(value.shape) for value in args if isinstance(value, torch.Tensor) and not _sized(value)]
        for leaf in out if isinstance(out, list | tuple) else (out,):
            # The shapes in `plain` do not depend on values, so a result with one of these shapes is not marked.
            if isinstance(leaf, torch.Tensor) and tuple(leaf.shape) not in plain:
                _set_sized(leaf, origin)

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record what the results of an op were computed from: arguments of the batch, random draws or weights."""
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
        if op_name(func) in _PRODUCTS_BY_VALUE:
            self.sizes |= origin
        if torch.Tag.data_dependent_output in tags or op_name(func) == "aten::_local_scalar_dense":
            self._note_read(origin)
        elif op_packet(func) is _aten.index:
            pass  # only a mask used as an index makes the size depend on values, and `_follow_sizes` handles that
        elif torch.Tag.dynamic_output_shape in tags or op_name(func) in _SIZES_BY_VALUE:
            _set_sized(out, origin)
            self.reads |= origin
        for leaf in out if isinstance(out, list | tuple) else (out,):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                _set_origin(leaf, origin)
                if op_packet(func) in _UNIFORM_DRAWS:
                    setattr(leaf, _UNIFORM, True)


def _is_library_reading() -> bool:
    """Return whether the code that reads a value belongs to one of `_LIBRARIES`, and not to the model itself."""
    # 3 skips this function, `_note_read`, and the method that called it.
    frame = sys._getframe(3)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "flopwatch"):
            return package in _LIBRARIES
        frame = frame.f_back  # type: ignore[assignment]
    return True


def _set_sized(out: Any, origin: frozenset[str]) -> None:
    """Record on each tensor in `out`, real or fake, what its size was computed from (`origin`)."""
    for leaf in out if isinstance(out, list | tuple) else (out,):
        if isinstance(leaf, torch.Tensor):
            setattr(leaf, _SIZED, getattr(leaf, _SIZED, _NOTHING) | origin)


def _is_certain(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an op compares a uniform draw with 0 or 1, so that every draw gives the same result."""
    if op_packet(func) not in _COMPARISONS or not getattr(args[0], _UNIFORM, False):
        return False
    bound = args[1]
    if isinstance(bound, torch.Tensor):
        if bound.numel() != 1 or isinstance(bound, FakeTensor):
            return False
        bound = float(bound)
    return bool(bound <= 0 or bound >= 1)


def following(execute: Execute, steering: Steering) -> Execute:
    """Return a function that runs an op with `execute` and records it in `steering`."""

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
            self._steering._note_read(_origins(args))
        if func is torch.Tensor.data_ptr and type(args[0]) is FakeTensor:
            return 0  # as torch returns, which also shows the user a warning
        return func(*args, **(kwargs or {}))


def with_steering(count: FlopCount, steering: Steering) -> FlopCount:
    """Return `count` with the origins recorded in `steering`, and a note if an origin is a random draw."""
    by_chance = CHANCE in steering.sizes | steering.reads
    notes = (*count.notes, ONE_DRAW) if by_chance else count.notes
    return replace(
        count,
        notes=notes,
        steered_by=tuple(sorted(steering.sizes)),
        values_read=tuple(sorted(steering.reads)),
    )


@contextmanager
def python_draws(steering: Steering) -> Iterator[None]:
    """Record a random draw if the block uses Python's or numpy's global generator, as models do to drop layers."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), _numpy_state(numpy)
    try:
        yield
    finally:
        if (random.getstate(), _numpy_state(numpy)) != before:
            steering.sizes.add(CHANCE)


def _numpy_state(numpy: Any) -> Any:
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), tuple(rest)


def _gathered(values: Any, name: str) -> frozenset[str]:
    return _NOTHING.union(*(getattr(tensor, name, _NOTHING) for tensor in tensors_in(values)))


_origins = partial(_gathered, name=_ORIGIN)
_sized = partial(_gathered, name=_SIZED)


def _set_origin(tensor: torch.Tensor, origin: frozenset[str]) -> None:
    setattr(tensor, _ORIGIN, getattr(tensor, _ORIGIN, _NOTHING) | origin)
