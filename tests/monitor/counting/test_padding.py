"""A padded batch may run another attention kernel than the same batch without padding, as in transformers 4."""

import gc
import json
import random

import pytest
import torch
from torch import nn

import flopwatch
from flopwatch.flops.tracing import live
from support.parallel_layouts import COMPILED_ALONE
from testbeds.architectures import BY_NAME, causal_batch, true_flops

pytestmark = pytest.mark.slow


def by_padding(module, query, key, value, attention_mask, scaling, **_):
    """Attends by products; with a mask by fused attention, whose backward pass computes the scores again."""
    key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    if attention_mask is None:
        output = (query @ key.transpose(-1, -2) * scaling).softmax(-1) @ value
    else:
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return output.transpose(1, 2), None


@pytest.fixture(scope="module")
def model():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("by_padding", by_padding)
    AttentionMaskInterface.register("by_padding", sdpa_mask)
    built = BY_NAME["llama"].build()
    built.set_attn_implementation("by_padding")
    return built


def padded(lengths):
    batch = causal_batch(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        batch["attention_mask"][row, length:] = 0
        batch["labels"][row, length:] = -100
    return batch


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """The steps' lengths and the log's rows: two widths in turns, every fourth step without padding."""
    folder = tmp_path_factory.mktemp("run")
    widths = [20 + 9 * (number // 4 % 2) for number in range(48)]
    lengths = [[width, width if number % 4 == 3 else 7, width] for number, width in enumerate(widths)]
    config = {"log_every": 1, "recalibration_frequency": 5}
    with flopwatch.TrainingMonitor(folder, model=model, config=config, strict=True) as monitor:
        for step in lengths:
            batch = padded(step)
            with monitor.step(batch):
                model(**batch).loss.backward()
    records = map(json.loads, (folder / "training_log.jsonl").read_text().splitlines())
    return lengths, [record for record in records if "steps" in record], monitor.summary


def test_model_flops_are_those_of_each_row_alone(run):
    lengths, rows, _ = run
    eager = BY_NAME["llama"].build(eager=True)
    truth = [sum(true_flops(eager, causal_batch(1, length)) for length in step) for step in lengths]

    exact = [(row["steps"]["model_flops"], [flops]) for row, flops in zip(rows, truth, strict=True) if row["exact"]]
    assert [logged for logged, _ in exact] == [flops for _, flops in exact]


def test_what_the_kernel_recomputes_is_exact_only_where_it_is_right(run):
    lengths, rows, _ = run
    layers, rows_of_batch, hidden_size = 2, 3, 64
    for step, row in zip(lengths, rows, strict=True):
        scores = layers * rows_of_batch * 2 * step[0] ** 2 * hidden_size if min(step) < step[0] else 0
        if row["exact"]:
            assert row["steps"]["recompute_flops"] == [scores]
    assert sum(row["exact"] for row in rows) > len(rows) / 2


def test_padding_puts_no_row_in_doubt(run):
    assert not any(code.startswith("rows_in_doubt") for code in run[2].notices)


def test_checkpointing_that_is_switched_on_is_noticed_in_padded_batches(tmp_path):
    model, batch = BY_NAME["llama"].build(), padded([20, 7, 20])
    config = {"log_every": 1, "recalibration_frequency": 5}
    with flopwatch.TrainingMonitor(tmp_path, model=model, config=config, strict=True) as monitor:
        for number in range(20):
            if number == 8:
                model.gradient_checkpointing_enable()
            with monitor.step(batch):
                model(**batch).loss.backward()
    records = map(json.loads, (tmp_path / "training_log.jsonl").read_text().splitlines())
    rows = [record for record in records if "steps" in record]
    before, after = (
        {row["steps"]["recompute_flops"][0] for row in part if row["exact"]} for part in (rows[:8], rows[8:])
    )

    assert len(before) == len(after) == 1
    assert max(before) < max(after)


def micro_batches(steps, lengths=(9, 14, 19, 24, 29)):
    """For each step two micro-batches of other lengths, each padded to its longest row."""
    chance = random.Random(0)
    return [[chance.sample(lengths, 3) for _ in range(2)] for _ in range(steps)]


def train_with_steps(folder, model, steps):
    with flopwatch.TrainingMonitor(folder, model=model, config={"log_every": 1}, strict=True) as monitor:
        for lengths in steps:
            with monitor.step() as step:
                for batch in map(padded, lengths):
                    step.micro_batch(batch)
                    model(**batch).loss.backward()


def train_watched(folder, model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    process = flopwatch.watch(folder, log_every=1, quiet=True)
    for lengths in steps:
        for batch in map(padded, lengths):
            model(**batch).loss.backward()
        optimizer.step()
    process.stop()


@pytest.mark.parametrize("train", [train_with_steps, train_watched])
def test_micro_batches_that_are_padded_to_other_lengths_are_exact(train, tmp_path):
    gc.collect()  # optimizers of earlier tests: with several of them, the first step is not measured
    model, steps = BY_NAME["llama"].build(), micro_batches(40)
    train(tmp_path, model, steps)
    of_length = {n: true_flops(BY_NAME["llama"].build(eager=True), causal_batch(1, n)) for n in (9, 14, 19, 24, 29)}
    truth = [sum(of_length[length] for batch in step for length in batch) for step in steps]

    records = map(json.loads, (tmp_path / "training_log.jsonl").read_text().splitlines())
    rows = [record for record in records if "steps" in record]
    exact = [(row["steps"]["model_flops"], [flops]) for row, flops in zip(rows, truth, strict=True) if row["exact"]]
    assert [logged for logged, _ in exact] == [flops for _, flops in exact]
    assert len(exact) >= len(rows) - 1  # what ran before the first step that is watched is not known at once


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.project, self.out = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64)

    def forward(self, ids, mask):
        query, key, value = self.project(self.embed(ids)).chunk(3, -1)
        scores = (query @ key.transpose(1, 2)).masked_fill(mask[:, None] == 0, -1e9)
        return self.out(scores.softmax(-1) @ value)


@pytest.mark.skipif(not live._compiles_beside, reason=COMPILED_ALONE)
@pytest.mark.filterwarnings("ignore")
def test_compiled_micro_batches_that_are_padded_to_other_lengths_are_exact(tmp_path):
    model, steps = torch.compile(Attentive(), dynamic=True, backend="aot_eager"), micro_batches(30, range(5, 61, 5))
    with flopwatch.TrainingMonitor(tmp_path, model=model, config={"log_every": 10}, strict=True) as monitor:
        for lengths in steps:
            with monitor.step() as step:
                for batch in map(padded, lengths):
                    step.micro_batch(batch)
                    model(batch["input_ids"] % 64, batch["attention_mask"]).sum().backward()
    torch.compiler.reset()
    assert monitor.summary.exact, monitor.summary.notes
    # For each position, three products of 2 * 32 * 32 to project, and one of 2 * 32 * 64 for the output, thrice with
    # their gradients; for each pair of positions, two products of 2 * 32, thrice.
    lengths = [length for step in steps for batch in step for length in batch]
    truth = sum(3 * (2 * 32 * 96 + 2 * 32 * 64) * length + 3 * 2 * 2 * 32 * length**2 for length in lengths)
    assert monitor.summary.values["total/model_flops"] == truth
