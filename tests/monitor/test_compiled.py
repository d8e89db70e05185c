"""Compiled trainings: rows are exact, equal to what the same step runs without the compiler, and nothing is changed."""

import json

import pytest
import torch

import flopwatch
from flopwatch.flops.tracing import live
from support.parallel_layouts import COMPILED_ALONE
from testbeds.compiled.trainings import TRAININGS, Compiler, batch_of, true_flops

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS = 12
ON_NEW_TORCH = pytest.mark.skipif(not live._compiles_beside, reason=COMPILED_ALONE)


def trained(name, folder=None, *, door="step", lengths=(16,), backend="aot_eager"):
    """The parameters after some steps, and the number of graphs that were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    running = TRAININGS[name](Compiler(backend))
    monitor = None
    if folder is not None:
        monitor = flopwatch.TrainingMonitor(
            folder, model=running.model, log_every=4, peak_flops_per_s=1e12, strict=True
        )
    for step in range(STEPS):
        ids = batch_of(step, lengths=lengths)
        if monitor is not None and door == "step":
            with monitor.step({"ids": ids}):
                running.step(ids)
        else:
            running.step(ids)
            if monitor is not None:
                monitor.log_step(step, batch={"ids": ids})
    if monitor is not None:
        monitor.close()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return [p.detach().clone() for p in running.parameters], graphs


def rows_of(folder):
    records = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return [record for record in records if record["type"] == "row"]


def flops_of(rows):
    return [flops for row in rows for flops in row["steps"]["model_flops"]]


@ON_NEW_TORCH
@pytest.mark.parametrize("door", ["step", pytest.param("log", marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", TRAININGS)
def test_every_row_is_exact_and_right(name, door, tmp_path):
    trained(name, tmp_path, door=door)
    rows = rows_of(tmp_path)

    # Products without gradients with which a step begins may be an evaluation, until three counts had them.
    late = (name, door) == ("eager_teacher", "log")
    exact = [row for row in rows if row["exact"]]  # a slow machine closes a window early
    assert exact if late else exact == rows, rows[0].get("notes")
    assert set(flops_of(exact)) == {true_flops(name, batch_of(0))}


@ON_NEW_TORCH
@pytest.mark.parametrize("name", ["whole", "dynamic", pytest.param("blocks", marks=pytest.mark.portable)])
def test_every_length_is_exact_and_right(name, tmp_path):
    lengths = (16, 9, 24, 12, 16, 30)
    trained(name, tmp_path, lengths=lengths)
    rows = rows_of(tmp_path)

    assert all(row["exact"] for row in rows), rows[0].get("notes")
    assert flops_of(rows) == [true_flops(name, batch_of(step, lengths=lengths)) for step in range(STEPS)]


@pytest.mark.parametrize("name", TRAININGS)
def test_the_training_and_its_compilations_are_the_same_without_a_monitor(name, tmp_path):
    watched, graphs = trained(name, tmp_path)
    bare, bare_graphs = trained(name)

    assert graphs == bare_graphs
    assert all(torch.equal(one, other) for one, other in zip(watched, bare, strict=True))


@ON_NEW_TORCH
def test_what_a_compiler_runs_again_is_told_apart(tmp_path):
    """Inside of a graph, the compiler decides what checkpointing computes again."""
    from testbeds.compiled import trainings

    def inside(compile_):
        model = trainings.Model()
        model.checkpoints = True
        compiled = compile_(model)
        return trainings._trained(compiled, lambda ids: trainings.loss_of(compiled(ids), ids))

    trainings.TRAININGS["inside"] = inside
    try:
        trained("inside", tmp_path)
    finally:
        del trainings.TRAININGS["inside"]
    rows = rows_of(tmp_path)

    assert flops_of(rows) == [true_flops("whole", batch_of(0))] * STEPS
    assert all("hardware_flops" not in row["steps"] for row in rows)


@pytest.mark.parametrize("name", ["whole", "loss_only", "blocks"])
def test_before_torch_2_10_the_flops_of_compiled_code_are_a_lower_bound_and_it_is_told(name, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "_compiles_beside", False)
    trained(name, tmp_path)
    rows = rows_of(tmp_path)

    assert not any(row["exact"] for row in rows)
    assert all(live.OUTSIDE in row["notes"] for row in rows)
    assert 0 < max(flops_of(rows)) <= true_flops(name, batch_of(0))
