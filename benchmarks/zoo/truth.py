"""What a real eager step costs by torch's own formulas, without any part of flopwatch.

The step runs on the CPU with eager attention and eager experts, so every product is an mm, a bmm or a convolution.
torch's `FlopCounterMode` is not used as it is, for two reasons: its module tracker breaks models that call
`autograd.grad` in their forward pass, and its formula for the backward pass of grouped convolutions is wrong.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

SEED = 0
LossFn = Callable[[Any], torch.Tensor]

_aten = torch.ops.aten
_OUT_OF_PLACE: dict[Any, Any] = {_aten.addmm_: _aten.addmm, _aten.baddbmm_: _aten.baddbmm}
"""torch has formulas for the functional spellings only."""
_FUSED = _aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_WITHOUT_TORCHS_FORMULA = (_aten.convolution_backward, _aten._euclidean_dist, _FUSED, _FUSED_BACKWARD)


def _convolution_backward(args: tuple[Any, ...]) -> int:
    """Each gradient takes every product of the forward pass once: 2 x positions x weights, whatever the groups."""
    grad, x, weight = (tensor.shape for tensor in args[:3])
    transposed, (for_input, for_weight, _) = args[7], args[10]
    positions = prod((x if transposed else grad)[2:])
    return int(2 * x[0] * positions * prod(weight) * (for_input + for_weight))


def _fused_attention(query: Any, key: Any, value: Any, *, of_scores: int, of_values: int) -> int:
    """So many products of the size of scores = query x key, and of output = scores x values.

    Forward it is one each. Backward it is five in all (FlashAttention, Dao et al. 2022, algorithm 4): the scores again,
    the gradients of the query and of the key; the gradients of the values and of the weights.
    """
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    return int(2 * pairs * (of_scores * query.shape[-1] + of_values * value.shape[-1]))


def _distances(x: Any, y: Any, *, as_it_runs: bool) -> int:
    """One product for all pairs; torch runs it with the squared norms as two columns more (ATen's Distance.cpp)."""
    columns = x.shape[-1] + (2 if as_it_runs else 0)
    return int(2 * prod(x.shape[:-1]) * y.shape[-2] * columns)


def _substitution(out: Any, *, unit_diagonal: bool) -> int:
    """Solving with an n x n triangle takes n² FLOPs per column (Golub and Van Loan, 3.1), n less if it divides by 1."""
    return int(out.numel() * (out.shape[-2] - unit_diagonal))


def _vector_product(packet: Any, args: tuple[Any, ...]) -> int | None:
    """Products of a vector, for which torch has no formula: 2 x the numbers of the matrix or the vector."""
    if packet is _aten.mv or packet is _aten.dot:
        return 2 * int(args[0].numel())
    return 2 * int(args[1].numel()) if packet is _aten.addmv else None


class ProductCounter(TorchDispatchMode):
    """Adds up the FLOPs of every op that runs below it."""

    def __init__(self, *, as_it_runs: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._as_it_runs = as_it_runs
        self.by_op: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.by_op.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", None)
        packet = _OUT_OF_PLACE.get(packet, packet)
        known = packet in flop_registry or packet in _WITHOUT_TORCHS_FORMULA
        if not known and func is not torch.ops.prim.device.default:
            with self:  # composite ops are taken apart, and their parts are counted
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        self.by_op[str(packet)] += self._flops(packet, args, kwargs, out)
        return out

    def _flops(self, packet: Any, args: Any, kwargs: Any, out: Any) -> int:
        if packet is _aten.convolution_backward:
            return _convolution_backward(args)
        if packet is _FUSED:
            return _fused_attention(*args[:3], of_scores=1, of_values=1)
        if packet is _FUSED_BACKWARD:
            return _fused_attention(*args[1:4], of_scores=3, of_values=2)
        if packet is _aten._euclidean_dist:
            return _distances(*args, as_it_runs=self._as_it_runs)
        if packet is _aten.linalg_solve_triangular and kwargs.get("left", True):
            return _substitution(out, unit_diagonal=kwargs.get("unitriangular", False))
        if packet in flop_registry:
            return int(flop_registry[packet](*args, **kwargs, out_val=out))
        return _vector_product(packet, args) or 0


def step_loss(output: Any) -> torch.Tensor:
    """The loss a model returns, or the sum of the first differentiable tensor of its output."""
    loss = output.get("loss") if hasattr(output, "get") else None
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.sum()
    return _first_with_graph(output).sum()


def _first_with_graph(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            return value
        raise LookupError("a tensor without a graph")
    parts = value.values() if hasattr(value, "values") else value if isinstance(value, tuple | list) else ()
    for part in parts:
        try:
            return _first_with_graph(part)
        except LookupError:
            continue
    raise LookupError(f"no tensor with a graph in a {type(value).__name__}")


def call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """The recurrent layers of oneDNN are one op each without a formula; torch's own are made of products.

    `torch.backends.mkldnn.flags` would set tf32 as well, which warns on a CPU.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def true_flops(model: nn.Module, batch: Any, *, as_it_runs: bool = False) -> int:
    """Forward and backward, run for real.

    Attention that torch would fuse is taken apart, so that nothing is computed twice; `as_it_runs` leaves it fused.
    """
    torch.manual_seed(SEED)
    attention = nullcontext() if as_it_runs else sdpa_kernel(SDPBackend.MATH)
    with _without_onednn(), attention, ProductCounter(as_it_runs=as_it_runs) as counter:
        step_loss(call(model, batch)).backward()
    model.zero_grad()
    return int(counter.total)
