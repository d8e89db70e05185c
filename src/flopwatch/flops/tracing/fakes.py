"""Makes fake tensors (shapes without storage) and runs ops on them, even ops that torch's fake tensors cannot run.

Parameters, floating-point buffers and floating-point inputs become fake. Everything else (token ids, grids, masks,
random draws) stays real, because the model's control flow may need its values. Torch's fake mode is not entered: an op
with a fake argument runs on fake tensors, any other op really runs.
"""

from __future__ import annotations  # earlier torch releases raise an error for `OpOverload[...]`

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch

from flopwatch.errors import UntraceableError
from flopwatch.flops.formulas.registry import bind, leaves_of, map_tensors_in
from flopwatch.torch_internals.ops import (
    CTC_LOSS,
    CTC_LOSS_BACKWARD,
    GROUPED_MM,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    modes_off,
)

_CPU = torch.device("cpu")
_aten = torch.ops.aten

_INDEXED_BY_MASK = {_aten.index, _aten.index_put, _aten.index_put_}


class Faker:
    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise UntraceableError(f"torch has no fake tensors of layout {tensor.layout} (shape {tuple(tensor.shape)})")
        if tensor.is_floating_point() or tensor.is_complex():
            return self._empty(tensor.shape, tensor.dtype)
        if tensor.device.type == "meta":
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=_CPU)
        placements = getattr(tensor, "placements", ())  # of a DTensor
        if not all(placement.is_replicate() for placement in placements):  # its values would need a collective
            raise UntraceableError(f"the values of a tensor of shape {tuple(tensor.shape)} are spread over ranks")
        here: torch.Tensor = cast("Any", tensor).to_local() if placements else tensor
        return here.detach().to(_CPU, copy=True)

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        with modes_off():
            return FakeTensor(self._mode, torch.empty(shape, dtype=dtype, device="meta"), _CPU)

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op. Every device argument becomes the CPU, because nothing may run on an accelerator."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}
        has_tensors_by_name = any(isinstance(value, torch.Tensor) for value in kwargs.values())
        if isinstance(func, OpOverload) and not has_tensors_by_name and _are_fake(args):
            answer = self._answer(func, args, kwargs)
            if answer is None:  # calling the fake mode directly is faster than the tensors' own dispatch
                answer = self._mode.dispatch(func, (FakeTensor,), args, kwargs)
            return func(*args, **kwargs) if answer is NotImplemented else answer
        args, kwargs = map_tensors_in(self._localised, (args, kwargs))
        if any(isinstance(leaf, FakeTensor) for leaf in leaves_of((args, kwargs))):
            # torch would make these tensors fake too, but it would warn about those that are not leaves of the graph.
            args, kwargs = map_tensors_in(self._faked, (args, kwargs))
            answer = self._answer(func, args, kwargs)
            if answer is not None:
                return answer
        return func(*args, **kwargs)

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
        """Return the result of an op that torch's fake tensors cannot run; None for all other ops."""
        packet = func.overloadpacket if isinstance(func, OpOverload) else None
        if packet in _INDEXED_BY_MASK:
            return func(args[0], _mask_to_positions(args[1]), *args[2:], **kwargs)
        if packet not in (GROUPED_MM, _aten.bincount, CTC_LOSS, CTC_LOSS_BACKWARD):
            return None
        arguments = bind(func, args, kwargs)
        if packet is GROUPED_MM:  # torch's meta kernel accepts bf16 only
            a, b, offsets = arguments["self"], arguments["mat2"], arguments["offs"]
            groups = [] if a.dim() != b.dim() else [a.shape[0] if a.dim() == 3 else offsets.shape[0]]
            return self._empty(torch.Size([*groups, a.shape[-2], b.shape[-1]]), arguments["out_dtype"] or a.dtype)
        if packet is _aten.bincount:  # as many counts as are asked for, as if all ids in the input were smaller
            size = arguments["minlength"]
            return self._empty(torch.Size([size]), torch.int64) if size else None
        log_probs = arguments["log_probs"]
        if packet is CTC_LOSS_BACKWARD:
            return self._empty(log_probs.shape, log_probs.dtype)
        time, batch = log_probs.shape[:2]
        # The kernel puts a blank before, between and after n target tokens (Graves et al., ICML 2006): 2n + 1 states.
        states = 2 * max(int(length) for length in arguments["target_lengths"]) + 1
        shapes = torch.Size([batch]), torch.Size([batch, time, states])
        return tuple(self._empty(shape, log_probs.dtype) for shape in shapes)


def _are_fake(values: Iterable[Any]) -> bool:
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
    """Silence torch's log of ops whose shapes do not fit, because torch also raises an error, which we report."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _mask_to_positions(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace real boolean masks by the positions that they select, so that the size of the result is known."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or isinstance(index, FakeTensor) or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
        else:
            positions += index.nonzero().unbind(-1)
    return positions
