"""Counts the FLOPs of compiled code from its graphs, on fake tensors.

A graph is torch's own, so that no code of the user runs. What a backend does with it is not followed: a product that it
computes again or leaves out changes the executed FLOPs, not those of the model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from flopwatch.flops.formulas.registry import OpFlops, find_formula, tensors_in
from flopwatch.flops.tracing.counter import Tally
from flopwatch.flops.tracing.custom_functions import Values, storage_of, written
from flopwatch.flops.tracing.live import SeenRegion
from flopwatch.flops.tracing.live_mode import PassingMode, StepCount, by_scale
from flopwatch.flops.tracing.passes import no_autocast, under_autocast
from flopwatch.flops.tracing.regions import InputSpec, Region, number, spec_of
from flopwatch.flops.tracing.scaling import Axes, Product, Scale
from flopwatch.records.flops import AttentionConvention, PhaseFlops
from flopwatch.text import first_line
from flopwatch.torch_internals import apart
from flopwatch.torch_internals.ops import FakeTensorMode, OpOverload

_MOST_SIZES = 4096


@dataclass(frozen=True, slots=True)
class RegionCount:
    forward: StepCount
    forward_scales: Mapping[Scale | Product, int]
    backward: StepCount
    backward_scales: Mapping[Scale | Product, int]
    writes_weights: bool = False
    """As an optimizer does, whose products are not those of the training."""


def with_regions(
    count: StepCount, seen: Sequence[SeenRegion], attention: AttentionConvention, axes: Axes | None
) -> StepCount:
    """Add what the compiled code of a step ran to what was counted around it."""
    for each in seen:
        try:
            region = count_region(each.region, each.sizes, has_grad=each.has_grad, attention=attention)
        except Exception as error:  # noqa: BLE001 - a graph that fake tensors cannot run
            why = f"compiled code could not be counted ({type(error).__name__}: {first_line(error)})"
            return replace(count, failure=count.failure or why)
        count = _added(count, each, region, each.axes or axes)
    return count


def _added(count: StepCount, seen: SeenRegion, region: RegionCount, axes: Axes | None) -> StepCount:
    if seen.is_in_optimizer or region.writes_weights:
        return replace(count, optimizer=count.optimizer + region.forward.phases.total)
    forward = region.forward
    if seen.phase != "forward":  # it was called in a backward pass
        forward = replace(
            forward,
            phases=PhaseFlops(**{seen.phase: forward.phases.total}),
            by_dtype={name: PhaseFlops(**{seen.phase: flops.total}) for name, flops in forward.by_dtype.items()},
            by_op={name: PhaseFlops(**{seen.phase: flops.total}) for name, flops in forward.by_op.items()},
        )
    if seen.may_skip:
        forward = replace(forward, knows_executed=False)
    parts = [count, forward, *[region.backward] * seen.backwards]
    scales = [by_scale(region.backward_scales, axes)] * seen.backwards
    if seen.phase != "recompute":
        scales.append(by_scale(region.forward_scales, axes))
    return replace(
        count,
        phases=sum((part.phases for part in parts), PhaseFlops()),
        by_dtype=_sums((part.by_dtype for part in parts), PhaseFlops()),
        by_op=_sums((part.by_op for part in parts), PhaseFlops()),
        by_scale=_sums([count.by_scale, *scales], 0),
        uncounted=tuple(sorted({op for part in parts for op in part.uncounted})),
        coverage=min(part.coverage for part in parts),
        failure=next((part.failure for part in parts if part.failure), None),
        doubt=next((part.doubt for part in parts if part.doubt), None),
        knows_executed=all(part.knows_executed for part in parts),
    )


def _sums(parts: Iterable[Mapping[Any, Any]], nothing: Any) -> dict[Any, Any]:
    sums: dict[Any, Any] = {}
    for part in parts:
        for name, flops in part.items():
            sums[name] = sums.get(name, nothing) + flops
    return sums


def count_region(
    region: Region, sizes: tuple[int, ...], *, has_grad: bool, attention: AttentionConvention
) -> RegionCount:
    """FLOPs of one call with these sizes; each graph is counted once for each sizes.

    It is counted in a thread of its own: a graph that fails half-way leaves autocast or grad mode as it has set them.
    """
    key = sizes, has_grad, attention
    if key not in region.counts:
        if len(region.counts) >= _MOST_SIZES:
            region.counts.clear()
        region.counts[key] = apart(lambda: _counted(region, sizes, has_grad, attention))
    found: RegionCount = region.counts[key]
    return found


def _counted(region: Region, sizes: tuple[int, ...], has_grad: bool, attention: AttentionConvention) -> RegionCount:
    foreign = region.foreign_call()
    if foreign is not None:
        raise TypeError(f"the graph calls {foreign}, which is not torch's and is not run a second time")
    values = region.values(sizes)
    fake = FakeTensorMode(allow_non_fake_inputs=False)  # a tensor of the training raises, and is never written to
    with fake:
        inputs = [_made(spec, values) for spec in region.inputs]
    weights = [each for each, spec in zip(inputs, region.inputs, strict=True) if spec is not None and spec.is_weight]
    mode = _GraphMode(attention, weights)
    with torch.set_grad_enabled(has_grad), fake, under_autocast(region.autocast, "cpu", stand_in=False), mode:
        mode.knows_executed = not region.calls_transforms()
        out = _OnFakes(region.module, region.graph, mode).run(*inputs)
    forward, forward_scales = mode.taken()
    # A compiled backward pass computes the gradients of all results, also where the training passes none.
    wanted = [tensor for tensor in tensors_in(out) if tensor.requires_grad and tensor.grad_fn is not None]
    writes_weights = mode.writes_weights and not wanted
    if has_grad and wanted:
        with fake, torch.autograd.set_multithreading_enabled(False), no_autocast(), mode:
            torch.autograd.backward(wanted, [torch.ones_like(tensor) for tensor in wanted])
    backward, backward_scales = mode.taken()
    return RegionCount(forward, forward_scales, backward, backward_scales, writes_weights)


class _OnFakes(fx.Interpreter):
    """Runs a graph with fake tensors in place of those that it holds, such as the state of a compiled optimizer.

    A compiler leaves out products whose results are not used, so that what is executed is then not known.
    """

    def __init__(self, module: fx.GraphModule, graph: fx.Graph, mode: "_GraphMode") -> None:
        super().__init__(module, graph=graph)
        self._mode = mode
        self._unused = _unused_nodes(graph)

    def run_node(self, n: fx.Node) -> Any:
        before = self._mode.needed
        out = super().run_node(n)
        if n in self._unused and self._mode.needed != before:
            self._mode.knows_executed = False
        return out

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        if not isinstance(value, torch.Tensor):
            return value
        made: torch.Tensor = _made(spec_of(value), {})
        if isinstance(value, nn.Parameter):
            self._mode.scales.weights.put(storage_of(made), True)
        return made


def _unused_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose results neither the output nor an op that writes in place depends on."""
    unused: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        name = str(getattr(node.target, "__name__", node.target))
        is_free = node.op in ("call_function", "call_method") and not name.endswith("_") and name != "setitem"
        if is_free and all(user in unused for user in node.users):
            unused.add(node)
    return unused


