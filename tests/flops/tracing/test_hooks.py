"""Hooks are part of what runs; on the stand-in they work on copies, and those that cannot are told of."""

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import flopwatch

X = torch.randn(8, 16)
SEEN_EVERYWHERE: list[Any] = []


def true_flops(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        model(X).sum().backward()
    model.zero_grad()
    return counter.get_total_flops()


class FeaturesByHooks(nn.Module):
    """Takes the features of a body with hooks, as dense prediction heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.heads = nn.ModuleList(nn.Linear(16, 50) for _ in range(3))
        self.seen: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.body):
            layer.register_forward_hook(lambda module, args, out, index=index: self.seen.__setitem__(index, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        total = self.body(x).sum()
        return total + sum(self.heads[index](feature).sum() for index, feature in self.seen.items())


def test_features_that_hooks_take_are_counted() -> None:
    model = FeaturesByHooks()
    truth = true_flops(model)
    seen = dict(model.seen)

    count = flopwatch.count_flops(model, X)

    assert (count.model_flops, count.notes) == (truth, ())
    assert all(model.seen[index] is feature for index, feature in seen.items())


def test_an_adapter_in_a_hook_is_counted() -> None:
    base = nn.Linear(16, 16).requires_grad_(False)
    base.adapter = nn.Linear(16, 16)
    base.register_forward_hook(lambda module, args, out: out + module.adapter(args[0]))
    model = nn.Sequential(base, nn.Linear(16, 4))

    assert flopwatch.count_flops(model, X).model_flops == true_flops(model)


def test_a_hook_may_reach_a_module_outside_of_the_model() -> None:
    outside, model = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    model[0].register_forward_hook(lambda module, args, out: outside(out))
    model[1].register_forward_pre_hook(lambda module, args, kwargs: ((outside(args[0]),), kwargs), with_kwargs=True)

    count = flopwatch.count_flops(model, X, method="trace")

    assert count.model_flops == true_flops(model)


def test_hooks_write_into_copies_only() -> None:
    held: list[Any] = []
    by_name: dict[str, list[Any]] = defaultdict(list)

    def default(module: nn.Module, args: Any, out: Any, kept: list[Any] = held) -> None:
        kept.append(out)
        by_name["out"].append(out)
        SEEN_EVERYWHERE.append(out)

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    model[0].register_forward_hook(default)

    count = flopwatch.count_flops(model, X)
    flopwatch.count_flops(model, X, method="step")

    assert (held, dict(by_name), SEEN_EVERYWHERE) == ([], {}, [])
    assert count.notes == ()


class Recorder:
    def __init__(self) -> None:
        self.calls = 0

    def hook(self, module: nn.Module, args: Any, out: Any) -> None:
        self.calls += 1


def test_a_hook_that_prints_is_left_out_and_told(capsys: Any) -> None:
    model = nn.Linear(16, 16)
    model.register_forward_hook(lambda *_: print("called"))  # noqa: T201

    count = flopwatch.count_flops(model, X)

    assert capsys.readouterr().out == ""
    assert any("left out" in note for note in count.notes)


def test_a_hook_that_needs_values_does_not_stop_the_trace() -> None:
    norms: list[float] = []
    model = nn.Linear(16, 16)
    model.register_forward_hook(lambda module, args, out: norms.append(out.norm().item()))

    count = flopwatch.count_flops(model, X)

    assert (count.method, norms) == ("trace", [])
    assert any("left out" in note for note in count.notes)


def test_backward_hooks_are_told() -> None:
    model = nn.Linear(16, 16)
    model.register_full_backward_hook(lambda module, grad_input, grad_output: None)

    assert any("left out" in note for note in flopwatch.count_flops(model, X).notes)


def test_per_sample_gradients_are_left_out_and_told() -> None:
    from opacus import GradSampleModule

    count = flopwatch.count_flops(GradSampleModule(nn.Linear(16, 4)), X)

    assert count.model_flops == flopwatch.count_flops(nn.Linear(16, 4), X).model_flops
    assert any("hardware_flops leaves out the per-sample gradients" in note for note in count.notes)
    assert not flopwatch.fit_flops_law(GradSampleModule(nn.Linear(16, 4)), X).exact


def test_ways_of_opacus_with_a_second_pass_are_told() -> None:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    private = GradSampleModuleFastGradientClipping(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))

    count = flopwatch.count_flops(private, X)

    assert any("per-sample gradients" in note and "hardware_flops" in note for note in count.notes)
