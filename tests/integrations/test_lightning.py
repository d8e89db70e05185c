"""The callback in real runs of Lightning's Trainer."""

import csv

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn

from flopwatch.integrations.lightning import FlopwatchCallback
from flopwatch.testing import FakeClock
from testbeds.frameworks import tiny_run
from testbeds.frameworks.tiny_hf import logged_rows
from testbeds.frameworks.tiny_lightning import ImageModule, TextModule, lightning_trainer, quick_callback

pytestmark = pytest.mark.slow


class TestRows:
    def test_our_numbers_are_in_the_loggers_row_of_the_loss(self, tmp_path):
        logger = CSVLogger(tmp_path)
        lightning_trainer(tmp_path, quick_callback(), logger=logger).fit(TextModule(), tiny_run.loader())
        with open(f"{logger.log_dir}/metrics.csv") as file:
            rows = [row for row in csv.DictReader(file) if row["loss"]]
        assert [row["step"] for row in rows] == ["1", "3", "5"]
        assert all(row["perf/mfu"] and row["perf/step_time"] for row in rows)
        assert float(rows[-1]["total/tokens"]) == tiny_run.truth()["total/tokens"]

    def test_tensorboard_has_them_at_the_same_steps(self, tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        logger = TensorBoardLogger(tmp_path)
        lightning_trainer(tmp_path, quick_callback(), logger=logger).fit(TextModule(), tiny_run.loader())
        events = EventAccumulator(logger.log_dir).Reload()
        assert [event.step for event in events.Scalars("loss")] == [1, 3, 5]
        assert [event.step for event in events.Scalars("perf/mfu")] == [1, 3, 5]

    def test_the_local_log_counts_steps_and_losses_as_lightning_does(self, tmp_path):
        logger = CSVLogger(tmp_path)
        callback = quick_callback()
        trainer = lightning_trainer(tmp_path, callback, logger=logger, accumulate_grad_batches=1, log_every_n_steps=1)
        trainer.fit(TextModule(), tiny_run.loader())
        with open(f"{logger.log_dir}/metrics.csv") as file:
            told = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file) if row["loss"]]
        rows = logged_rows(callback.monitor.output_dir)
        assert [row["step"] for row in rows] == [step for step, _ in told]
        assert [row["values"]["training/loss"] for row in rows] == pytest.approx([loss for _, loss in told])
        assert rows[0]["values"]["training/lr"] == 0.1

    def test_values_for_callbacks_and_the_script_are_those_of_the_module_only(self, tmp_path):
        trainer = lightning_trainer(tmp_path, quick_callback(), logger=CSVLogger(tmp_path))
        trainer.fit(TextModule(), tiny_run.loader())
        assert set(trainer.callback_metrics) == set(trainer.logged_metrics) == {"loss"}


class TestModel:
    @pytest.mark.slow
    def test_a_pair_is_cut_to_what_forward_takes(self, tmp_path):
        callback = FlopwatchCallback()
        lightning_trainer(tmp_path, callback).fit(ImageModule(), ImageModule.batches())
        values = callback.monitor.summary.values
        assert values["total/model_flops"] == 2 * 12 * ImageModule.step_flops()
        assert values["total/samples"] == 2 * 12 * 5
        assert "total/tokens" not in values

    @pytest.mark.slow
    def test_a_forward_that_does_more_than_its_child_is_what_counts(self, tmp_path):
        class Twice(ImageModule):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(self.encoder, self.head)
                del self.encoder, self.head

            def forward(self, pixels):
                return self.net(pixels) + self.net(-pixels)

        callback = FlopwatchCallback()
        lightning_trainer(tmp_path, callback).fit(Twice(), ImageModule.batches())
        assert callback.monitor.summary.values["total/model_flops"] == 2 * 2 * 12 * ImageModule.step_flops()

    def test_a_module_without_forward_is_exact_from_the_first_row(self, tmp_path):
        class NoForward(ImageModule):
            forward = LightningModule.forward

            def training_step(self, batch, batch_idx):
                return nn.functional.cross_entropy(self.head(self.encoder(batch[0])), batch[1])

        callback = FlopwatchCallback()
        lightning_trainer(tmp_path, callback).fit(NoForward(), ImageModule.batches())
        values = callback.monitor.summary.values
        assert values["total/model_flops"] == 2 * 12 * ImageModule.step_flops()
        assert values["total/samples"] == 2 * 12 * 5
        assert callback.monitor.summary.exact


