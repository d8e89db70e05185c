"""Trainings that `flopwatch.watch` once measured wrongly, disturbed or lost."""

import gc
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import flopwatch
from flopwatch.automatic import WatchedProcess
from flopwatch.records.run import Summary

STEP_FLOPS = 3 * 2 * 4 * 8 * 8 - 2 * 4 * 8 * 8
"""Forward pass and gradient of the weight of one Linear(8, 8) with 4 rows; its input needs no gradient."""


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[WatchedProcess]:
    gc.collect()  # optimizers of earlier tests: with several of them, the first step is not measured
    watched = flopwatch.watch(tmp_path / "run", quiet=True, log_every=5)
    yield watched
    watched.stop()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    for _ in range(steps):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def summary(watched: WatchedProcess) -> Summary:
    assert watched.monitor is not None
    assert watched.monitor.summary is not None
    return watched.monitor.summary


def notices(folder: Path) -> dict[str, Any]:
    records = map(json.loads, (folder / "training_log.jsonl").read_text().splitlines())
    return {record["code"]: record["message"] for record in records if record["type"] == "notice"}


@pytest.mark.slow
def test_a_training_goes_on_with_an_optimizer_that_has_replaced_the_first(watched: WatchedProcess) -> None:
    model = nn.Linear(8, 8)
    train(model, sgd(model))
    train(model, sgd(model))  # the first optimizer is deleted
    watched.stop()

    assert summary(watched).values["total/model_flops"] == 10 * STEP_FLOPS


@pytest.mark.slow
def test_the_last_steps_are_exact_although_stopping_removes_hooks(watched: WatchedProcess) -> None:
    model = nn.Linear(8, 8)
    train(model, sgd(model), steps=8)
    watched.stop()

    assert summary(watched).notes == ()
    assert summary(watched).values["total/model_flops"] == 8 * STEP_FLOPS


@pytest.mark.slow
def test_stopping_leaves_no_hook_and_the_log_as_it_was(tmp_path: Path) -> None:
    hooks_before = list(_global_optimizer_post_hooks)
    watched = flopwatch.watch(tmp_path / "run", log_every=5)
    model = nn.Linear(8, 8)
    train(model, sgd(model))
    assert list(_global_optimizer_post_hooks) != hooks_before
    watched.stop()

    assert list(_global_optimizer_post_hooks) == hooks_before
    assert not model._forward_pre_hooks
    assert logging.getLogger("flopwatch").propagate


@pytest.mark.slow
def test_a_model_saved_in_mid_run_can_be_loaded_without_flopwatch(watched: WatchedProcess) -> None:
    model = nn.Linear(8, 8)
    train(model, sgd(model))
    saved = pickle.dumps(model)

    assert b"flopwatch" not in saved
    assert pickle.loads(saved)(torch.ones(1, 8)).shape == (1, 8)


def evaluate(model: nn.Module, *, in_training_mode: bool) -> None:
    model.train(in_training_mode)
    with torch.no_grad():
        model(torch.randn(4, 8))
    model.train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before_each_step", "flops"),
    [
        (lambda model: evaluate(model, in_training_mode=False), 512),
        (lambda model: evaluate(model, in_training_mode=True), 512),
        (lambda model: model.weight @ model.weight, 1024),
        (lambda model: None, 0),
    ],
    ids=["evaluation", "no eval()", "a product outside modules", "nothing"],
)
def test_what_runs_before_every_step_belongs_to_it(
    watched: WatchedProcess, tmp_path: Path, before_each_step: Callable[[nn.Module], object], flops: int
) -> None:
    model = nn.Linear(8, 8)
    optimizer = sgd(model)
    for _ in range(30):
        before_each_step(model)
        train(model, optimizer, steps=1)
    watched.stop()
    records = map(json.loads, (tmp_path / "run" / "training_log.jsonl").read_text().splitlines())
    rows = [record for record in records if record["type"] == "row"]

    assert summary(watched).values["total/samples"] == 30 * 4, "only calls with gradients bring samples"
    assert [row["exact"] for row in rows[1:]] == [True] * (len(rows) - 1)
    assert {flops for row in rows[1:] for flops in row["steps"]["model_flops"]} == {STEP_FLOPS + flops}
