"""A monitor in training loops with Accelerate."""

import pytest
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
