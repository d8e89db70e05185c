"""Fake tensors for counting: shapes without storage, on the CPU, and answers where torch has none.

Parameters, floating buffers and floating inputs become fake; everything else stays real (token ids, grids, masks,
coins), so the values that steer a model's control flow exist. The fake mode itself is not entered: an op that meets a
fake tensor is faked by the tensor, any other op runs for real.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_any, tree_map_only

from flopwatch.errors import UntraceableError
from flopwatch.flops.formulas import bind
from flopwatch.flops.quick_fakes import _CPU, _aten, quick_answer, quick_loss

_INDEXED_BY_MASK = {_aten.index, _aten.index_put, _aten.index_put_}

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class Faker:
    """Makes fake tensors of one mode and runs ops on them."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake of a floating tensor; a CPU copy of any other, so that in-place ops do not reach the original."""
        if tensor.layout is not torch.strided:
            raise UntraceableError(f"a tensor of shape {tuple(tensor.shape)} is {tensor.layout}, which has no fake")
        if tensor.is_floating_point() or tensor.is_complex():
            return self._empty(tensor.shape, tensor.dtype)
        if tensor.device.type == "meta":
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=_CPU)
        return _values_here(tensor).detach().to(_CPU, copy=True)

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        with no_dispatch():
            return FakeTensor(self._mode, torch.empty(shape, dtype=dtype, device="meta"), _CPU)

    def like(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor laid out like this."""
        with no_dispatch():
            return FakeTensor(self._mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), _CPU)

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op. Every device becomes the CPU: nothing may reach an accelerator."""
        if (
            _are_fake(args)
            and not any(isinstance(value, torch.Tensor) for value in kwargs.values())
            and isinstance(func, OpOverload)
        ):
            return self._run_on_fakes(func, args, kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._localised, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}
        if tree_any(lambda value: isinstance(value, FakeTensor), (args, kwargs)):
            # torch would make them fake too, and warn where one has a gradient that is not its own.
            args, kwargs = tree_map_only(torch.Tensor, self._faked, (args, kwargs))
            answer = self._answer(func, args, kwargs)
            if answer is not None:
                return answer
        return func(*args, **kwargs)

    def _run_on_fakes(self, func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The short way for most ops: to the fake mode at once, where the tensors would send the op after a detour."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}
        answer: Any = quick_answer(self._mode, func, args, kwargs)
        if answer is None:
            answer = self._answer(func, args, kwargs)
        if answer is None:
            answer = self._mode.dispatch(func, (FakeTensor,), args, kwargs)
        return func(*args, **kwargs) if answer is NotImplemented else answer

    def _localised(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if isinstance(tensor, torch.nn.Parameter):
            raise UntraceableError(
                f"the model uses a parameter of shape {tuple(tensor.shape)} that is not among its parameters()"
            )
        return tensor if tensor.device == _CPU else self.tensor(tensor)

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        is_real = not isinstance(tensor, FakeTensor) and (tensor.is_floating_point() or tensor.is_complex())
        return self.tensor(tensor) if is_real else tensor

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Shapes of ops that fake tensors cannot do, None for all others."""
        packet = getattr(func, "_overloadpacket", None)
        if packet in _INDEXED_BY_MASK:
            return func(args[0], _mask_to_positions(args[1]), *args[2:], **kwargs)
        if packet is _aten._grouped_mm:
            return self._grouped_mm(bind(func, args, kwargs))
        if packet is _aten.bincount:
            return self._bincount(bind(func, args, kwargs))
        if packet is _aten._ctc_loss:
            return self._ctc_loss(bind(func, args, kwargs))
        if packet is _aten._ctc_loss_backward:
            log_probs = bind(func, args, kwargs)["log_probs"]
            return self._empty(log_probs.shape, log_probs.dtype)
        return None if kwargs else quick_loss(self._mode, func, args)

    def _grouped_mm(self, arguments: dict[str, Any]) -> torch.Tensor:
        """Torch's own shape function accepts bf16 only."""
        a, b, offsets = arguments["self"], arguments["mat2"], arguments["offs"]
        groups = [] if a.dim() != b.dim() else [a.shape[0] if a.dim() == 3 else offsets.shape[0]]
        shape = torch.Size([*groups, a.shape[-2], b.shape[-1]])
        return self._empty(shape, arguments["out_dtype"] or a.dtype)

    def _bincount(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Expert loads: ids below `minlength`, so that is the size. Without it nobody knows."""
        size = arguments["minlength"]
        return self._empty(torch.Size([size]), torch.int64) if size else None

    def _ctc_loss(self, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = arguments["log_probs"]
        time, batch = log_probs.shape[:2]
        longest = max(int(length) for length in arguments["target_lengths"])
        losses = self._empty(torch.Size([batch]), log_probs.dtype)
        return losses, self._empty(torch.Size([batch, time, 2 * longest + 1]), log_probs.dtype)


def _are_fake(values: Iterable[Any]) -> bool:
    """Whether there is a fake tensor among an op's arguments, and no real one."""
    found = False
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            found = True
        elif isinstance(value, torch.Tensor | Mapping):
            return False
        elif kind in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
            if not _are_fake(value):
                return False
            found = True
    return found


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging a page about an op whose shapes do not fit, before it raises what we report anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _values_here(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a DTensor that every rank has whole; to gather them from others would be a collective."""
    placements = getattr(tensor, "placements", ())
    if not all(placement.is_replicate() for placement in placements):
        raise UntraceableError(f"the values of a tensor of shape {tuple(tensor.shape)} are spread over ranks")
    return cast("Any", tensor).to_local() if placements else tensor


def _mask_to_positions(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Write boolean masks out as the positions they select: a mask we know the values of has a known size."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or isinstance(index, FakeTensor) or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
        else:
            positions += index.nonzero().unbind(-1)
    return positions
