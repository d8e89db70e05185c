"""Model FLOPs against an independent truth: the same model run eagerly, for real, under torch's own counter."""

import copy
import gc
import random
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import flopwatch
from support.quick import VARIED, for_each
from testbeds.architectures import BY_NAME, SEED, Architecture, true_flops

each_architecture = for_each()
each_kind = for_each(in_ci=VARIED)


@pytest.mark.portable
@pytest.mark.requirement("R2")
@each_architecture
def test_a_count_equals_the_truth_to_the_flop(
    architecture: Architecture, record_property: Callable[[str, object], None]
) -> None:
    if absence := architecture.absence():
        pytest.skip(absence)
    batch = architecture.batch(2, 32)
    truth = true_flops(architecture.build(eager=True), batch)
    torch.manual_seed(SEED)  # layer drop tosses coins; both toss the same

    count = flopwatch.count_flops(architecture.build(), batch)

    record_property("architecture", architecture.name)
    record_property("method", count.method)
    assert count.model_flops == truth
    assert count.method in ("trace", "step")
    assert count.coverage == 1.0
    assert count.uncounted == ()


@pytest.mark.slow
@each_kind
def test_a_trace_counts_it_and_its_parts_add_up(architecture: Architecture) -> None:
    if reason := architecture.untraceable():
        pytest.skip(reason)
    count = flopwatch.count_flops(architecture.build(), architecture.batch(2, 32))

    assert count.method == "trace"
    assert count.model_flops == count.forward_flops + count.backward_flops
    assert count.hardware_flops == count.model_flops + count.recompute_flops
    assert sum(part.total for part in count.by_op.values()) == count.hardware_flops
    assert sum(part.total for part in count.by_module.values()) == count.hardware_flops


@pytest.mark.slow
@each_kind
def test_counting_leaves_no_trace(architecture: Architecture) -> None:
    batch = architecture.batch(2, 32)
    model = architecture.build()

    for module in list(model.modules())[::3]:
        module.training = False
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    fired: list[str] = []
    handles = [module.register_forward_hook(lambda *_: fired.append("forward")) for module in model.modules()]
    handles += [module.register_forward_pre_hook(lambda *_: fired.append("pre")) for module in model.modules()]
    handles += [
        parameter.register_hook(lambda grad: fired.append("grad"))  # type: ignore[func-returns-value]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    before, batch_before = _everything(model), copy.deepcopy(batch)

    if not architecture.untraceable():
        flopwatch.count_flops(model, batch, method="trace")
    flopwatch.count_flops(model, batch, method="step")

    assert fired == []
    _assert_same(before, _everything(model))
    _assert_same(batch_before, batch)


def _everything(model: torch.nn.Module) -> dict[str, object]:
    """All state a training could see change, by value or by identity."""
    functional = torch.nn.functional
    return {
        "parameters": {name: value.detach().clone() for name, value in model.named_parameters()},
        "buffers": {name: value.clone() for name, value in model.named_buffers()},
        "gradients": {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None},
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "training": [module.training for module in model.modules()],
        "identities": [id(item) for group in (model.modules(), model.parameters(), model.buffers()) for item in group],
        "hooks": [
            (list(module._forward_hooks), list(module._forward_pre_hooks), list(module._backward_hooks))
            for module in model.modules()
        ],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "torch_random": torch.get_rng_state(),
        "python_random": random.getstate(),
        "numpy_random": repr(np.random.get_state()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "grad_mode": torch.is_grad_enabled(),
        "functions": [id(item) for item in (*vars(functional).values(), *vars(torch.Tensor).values(), torch.mm)],
        "global_hooks": [len(table) for table in _global_hook_tables()],
    }


def _global_hook_tables() -> Iterator[dict[int, object]]:
    for name, value in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and isinstance(value, dict):
            yield value


def _assert_same(before: object, after: object) -> None:
    if isinstance(before, torch.Tensor):
        assert isinstance(after, torch.Tensor)
        assert torch.equal(before, after)
    elif isinstance(before, dict):
        assert isinstance(after, dict)
        assert list(before) == list(after)
        for name, value in before.items():
            _assert_same(value, after[name])
    else:
        assert before == after


def test_hooks_for_all_modules_do_not_fire_and_stay() -> None:
    fired: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: fired.append("global"))
    try:
        flopwatch.count_flops(torch.nn.Linear(4, 4), torch.randn(2, 4))
        assert fired == []
        torch.nn.Linear(4, 4)(torch.randn(2, 4))
        assert fired == ["global"]
    finally:
        handle.remove()


def test_the_users_own_modes_do_not_see_the_count() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as theirs:
        flopwatch.count_flops(torch.nn.Linear(4, 4), torch.randn(2, 4))

    assert theirs.get_total_flops() == 0


@pytest.mark.slow
def test_the_autocast_cache_holds_nothing_of_ours() -> None:
    def fakes() -> set[int]:
        gc.collect()
        return {id(item) for item in gc.get_objects() if type(item) is FakeTensor}

    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = fakes()  # of other tests in this process, whose models may still be there
        flopwatch.count_flops(layer, x)
        after = fakes()

    assert after <= before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "clip"])
def test_hooks_a_library_computes_with_are_kept(name: str) -> None:
    """transformers installs hooks at the first forward pass that hand on hidden states."""
    architecture = BY_NAME[name]
    batch = architecture.batch(2, 32)
    fresh = flopwatch.count_flops(architecture.build(), batch).model_flops
    model = architecture.build()
    model(**batch)

    count = flopwatch.count_flops(model, batch)

    assert (count.model_flops, count.method) == (fresh, "trace")


def test_weight_norm_by_hooks_is_kept() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this form deprecated; models use it all the same
        layer = torch.nn.utils.weight_norm(torch.nn.Linear(8, 8))

    count = flopwatch.count_flops(layer, torch.randn(4, 8))

    # The norm's own parameters are trained, the weight made of them is not a parameter: both need its gradient.
    assert (count.model_flops, count.method) == (2 * 2 * 4 * 8 * 8, "trace")
