"""A Trainer resumed from a checkpoint continues the totals."""

import pytest

from flopwatch.integrations.hugging_face import FlopwatchCallback
from flopwatch.testing import FakeClock
from testbeds.frameworks import tiny_run
from testbeds.frameworks.tiny_hf import hf_trainer, logged_rows, quick_callback


@pytest.mark.slow
class TestResume:
    """Six steps, a checkpoint after the third, and the last three once more from there."""

    def trained_twice(self, tmp_path, first, second, **more):
        options = {"save_strategy": "steps", "save_steps": 3, **more}
        hf_trainer(tmp_path, *first, **options).train()
        trainer = hf_trainer(tmp_path, *second, **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        return trainer

    @pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.campaign)])
    def test_totals_go_on_from_the_checkpoint(self, tmp_path, workers):
        first, second = FlopwatchCallback(tmp_path / "first"), FlopwatchCallback(tmp_path / "second")
        self.trained_twice(tmp_path, [first], [second], dataloader_num_workers=workers)
        values = second.monitor.summary.values
        assert {key: values[key] for key in tiny_run.truth()} == tiny_run.truth()
        assert values["time/train_seconds"] > 0
        assert [row["step"] for row in logged_rows(tmp_path / "second")] == [4, 6]

    def test_totals_go_on_when_the_trainer_restores_its_callbacks(self, tmp_path, caplog):
        second = quick_callback(output_dir=tmp_path / "flopwatch", clock=FakeClock())
        trainer = self.trained_twice(
            tmp_path,
            [quick_callback(output_dir=tmp_path / "flopwatch", clock=FakeClock())],
            [second],
            restore_callback_states_from_checkpoint=True,
        )
        (restored,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, FlopwatchCallback)]
        assert restored is not second
        assert restored.monitor.config.mode == "estimate"
        assert restored.monitor.output_dir == tmp_path / "flopwatch"
        assert restored.monitor.summary.values["total/tokens"] == tiny_run.truth()["total/tokens"]
        assert any("are back at their defaults: clock." in said for said in caplog.messages)

    def test_a_checkpoint_made_without_the_callback_can_be_resumed_and_saved_with_it(self, tmp_path):
        callback = quick_callback()
        trainer = self.trained_twice(tmp_path, [], [callback])
        assert trainer.state.global_step == 6
        assert callback.monitor.summary.values["total/steps"] == 3


@pytest.mark.slow
def test_a_second_training_of_one_trainer_is_a_run_of_its_own_and_a_third_continues_it(tmp_path):
    callback = quick_callback()
    trainer = hf_trainer(tmp_path, callback, save_strategy="steps", save_steps=3)
    trainer.train()
    trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [row["step"] for row in logged_rows(tmp_path / "flopwatch")] == [2, 4, 6]
    assert [row["step"] for row in logged_rows(tmp_path / "flopwatch-2")] == [2, 4, 6, 4, 6]
    assert callback.monitor.summary.values["total/tokens"] == tiny_run.truth()["total/tokens"]
