"""The callback in real runs of the Hugging Face Trainer: rows, tokens, clocks."""

import pytest
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from flopwatch.integrations.hugging_face import FlopwatchCallback
from flopwatch.testing import FakeClock
from testbeds.frameworks import tiny_run
from testbeds.frameworks.tiny_hf import hf_trainer, logged_rows, quick_callback

pytestmark = pytest.mark.slow


class TestRows:
    @pytest.mark.slow
    def test_tensorboard_has_our_numbers_at_the_steps_of_the_loss(self, tmp_path, monkeypatch):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
        callback = FlopwatchCallback(mode="estimate")  # counted steps have no rates
        hf_trainer(tmp_path, callback, report_to=["tensorboard"]).train()
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        steps = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        assert steps["train/loss"] == [2, 4, 6]
        for tag in ("train/perf/mfu", "train/perf/tokens_per_second", "train/total/tokens"):
            assert steps[tag] == steps["train/loss"]
        assert events.Scalars("train/total/tokens")[-1].value == tiny_run.truth()["total/tokens"]

    @pytest.mark.slow
    def test_wandb_has_our_numbers_in_the_row_of_the_loss(self, tmp_path, monkeypatch):
        import wandb

        from support.sinks.wandb_file import find_file, read_history

        wandb.teardown()  # whatever an earlier test of this process left open
        monkeypatch.setenv("WANDB_DIR", str(tmp_path))
        callback = FlopwatchCallback(mode="estimate")  # counted steps have no rates
        hf_trainer(tmp_path, callback, report_to=["wandb"]).train()
        wandb.finish()
        wandb.teardown()  # waits until W&B's process has written the file
        rows = [row for row in read_history(find_file(tmp_path)) if "train/loss" in row]
        assert [row["train/global_step"] for row in rows] == [2, 4, 6]
        assert all({"train/perf/mfu", "train/perf/step_time", "train/total/tokens"} <= row.keys() for row in rows)
        assert rows[-1]["train/total/tokens"] == tiny_run.truth()["total/tokens"]

    def test_the_local_log_has_the_trainers_loss_and_its_rows(self, tmp_path):
        trainer = hf_trainer(tmp_path, quick_callback(), logging_first_step=True)
        trainer.train()
        told = [entry for entry in trainer.state.log_history if "loss" in entry]
        logged = logged_rows(tmp_path / "flopwatch")
        assert [row["step"] for row in logged] == [entry["step"] for entry in told] == [1, 2, 4, 6]
        assert [row["values"]["training/loss"] for row in logged] == [entry["loss"] for entry in told]
        assert [row["values"]["training/lr"] for row in logged] == [entry["learning_rate"] for entry in told]
        assert logged[0]["values"]["training/grad_norm"] == told[0]["grad_norm"]

    def test_rows_of_evaluations_and_of_the_end_are_left_alone(self, tmp_path, caplog):
        seen = []

        class Watch(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                seen.append(dict(logs))

        # Before ours in the list, as reporting callbacks are.
        hf_trainer(tmp_path, Watch(), quick_callback(), eval_strategy="steps", eval_steps=3).train()
        others = [row for row in seen if "loss" not in row]
        assert [next(iter(row)) for row in others] == ["eval_loss", "eval_loss", "train_runtime"]
        assert not [key for row in others for key in row if key.startswith(("perf/", "total/"))]
        assert all("perf/step_time" in row for row in seen if "loss" in row)
        assert not [record for record in caplog.records if record.name == "flopwatch"]


class TestTokens:
    def test_are_missing_with_a_word_where_no_trainer_is_found(self, tmp_path, caplog):
        callback = quick_callback()
        args = TrainingArguments(**tiny_run.training_arguments(tmp_path))
        state = TrainerState(max_steps=2, logging_steps=2)
        callback.on_train_begin(args, state, TrainerControl(), model=tiny_run.model())
        for step in (1, 2):
            callback.on_step_begin(args, state, TrainerControl())
            state.global_step = step
            callback.on_step_end(args, state, TrainerControl())
        callback.on_train_end(args, state, TrainerControl())
        assert [record.message for record in caplog.records] == [
            "flopwatch: the callback was not called by a Trainer, so tokens, FLOPs and MFU are unknown; in a training "
            "loop of your own, use flopwatch.TrainingMonitor"
        ]
        assert callback.monitor.summary.values["total/steps"] == 2
        assert "total/tokens" not in callback.monitor.summary.values


class TestClocks:
    """Each micro-batch takes 1 s, an evaluation 100 s, a checkpoint 1000 s, by a clock that the training moves."""

    @staticmethod
    def trainer_class(clock):
        class SlowTrainer(Trainer):
            def training_step(self, *args, **kwargs):
                clock.advance(1)
                return super().training_step(*args, **kwargs)

            def evaluation_loop(self, *args, **kwargs):
                clock.advance(100)
                return super().evaluation_loop(*args, **kwargs)

            def _save_checkpoint(self, *args, **kwargs):
                clock.advance(1000)
                return super()._save_checkpoint(*args, **kwargs)

        return SlowTrainer

    def test_evaluation_and_saving_are_in_no_steps_time(self, tmp_path):
        clock = FakeClock()
        callback = quick_callback(clock=clock)
        trainer = hf_trainer(
            tmp_path,
            callback,
            kind=self.trainer_class(clock),
            eval_strategy="steps",
            eval_steps=2,
            eval_on_start=True,
            save_strategy="steps",
            save_steps=3,
        )
        trainer.train()
        values = callback.monitor.summary.values
        assert values["perf/step_time"] == tiny_run.ACCUMULATION
        assert values["time/train_seconds"] == 6 * tiny_run.ACCUMULATION
        assert values["time/eval_seconds"] == 3 * 100
        assert values["time/checkpoint_seconds"] == 2 * 1000


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_decides_the_peaks_type(tmp_path, precision):
    callback = quick_callback()
    args = TrainingArguments(**tiny_run.training_arguments(tmp_path))
    setattr(args, precision, True)
    state = TrainerState(max_steps=2, logging_steps=2)
    callback.on_train_begin(args, state, TrainerControl(), model=tiny_run.model())
    assert callback.monitor.config.dtype == precision


@pytest.mark.slow
def test_a_training_in_bf16_counts_the_same(tmp_path):
    callback = FlopwatchCallback()
    hf_trainer(tmp_path, callback, bf16=True).train()
    assert callback.monitor.summary.values["total/model_flops"] == tiny_run.truth()["total/model_flops"]