def _made(spec: InputSpec | None, values: Mapping[Any, int]) -> Any:
    if spec is None:
        raise TypeError("the graph takes something else than tensors and sizes")
    if spec.kind is not None:
        raise TypeError(f"the graph takes a {spec.kind}")
    sizes = [number(size, values) for size in spec.sizes]
    if spec.dtype is None:
        return sizes[0]
    strides = [number(size, values) for size in spec.strides]
    made = torch.empty_strided(sizes, strides, dtype=spec.dtype, device=spec.device)
    made.requires_grad_(spec.needs_grad)
    # The graph may write to an activation, which torch forbids for a tensor that no op has computed.
    return made.clone() if spec.needs_grad and not spec.is_weight else made


class _GraphMode(PassingMode):
    counts_fakes = True

    def __init__(self, attention: AttentionConvention, weights: Iterable[torch.Tensor]) -> None:
        super().__init__(attention, weights)
        self.writes_weights, self.knows_executed = False, True
        self._values = Values()

    @property
    def needed(self) -> int:
        return sum(self.scales.flops.values())

    def add(self, name: str, flops: OpFlops) -> None:
        """Add the FLOPs of an op, but not of what checkpointing runs again, which the compiler decides."""
        if self.phase() == "recompute" or self._runs_again:
            self.knows_executed = False
        else:
            super().add(name, flops)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            out = func(*args, **kwargs)
            self._count_higher_order(func.name(), args, kwargs)
            return out
        if func.namespace == "prim":  # these ops only query a tensor
            return func(*args, **kwargs)
        if any(self.scales.weights.get(storage_of(each)) for each in written(func, args, kwargs)):
            self.writes_weights = True
        out = super().__torch_dispatch__(func, types, args, kwargs)
        # A compiler computes equal products of equal values only once, so that what is executed is then not known.
        if self._values.follow(func, args, kwargs, out, in_backward=False) and find_formula(func) is not None:
            self.knows_executed = False
        return out

    def taken(self) -> tuple[StepCount, dict[Scale | Product, int]]:
        count, scales = replace(self.counted(), knows_executed=self.knows_executed), self.scales.flops
        self.tally, self.scales.flops = Tally(), {}
        return count, scales
