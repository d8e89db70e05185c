"""A monitor in training loops with Accelerate."""

import pytest
import torch
from accelerate import Accelerator

from flopwatch.integrations.accelerate import AccelerateMonitor
from testbeds.frameworks import tiny_run
from testbeds.frameworks.tiny_hf import logged_rows

pytestmark = pytest.mark.slow


def train(accelerator, folder, *, model=None, epochs=range(tiny_run.EPOCHS), at_end=lambda monitor: None, **options):
    """The tiny run; returns the monitor (None when `folder` is) and each optimizer step's mean loss."""
    plain = model or tiny_run.model()
    model, optimizer, loader = accelerator.prepare(plain, tiny_run.optimizer(plain), tiny_run.loader())
    monitor = AccelerateMonitor(accelerator, model, folder, **options)
    losses, steps = [], []
    for _ in epochs:
        for batch in loader:
            with accelerator.accumulate(model), monitor.step(batch) as step:
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step.log(loss=loss)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    steps.append(sum(losses) / len(losses))
                    losses.clear()
    at_end(monitor)
    monitor.close()
    return monitor, steps


def accelerator_for_cpu(**options):
    return Accelerator(cpu=True, gradient_accumulation_steps=tiny_run.ACCUMULATION, **options)


def test_a_step_is_an_optimizer_step_and_its_loss_the_mean_of_its_micro_batches(tmp_path):
    monitor, losses = train(accelerator_for_cpu(), tmp_path, mode="estimate", log_every=2)
    values = monitor.summary.values
    assert values["total/steps"] == len(losses) == 6
    assert values["total/tokens"] == tiny_run.truth()["total/tokens"]
    logged = [loss for row in logged_rows(tmp_path) for loss in row["steps"]["loss"]]
    assert logged == pytest.approx(losses, rel=1e-6)


def test_the_rest_of_an_epoch_that_does_not_divide_is_a_step_of_its_own(tmp_path):
    monitor, losses = train(
        Accelerator(cpu=True, gradient_accumulation_steps=4), tmp_path, mode="estimate", epochs=range(1)
    )
    assert monitor.summary.values["total/steps"] == len(losses) == 2
    assert 2 * monitor.summary.values["total/tokens"] == tiny_run.truth()["total/tokens"]


def test_without_accumulate_every_batch_is_a_step(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(tiny_run.model())
    with AccelerateMonitor(accelerator, model, tmp_path, mode="estimate") as monitor:
        for batch in tiny_run.loader():
            with monitor.step(batch) as step:
                step.log(loss=1.0)
    assert monitor.summary.values["total/steps"] == len(tiny_run.loader())


def test_its_values_go_to_the_trackers_in_the_row_of_the_loss(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = accelerator_for_cpu(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")

    def log(monitor):
        accelerator.log({"loss": 1.0, **monitor.log_now()}, step=6)

    train(accelerator, tmp_path / "flopwatch", mode="estimate", at_end=log)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert events.Scalars("perf/mfu")[0].step == events.Scalars("loss")[0].step == 6


def test_totals_go_on_from_a_saved_state(tmp_path):
    first = accelerator_for_cpu()

    def save(monitor):
        first.register_for_checkpointing(monitor)
        first.save_state(tmp_path / "state")

    train(first, tmp_path / "first", mode="estimate", epochs=range(1), at_end=save)

    second = accelerator_for_cpu()
    plain = tiny_run.model()
    model, optimizer, loader = second.prepare(plain, tiny_run.optimizer(plain), tiny_run.loader())
    with AccelerateMonitor(second, model, tmp_path / "second", mode="estimate") as monitor:
        second.register_for_checkpointing(monitor)
        second.load_state(tmp_path / "state")
        for batch in loader:
            with second.accumulate(model), monitor.step(batch):
                second.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    assert monitor.summary.values["total/tokens"] == tiny_run.truth()["total/tokens"]
    assert monitor.summary.step == 5  # counted on from the saved one


def test_mixed_precision_decides_the_peaks_type_and_counts_the_same(tmp_path):
    monitor, _ = train(accelerator_for_cpu(mixed_precision="bf16"), tmp_path)
    assert monitor.config.dtype == "bf16"
    assert monitor.summary.values["total/model_flops"] == tiny_run.truth()["total/model_flops"]


def test_parameters_are_bitwise_equal(tmp_path, monkeypatch):
    def trained(folder):
        torch.manual_seed(0)
        model = tiny_run.model(dropout=0.2)
        train(accelerator_for_cpu(), folder, model=model, epochs=range(8))
        return tiny_run.parameters(model)

    watched = trained(tmp_path)
    monkeypatch.setenv("FLOPWATCH_DISABLE", "1")
    assert torch.equal(trained(tmp_path / "nothing"), watched)
    assert not (tmp_path / "nothing").exists()


def test_a_micro_batch_that_raises_is_not_counted(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(tiny_run.model())
    first, second, *_ = tiny_run.loader()
    with AccelerateMonitor(accelerator, model, tmp_path, mode="estimate") as monitor:
        with pytest.raises(RuntimeError, match="on purpose"), monitor.step(first):
            raise RuntimeError("on purpose")
        with monitor.step(second):
            pass
    assert monitor.summary.values["total/steps"] == 1
    assert monitor.summary.values["total/tokens"] == second["input_ids"].numel()


def test_strict_raises_what_a_plain_monitor_would_raise_and_otherwise_it_is_swallowed(tmp_path):
    """A step number that is none costs the step; strict is for those who want to see that."""

    def train_one(folder, **options):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(tiny_run.model())
        batch, *_ = tiny_run.loader()
        monitor = AccelerateMonitor(accelerator, model, folder, mode="estimate", **options)
        with monitor, monitor.step(batch, step="not a number"):
            pass

    train_one(tmp_path / "lenient")
    with pytest.raises(ValueError, match="not a number"):
        train_one(tmp_path / "strict", strict=True)
    with pytest.raises(ValueError, match="not a number"):
        train_one(tmp_path / "by_config", config={"strict": True})
