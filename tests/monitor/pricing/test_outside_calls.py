"""Modules besides the watched model are seen on every step, and nobody else sees how."""

import contextlib
import copy
import json
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import flopwatch
from flopwatch.monitor.pricing.calls import OutsideCalls
from flopwatch.monitor.pricing.watched_step import products_outside


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.fixture
def outside(model):
    calls = OutsideCalls()
    calls.listen_beside(model)
    yield calls
    calls.stop()


def work(outside, run):
    outside.begin()
    run()
    return outside.end()


def global_hooks():
    return dict(torch_module._global_forward_pre_hooks)


def test_a_step_without_other_modules_is_like_the_next_one(outside, model):
    first, second = (work(outside, lambda: model(torch.randn(3, 4))) for _ in range(2))

    assert first.sized is not None
    assert first.sized == second.sized


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_teacher_makes_another_kind_of_step(outside, model, guard):
    teacher = nn.Linear(4, 2).requires_grad_(False)

    def with_teacher():
        model(torch.randn(3, 4))
        with guard():
            teacher(torch.randn(3, 4))

    alone = work(outside, lambda: model(torch.randn(3, 4)))
    together = work(outside, with_teacher)

    assert together.sized != alone.sized
    assert together.unsized != alone.unsized


def test_other_sizes_of_a_module_are_another_kind_of_the_same_pattern(outside):
    small = work(outside, lambda: nn.Linear(4, 2)(torch.randn(3, 4)))
    wider = work(outside, lambda: nn.Linear(4, 5)(torch.randn(3, 4)))
    longer = work(outside, lambda: nn.Linear(4, 2)(torch.randn(6, 4)))

    assert len({small.sized, wider.sized, longer.sized}) == 3
    assert len({small.unsized, wider.unsized, longer.unsized}) == 1


def test_the_models_own_layers_are_called_without_hooks(outside, model):
    seen = []
    model[1].forward = lambda x: seen.append(global_hooks()) or x
    before = global_hooks()

    work(outside, lambda: model(torch.randn(3, 4)))

    assert seen == [before]


def test_nothing_is_left_behind_by_a_step(outside, model):
    before = global_hooks()
    work(outside, lambda: model(torch.randn(3, 4)))

    assert global_hooks() == before
    assert not model._forward_hooks


def test_a_step_in_which_the_model_raises_is_not_seen_and_leaves_nothing(outside, model):
    def run():
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 7))

    before = global_hooks()

    assert work(outside, run).sized is None
    assert global_hooks() == before
    assert not model._forward_hooks


def test_other_threads_are_not_heard(outside, model):
    teacher = nn.Linear(4, 2)

    def run():
        model(torch.randn(3, 4))
        thread = threading.Thread(target=lambda: teacher(torch.randn(3, 4)))
        thread.start()
        thread.join()

    assert work(outside, run).sized == work(outside, lambda: model(torch.randn(3, 4))).sized


def test_layers_that_are_run_again_in_the_backward_pass_are_not_other_modules(outside):
    inner = nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)

    def run(*, checkpoint):
        if checkpoint:
            torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False).sum().backward()
        else:
            inner(x).sum().backward()

    assert work(outside, lambda: run(checkpoint=True)).sized == work(outside, lambda: run(checkpoint=False)).sized


def test_a_copy_of_the_model_made_in_a_step_brings_no_hook_along(outside, model):
    copies = []
    work(outside, lambda: (model(torch.randn(3, 4)), copies.append(copy.deepcopy(model))))

    assert not copies[0]._forward_hooks


def test_products_between_the_model_and_the_loss_are_told_apart_by_their_sizes(outside, model):
    def products(keys):
        outside.begin()
        found = model(torch.randn(3, 4))
        scores = found @ torch.randn(2, keys) if keys else found
        outside.end()
        return products_outside(scores.square().mean(), outside.take_intervals())

    assert products(0) == 0
    assert products(5) == products(5) != 0
    assert products(5) != products(6)


def test_the_walk_from_the_loss_ends_at_the_model(outside, model):
    outside.begin()
    loss = model(torch.randn(3, 4)).square().mean()
    outside.end()

    assert products_outside(loss, outside.take_intervals()) == 0
    assert products_outside(loss, [(-2, -1)]) != 0  # the model's own products, where its nodes are not known


def test_a_count_that_contradicts_rows_that_were_called_exact_is_told_with_the_steps_between(tmp_path):
    model, bank = nn.Linear(4, 2), torch.randn(2, 50)
    with flopwatch.TrainingMonitor(tmp_path, model=model, log_every=2) as monitor:
        for number in range(18):
            with monitor.step(torch.randn(3, 4)):
                found = model(torch.randn(3, 4))
                if number >= 13:  # between steps 12 and 15, which are counted as they run
                    found.detach() @ bank
                found.square().mean()
    records = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    (doubt,) = [record for record in records if record.get("code") == "rows_in_doubt"]

    assert "the FLOPs of step 15" in doubt["message"]
    assert "rows after step 12" in doubt["message"]
    assert records[-1]["exact"] is False, "the summary adds up rows that are in doubt"
    assert doubt["message"] in records[-1]["notes"]


def train(folder, function, *, joins_at, is_wrapped_late=False):
    """A compiled teacher joins a loop that is not compiled: how many graphs that makes, and what came out."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, teacher = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    options = {"backend": "eager", "fullgraph": True}
    compiled = None if is_wrapped_late else torch.compile(function(teacher), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = None if folder is None else flopwatch.TrainingMonitor(folder, model=model, log_every=2, strict=True)
    for number in range(12):
        x = torch.randn(3, 4)
        with contextlib.nullcontext() if monitor is None else monitor.step(x):
            wanted = 0.0
            if number >= joins_at:
                compiled = compiled or torch.compile(function(teacher), **options)
                with torch.no_grad():
                    wanted = compiled(x)
            (model(x) - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if monitor is not None:
        monitor.close()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.utils.counters.clear()
    torch._dynamo.reset()
    return graphs, model.weight.detach().clone()


@pytest.mark.parametrize("joins_at", [0, 7])
@pytest.mark.parametrize("function", [lambda teacher: teacher, lambda teacher: lambda x: teacher(x)])
def test_a_compiled_teacher_is_compiled_as_without_a_monitor(function, joins_at, tmp_path):
    graphs, weight = train(None, function, joins_at=joins_at)
    graphs_with, weight_with = train(tmp_path, function, joins_at=joins_at)

    assert graphs_with == graphs
    assert torch.equal(weight, weight_with)


def test_what_is_given_to_the_compiler_inside_a_step_is_compiled_once_more_at_most(tmp_path):
    graphs, weight = train(None, lambda teacher: lambda x: teacher(x), joins_at=7, is_wrapped_late=True)
    graphs_with, weight_with = train(tmp_path, lambda teacher: lambda x: teacher(x), joins_at=7, is_wrapped_late=True)

    assert graphs_with <= graphs + 1
    assert torch.equal(weight, weight_with)
