"""`flopwatch.watch` in this process: what is measured, and that nothing is left when it stops."""

import copy
import gc
import time

import pytest
import torch
from torch import nn

import flopwatch
from flopwatch.automatic.trained import MAYBE_EVALUATED

STEP_FLOPS = 2 * (2 * 4 * 8 * 8)
"""Forward pass and weight gradient of a linear layer with 4 samples; its input needs no gradient."""


@pytest.fixture
def watched(tmp_path):
    gc.collect()  # optimizers of earlier tests: with several of them, the first step is not measured
    process = flopwatch.watch(tmp_path / "run", quiet=True)
    yield process
    process.stop()


def train(model, steps, optimizer=None, micro_batches=1):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for _ in range(micro_batches):
            model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def totals(process):
    values = process.monitor.summary.values
    return values["total/steps"], values["total/model_flops"], values["total/samples"]


@pytest.mark.slow
def test_all_steps_are_measured_with_all_their_micro_batches(watched):
    train(nn.Linear(8, 8), steps=5, micro_batches=3)
    watched.stop()
    assert totals(watched) == (5, 5 * 3 * STEP_FLOPS, 5 * 3 * 4)
    assert watched.monitor.summary.exact


def evaluate(model, batches):
    model.eval()
    with torch.no_grad():
        for _ in range(batches):
            nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 8))
    model.train()


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 3, 1500])
def test_an_evaluation_before_the_first_step_is_no_part_of_it(watched, batches):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluate(model, batches)
    train(model, steps=6, optimizer=optimizer)
    watched.stop()
    assert totals(watched) == (6, 6 * STEP_FLOPS, 6 * 4)
    assert watched.monitor.summary.exact
    assert watched.monitor.summary.values["time/eval_seconds"] > 0


@pytest.mark.slow
def test_a_module_that_was_called_before_the_first_step_and_is_not_trained_may_belong_to_it(watched):
    model, teacher = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evaluate(teacher, batches=2)
    train(model, steps=6, optimizer=optimizer)
    watched.stop()
    assert watched.monitor.summary.notes == (MAYBE_EVALUATED,)


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_teacher_belongs_to_the_first_step(watched, is_frozen):
    model, teacher = nn.Linear(8, 8), nn.Linear(8, 8).eval().requires_grad_(not is_frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        batch = torch.randn(4, 8)
        with torch.no_grad():
            target = teacher(batch)
        nn.functional.mse_loss(model(batch), target).backward()
        optimizer.step()
    watched.stop()
    assert totals(watched)[:2] == (6, 6 * (STEP_FLOPS + STEP_FLOPS // 2))
    assert watched.monitor.summary.exact


@pytest.mark.slow
def test_a_bare_encoder_layer_is_one_module_whose_batches_are_known(watched):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(6):
        layer(torch.randn(4, 5, 8)).sum().backward()
        optimizer.step()
    layer.eval()
    with torch.no_grad(), torch.profiler.profile() as recorded:
        layer(torch.randn(4, 5, 8))
    watched.stop()
    assert watched.monitor.summary.values["total/samples"] == 6 * 4
    assert "several_models" not in watched.monitor.summary.notices
    names = {event.key for event in recorded.key_averages()}
    assert "aten::_transformer_encoder_layer_fwd" in names, "a hook would keep torch from using its fused kernel"


@pytest.mark.slow
def test_more_calls_than_a_step_has_are_told_and_not_measured(watched):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, steps=1, optimizer=optimizer, micro_batches=1100)
    train(model, steps=5, optimizer=optimizer)
    watched.stop()
    assert totals(watched) == (5, 5 * STEP_FLOPS, 5 * 4)
    assert "first_step" in watched.monitor.summary.notices
    assert watched.monitor.summary.exact


@pytest.mark.slow
def test_a_slow_first_step_is_neither_start_up_nor_counting(watched):
    model = nn.Linear(8, 8)
    slow = model.register_forward_hook(lambda *_: time.sleep(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, steps=1, optimizer=optimizer)
    slow.remove()
    train(model, steps=11, optimizer=optimizer)
    watched.stop()
    values = watched.monitor.summary.values
    assert values["time/compile_seconds"] > values["time/count_seconds"]
    assert values["time/train_seconds"] >= 1


@pytest.mark.slow
def test_with_several_optimizers_the_first_step_is_not_measured(watched):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    for _ in range(5):
        model(torch.randn(4, 8)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    watched.stop()
    assert totals(watched) == (4, 4 * (2 * STEP_FLOPS + STEP_FLOPS // 2), 4 * 4)


@pytest.mark.slow
def test_a_dead_optimizer_that_waits_for_the_garbage_collector_is_no_second_one(tmp_path):
    gc.disable()
    try:
        earlier = torch.optim.SGD(nn.Linear(8, 8).parameters(), lr=0.1)
        earlier.itself = earlier  # as the schedulers of torch do
        del earlier
        process = flopwatch.watch(tmp_path / "run", quiet=True)
        train(nn.Linear(8, 8), steps=5)
        process.stop()
    finally:
        gc.enable()
    assert totals(process) == (5, 5 * STEP_FLOPS, 5 * 4)


@pytest.mark.slow
def test_a_training_goes_on_unmeasured_after_stop(watched):
    model = nn.Linear(8, 8)
    hooks = copy.copy(model._forward_pre_hooks)
    train(model, steps=3)
    watched.stop()
    before = totals(watched)
    train(model, steps=3)
    assert totals(watched) == before
    assert model._forward_pre_hooks == hooks


@pytest.mark.slow
def test_a_model_and_optimizer_that_take_over_are_measured_when_the_first_are_gone(watched):
    train(nn.Linear(8, 8), steps=4)
    train(nn.Linear(8, 8), steps=6)
    watched.stop()
    assert totals(watched) == (4 + 6, (4 + 6) * STEP_FLOPS, (4 + 6) * 4)


@pytest.mark.slow
@pytest.mark.parametrize("criterion", [torch.mean, nn.L1Loss()], ids=["function", "module"])
def test_what_follows_an_evaluation_is_not_counted_as_evaluation(watched, criterion):
    """A loss that is a module stays in training mode, but is part of the evaluation all the same."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, steps=40, optimizer=optimizer)
    began = time.perf_counter()
    model.eval()
    time.sleep(0.2)
    with torch.no_grad():
        output = model(torch.randn(4, 8))
        criterion(*[output] * (2 if isinstance(criterion, nn.Module) else 1))
    model.train()
    evaluated = time.perf_counter()
    time.sleep(1.0)  # in place of saving a checkpoint
    saved = time.perf_counter()
    train(model, steps=10, optimizer=optimizer)
    watched.stop()

    values = watched.monitor.summary.values
    assert values["time/eval_seconds"] == pytest.approx(evaluated - began, abs=0.5)
    assert values["time/outside_seconds"] == pytest.approx(saved - evaluated, abs=0.5)
