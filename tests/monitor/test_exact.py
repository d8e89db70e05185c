"""The FLOPs a run adds up, against an op-by-op count of the same steps: each document run alone, eagerly, by torch."""

import json
import random

import pytest
import torch

import flopwatch
from flopwatch.testing import FakeClock
from support.quick import for_each
from testbeds.architectures import BY_NAME, causal_batch, image_batch, qwen_vl_batch, true_flops

pytestmark = pytest.mark.slow

LENGTHS = range(3, 60)


class Truth:
    """The eager twin of a model; what it has counted once it remembers."""

    def __init__(self, name):
        self._model = BY_NAME[name].build(eager=True)
        self._known = {}

    def of_length(self, length):
        if length not in self._known:
            self._known[length] = true_flops(self._model, causal_batch(1, length))
        return self._known[length]

    def of_batch(self, batch):
        return true_flops(self._model, batch)


def padded(lengths, longest, *, left=False):
    batch = causal_batch(len(lengths), longest)
    for row, length in enumerate(lengths):
        padding = slice(0, longest - length) if left else slice(length, longest)
        batch["attention_mask"][row, padding] = 0
        batch["labels"][row, padding] = -100
    return batch


def packed(lengths):
    batch = causal_batch(1, sum(lengths))
    del batch["attention_mask"]
    return {**batch, "position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}


def cumulative(lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    batch = packed(lengths)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


def train(model, batch):
    model(**batch).loss.backward()


def monitored(model, tmp_path, batches, **options):
    """Train a step with each batch, count every step, and return the run's values."""
    clock = FakeClock()
    options = {"config": {"count": "every"}, **options}
    with flopwatch.TrainingMonitor(tmp_path, model=model, strict=True, clock=clock, **options) as monitor:
        for batch, more in batches:
            clock.advance(1.0)
            with monitor.step(batch, **more) as step:
                train(model, batch)
                step.log(loss=1.0)
    return monitor.summary.values


@pytest.mark.requirement("R5")
@pytest.mark.requirement("R10")
@for_each((BY_NAME[name] for name in ("llama", "gpt2", "mixtral", "qwen3")), in_ci={"llama", "mixtral"})
def test_padded_ragged_and_packed_steps_add_up_to_the_flop(architecture, tmp_path):
    name = architecture.name
    chance = random.Random(7)
    truth = Truth(name)
    batches, flops, tokens, real_tokens, trainable = [], 0, 0, 0, 0
    for number in range(12):
        lengths = [chance.choice(LENGTHS) for _ in range(chance.randint(1, 4))]
        kind = ("padded", "left", "packed", "cumulative", "ragged", "given")[number % 6]
        more = {}
        if kind in ("padded", "left"):
            batch = padded(lengths, max(lengths) + chance.randint(0, 5), left=kind == "left")
        elif kind in ("packed", "cumulative"):
            batch = packed(lengths) if kind == "packed" else cumulative(lengths)
        elif kind == "given":
            batch, more = packed(lengths), {"lengths": lengths}
            del batch["position_ids"]
        else:
            lengths = [lengths[0]] * len(lengths)  # another shape on every step, nothing padded
            batch = causal_batch(len(lengths), lengths[0])
        batches.append((batch, more))
        flops += sum(map(truth.of_length, lengths))
        tokens += batch["input_ids"].numel()
        real_tokens += sum(lengths)
        trainable += int((batch["labels"] != -100).sum())

    values = monitored(BY_NAME[name].build(), tmp_path, batches)

    assert values["total/model_flops"] == flops
    assert values["total/tokens"] == tokens
    assert values["total/real_tokens"] == real_tokens
    assert values["total/trainable_tokens"] == trainable


@pytest.mark.slow
def test_images_of_every_size_are_priced(tmp_path):
    grids = [(1, 4, 6), (1, 2, 2), (1, 6, 4), (1, 8, 2)]
    truth = Truth("qwen2_vl")
    batches = [qwen_vl_batch(2, 40 + 3 * index, grid) for index, grid in enumerate(grids)]

    values = monitored(BY_NAME["qwen2_vl"].build(), tmp_path, [(batch, {}) for batch in batches])

    assert values["total/model_flops"] == sum(map(truth.of_batch, batches))


def test_images_without_a_text_are_priced_by_the_sample(tmp_path):
    truth = Truth("vit")
    batches = [image_batch(size, 0) for size in (2, 5, 3)]

    values = monitored(BY_NAME["vit"].build(), tmp_path, [(batch, {}) for batch in batches])

    assert values["total/model_flops"] == sum(map(truth.of_batch, batches))
    assert values["total/samples"] == 10
    assert "total/tokens" not in values


@pytest.mark.slow
def test_a_shape_that_was_counted_has_its_flops_when_it_comes_again(tmp_path):
    truth = Truth("mamba2")
    batches = [causal_batch(2, length) for length in (20, 33, 20, 33)]

    values = monitored(BY_NAME["mamba2"].build(), tmp_path, [(batch, {}) for batch in batches], config={})

    assert values["total/model_flops"] == sum(map(truth.of_batch, batches))


def test_a_loop_that_writes_into_its_batch_is_found_out_and_read_at_once(tmp_path, caplog):
    model = BY_NAME["llama"].build()
    batch = causal_batch(2, 16)
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, log_every=5, clock=FakeClock())
    for number in range(20):
        batch["attention_mask"].fill_(1)
        batch["attention_mask"][0, 8 + number % 4 :] = 0
        train(model, batch)
        monitor.log_step(number, batch=batch)
    monitor.close()

    truth = Truth("llama")
    late = sum(truth.of_length(8 + number % 4) + truth.of_length(16) for number in range(4, 20))
    assert caplog.text.count("later batches are read during log_step") == 1
    assert monitor.summary.values["total/model_flops"] == late, "the four that were written into are left out"
    assert monitor.summary.values["total/steps"] == 20


@pytest.mark.slow
def test_micro_batches_of_a_step_add_up(tmp_path):
    truth, model = Truth("llama"), BY_NAME["llama"].build()
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, strict=True)
    with monitor.step() as step:
        for length in (20, 30, 25, 28):
            batch = causal_batch(1, length)
            step.micro_batch(batch)
            train(model, batch)
        step.log(loss=1.0)
    monitor.close()

    assert monitor.summary.values["total/model_flops"] == sum(map(truth.of_length, (20, 30, 25, 28)))
    assert monitor.summary.values["total/steps"] == 1


