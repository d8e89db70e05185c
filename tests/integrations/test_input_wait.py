"""Input wait is what the loader itself says the loop has waited, in every framework, with and without accumulation."""

import json
import time

import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from transformers import TrainerCallback

import flopwatch
from flopwatch.integrations.accelerate import AccelerateMonitor
from flopwatch.integrations.lightning import FlopwatchCallback as LightningCallback
from support.integrations.slow_loader import MICRO_BATCHES, SlowBatches, SlowLinear, Truth
from testbeds.frameworks.tiny_hf import hf_trainer, quick_callback
from testbeds.frameworks.tiny_lightning import lightning_trainer

pytestmark = pytest.mark.slow

POINTS = 5.0
"""Half of the time is waited, and a wait of one micro-batch of four would be an eighth. A busy machine that holds the
loop up between the two clocks costs a point or two."""

accumulations = pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.campaign), 4])
QUIET = {"mode": "estimate", "log_every": 4, "config": {"warm_up_steps": 0}}


def assert_right(folder, truth):
    """Of all steps but the first, from the columns of the log: the same steps as the truth's."""
    lines = (folder / "training_log.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["type"] == "row"]
    seconds = [value for row in rows for value in row["steps"]["seconds"]][1:]
    waits = [value for row in rows for value in row["steps"]["input_wait_seconds"]][1:]
    timed = [(took, wait) for took, wait in zip(seconds, waits, strict=True) if wait is not None]
    told = 100 * sum(wait for _, wait in timed) / sum(took for took, _ in timed)
    assert len(timed) >= 0.8 * len(seconds), "the wait of nearly every step is known"
    assert told == pytest.approx(truth.percent(rows[-1]["ledger"]["seconds"].get("outside", 0.0)), abs=POINTS)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def work_on(model, batch, backward=torch.Tensor.backward):
    backward(model(batch).square().mean())


@accumulations
def test_in_a_plain_loop_around_the_loader(accumulation, tmp_path):
    slow, model = SlowBatches(), SlowLinear()
    optimizer, truth = sgd(model), Truth(slow, accumulation)
    with flopwatch.TrainingMonitor(tmp_path, model=model, **QUIET) as monitor:
        batches = iter(monitor.batches(slow.loader()))
        for _ in range(MICRO_BATCHES // accumulation):
            with monitor.step() as step:
                for _ in range(accumulation):
                    batch = next(batches)
                    step.micro_batch(batch)
                    work_on(model, batch)
                optimizer.step()
                truth.step_ended()
    assert_right(tmp_path, truth)


@accumulations
def test_in_a_plain_loop_that_counts_its_micro_batches(accumulation, tmp_path):
    slow, model = SlowBatches(), SlowLinear()
    optimizer, truth = sgd(model), Truth(slow, accumulation)
    with flopwatch.TrainingMonitor(tmp_path, model=model, **QUIET) as monitor:
        for index, batch in enumerate(monitor.batches(slow.loader())):
            monitor.micro_batch(batch)
            work_on(model, batch)
            if (index + 1) % accumulation == 0:
                optimizer.step()
                truth.step_ended()
                monitor.log_step(index // accumulation)
    assert_right(tmp_path, truth)


@accumulations
def test_in_a_loop_with_accelerate(accumulation, tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    slow, plain = SlowBatches(), SlowLinear()
    model, optimizer, loader = accelerator.prepare(plain, sgd(plain), slow.loader())
    truth = Truth(slow, accumulation)
    with AccelerateMonitor(accelerator, model, tmp_path, **QUIET) as monitor:
        for batch in loader:
            with accelerator.accumulate(model), monitor.step(batch):
                work_on(model, batch, accelerator.backward)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    truth.step_ended()
    assert_right(tmp_path, truth)


class SlowModule(LightningModule):
    def __init__(self, truth):
        super().__init__()
        self.model = SlowLinear()
        self._truth = truth

    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self._truth.step_ended()

    def configure_optimizers(self):
        return sgd(self)


@accumulations
def test_in_lightning(accumulation, tmp_path):
    slow = SlowBatches()
    truth = Truth(slow, accumulation)
    callback = LightningCallback(tmp_path, **QUIET)
    options = {"max_epochs": 1, "accumulate_grad_batches": accumulation, "log_every_n_steps": 4}
    lightning_trainer(tmp_path, callback, **options).fit(SlowModule(truth), slow.loader())
    assert_right(tmp_path, truth)


class StepEnds(TrainerCallback):
    def __init__(self, truth):
        self._truth = truth

    def on_step_end(self, *args, **kwargs):
        self._truth.step_ended()


@accumulations
def test_in_the_hugging_face_trainer(accumulation, tmp_path):
    slow = SlowRows()
    truth = Truth(slow, accumulation)
    callback = quick_callback(output_dir=tmp_path, config={"warm_up_steps": 0})
    options = {"gradient_accumulation_steps": accumulation, "num_train_epochs": 1, "logging_steps": 4}
    trainer = hf_trainer(tmp_path, callback, StepEnds(truth), **options)
    trainer.data_collator = slow.collate
    trainer.train_dataset = trainer.train_dataset * (MICRO_BATCHES // 6)
    trainer.train()
    # One batch is fetched ahead: each wait is that of the batch after it, which does not change the share.
    assert_right(tmp_path, truth)


class SlowRows(SlowBatches):
    """The same in a collate function."""

    def collate(self, examples):
        from testbeds.frameworks import tiny_run

        began = time.perf_counter()
        time.sleep(self._seconds)
        batch = tiny_run.collate(examples)
        self.waits.append(time.perf_counter() - began)
        return batch