class TestClocks:
    """Each micro-batch takes 1 s, a validation batch 100 s, a checkpoint 1000 s, by a clock that the training moves."""

    @staticmethod
    def module(clock):
        class SlowModule(TextModule):
            def training_step(self, batch, batch_idx):
                clock.advance(1)
                return super().training_step(batch, batch_idx)

            def validation_step(self, batch, batch_idx):
                clock.advance(100)

            def on_save_checkpoint(self, checkpoint):
                clock.advance(1000)

        return SlowModule()

    @pytest.mark.parametrize("every", [2, 3], ids=["between steps", "amid an accumulation"])
    def test_validation_and_saving_are_in_no_steps_time(self, tmp_path, every):
        clock = FakeClock()
        callback = quick_callback(clock=clock)
        trainer = lightning_trainer(
            tmp_path,
            callback,
            ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1),
            enable_checkpointing=True,
            val_check_interval=every,
            limit_val_batches=1,
            num_sanity_val_steps=1,
        )
        trainer.fit(self.module(clock), tiny_run.loader(), tiny_run.loader())
        values = callback.monitor.summary.values
        assert values["perf/step_time"] == tiny_run.ACCUMULATION
        assert values["time/train_seconds"] == 6 * tiny_run.ACCUMULATION
        assert values["time/eval_seconds"] == 12 / every * 100
        assert values["time/checkpoint_seconds"] == 2 * 1000


@pytest.mark.slow
def test_a_resumed_run_continues_its_totals(tmp_path):
    """The checkpoint is that of the third step; the second run does the last three again."""

    def fit(folder, checkpoint=None):
        callback = FlopwatchCallback(tmp_path / folder)
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        trainer = lightning_trainer(tmp_path, callback, saving, enable_checkpointing=True)
        trainer.fit(TextModule(), tiny_run.loader(), ckpt_path=checkpoint)
        return callback.monitor.summary.values

    fit("first")
    values = fit("second", tmp_path / "step=3.ckpt")
    assert {key: values[key] for key in tiny_run.truth()} == tiny_run.truth()
    assert [row["step"] for row in logged_rows(tmp_path / "second")] == [3, 5]


@pytest.mark.slow
def test_two_optimizers_of_a_module_that_steps_by_hand(tmp_path):
    class ByHand(ImageModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return [tiny_run.optimizer(self.encoder), tiny_run.optimizer(self.head)]

    logger = CSVLogger(tmp_path)
    callback = FlopwatchCallback()
    trainer = lightning_trainer(tmp_path, callback, logger=logger, accumulate_grad_batches=1, max_epochs=1)
    trainer.fit(ByHand(), ImageModule.batches())
    assert callback.monitor.summary.values["total/model_flops"] == 12 * ImageModule.step_flops()
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    assert len(rows) == 6
    assert all(row["perf/step_time"] for row in rows[1:])  # both steps of the first row are counted


def test_it_works_under_lightnings_other_name(tmp_path):
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tiny_run.model()

        logs = True
        training_step = TextModule.training_step
        configure_optimizers = TextModule.configure_optimizers

    callback = quick_callback()
    trainer = lightning_trainer(tmp_path, callback, kind=pytorch_lightning.Trainer)
    trainer.fit(Module(), tiny_run.loader())
    assert callback.monitor.summary.values["total/tokens"] == tiny_run.truth()["total/tokens"]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", "bf16"), ("32-true", None)])
def test_mixed_precision_decides_the_peaks_type(tmp_path, precision, dtype):
    callback = quick_callback()
    lightning_trainer(tmp_path, callback, precision=precision, max_epochs=1).fit(TextModule(), tiny_run.loader())
    assert callback.monitor.config.dtype == dtype