def test_a_mask_alone_is_enough_for_a_text_model(tmp_path):
    truth, model = Truth("llama"), BY_NAME["llama"].build()
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, strict=True)
    batch = padded([9, 17, 30], 30)
    with monitor.step({"attention_mask": batch["attention_mask"]}):
        train(model, batch)
    monitor.close()

    assert monitor.summary.values["total/model_flops"] == sum(map(truth.of_length, (9, 17, 30)))


@pytest.mark.slow
def test_a_loop_that_passes_nothing_can_state_its_shape(tmp_path):
    model = BY_NAME["llama"].build()
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, strict=True, config={"batch_size": 2, "seq_length": 16})
    with monitor.step():
        train(model, causal_batch(2, 16))
    monitor.close()

    assert monitor.summary.values["total/model_flops"] == 2 * Truth("llama").of_length(16)
    assert monitor.summary.values["total/tokens"] == 2 * 16


@pytest.mark.slow
def test_a_mask_that_numbers_the_documents_is_not_taken_for_lengths(tmp_path):
    batch = causal_batch(2, 12)
    batch["attention_mask"] = torch.tensor([[1] * 5 + [2] * 7, [1] * 6 + [2] * 3 + [0] * 3])

    values = monitored(BY_NAME["llama"].build(), tmp_path, [(batch, {})])

    assert values["total/real_tokens"] == 12 + 9


@pytest.mark.slow
def test_cumulative_lengths_that_are_filled_up_count_no_empty_documents(tmp_path):
    batch = cumulative([9, 14])
    batch["cu_seq_lens_q"] = torch.tensor([0, 9, 23, 23, 23], dtype=torch.int32)

    values = monitored(BY_NAME["llama"].build(), tmp_path, [(batch, {})])

    truth = Truth("llama")
    assert values["total/model_flops"] == truth.of_length(9) + truth.of_length(14)
    assert values["total/samples"] == 2


@pytest.mark.slow
def test_positions_that_do_not_start_at_zero_are_not_taken_for_documents(tmp_path, caplog):
    batch = {**causal_batch(2, 12), "position_ids": torch.arange(500, 512).expand(2, -1)}

    values = monitored(BY_NAME["llama"].build(), tmp_path, [(batch, {})])

    assert values["total/model_flops"] == 2 * Truth("llama").of_length(12)
    assert "each row is taken as one document" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["smart", "profiler", "estimate"])
def test_every_mode_prices_a_dense_decoder_to_the_flop(mode, tmp_path):
    truth = Truth("llama")
    batches = [causal_batch(2, length) for length in (16, 24, 32)]

    values = monitored(BY_NAME["llama"].build(), tmp_path, [(batch, {}) for batch in batches], mode=mode)

    assert values["total/model_flops"] == sum(2 * truth.of_length(length) for length in (16, 24, 32))


def test_the_users_own_function_is_asked_for_every_batch(tmp_path):
    batches = [causal_batch(2, length) for length in (16, 24)]

    values = monitored(
        BY_NAME["llama"].build(), tmp_path, [(b, {}) for b in batches], flops_fn=lambda b: b["input_ids"].numel()
    )

    assert values["total/model_flops"] == 2 * (16 + 24)
    assert "total/hardware_flops" not in values


@pytest.mark.slow
def test_a_batch_that_was_made_up_is_told(tmp_path):
    model = BY_NAME["t5"].build()
    monitor = flopwatch.TrainingMonitor(tmp_path, model=model, mode="estimate")
    monitor.log_step(0, 0, 1.0, 1.0, 0.1, torch.ones(2, 12, dtype=torch.long))
    monitor.close()

    (log,) = tmp_path.rglob("*.jsonl")
    rows = [row for row in map(json.loads, log.read_text().splitlines()) if row["type"] == "row"]
    assert [row["exact"] for row in rows] == [False]
    assert "of its shape was assumed" in rows[0]["notes"][0]


def test_a_run_that_counts_every_step_says_that_its_steps_are_slower(tmp_path):
    model, batch = torch.nn.Linear(8, 8), torch.randn(4, 8)
    with flopwatch.TrainingMonitor(tmp_path, model=model, config={"count": "every"}) as monitor:
        for _ in range(3):
            with monitor.step(batch):
                model(batch).sum().backward()

    assert monitor.summary.notices["every_step_counted"] == 1
    assert monitor.summary.exact
