"""A Trainer trains with the callback as it would without, and keeps nothing of it."""

import logging

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Trainer, TrainerCallback

from flopwatch.integrations.hugging_face import FlopwatchCallback
from testbeds.frameworks import tiny_run
from testbeds.frameworks.tiny_hf import hf_trainer, quick_callback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]  # dynamo, of itself


def traces_on(trainer):
    """What the callback may have left on a Trainer, its callbacks' order aside."""
    return {"training_step", "_run_epoch"} & vars(trainer).keys()


class TestNoTrace:
    @pytest.mark.slow
    def test_parameters_are_bitwise_equal(self, tmp_path):
        def train(*callbacks):
            torch.manual_seed(0)
            model = tiny_run.model(dropout=0.2)
            hf_trainer(tmp_path, *callbacks, model=model, num_train_epochs=6).train()
            return tiny_run.parameters(model)

        assert torch.equal(train(), train(FlopwatchCallback()))

    @pytest.mark.slow
    def test_a_compiled_model_has_as_many_graphs(self, tmp_path):
        def graphs(*callbacks):
            torch._dynamo.reset()
            counters.clear()
            model = tiny_run.model()
            options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "num_train_epochs": 1}
            hf_trainer(tmp_path, *callbacks, model=model, **options).train()
            return counters["stats"]["unique_graphs"], tiny_run.parameters(model)

        bare, bare_parameters = graphs()
        callback = FlopwatchCallback()
        watched, watched_parameters = graphs(callback)
        assert watched == bare > 0
        assert torch.equal(watched_parameters, bare_parameters)
        assert 2 * callback.monitor.summary.values["total/model_flops"] == tiny_run.truth()["total/model_flops"]

    def test_nothing_stays_on_the_trainer(self, tmp_path):
        seen = []

        class Watch(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                seen.append(traces_on(trainer))

        before = [Trainer.training_step, Trainer._run_epoch]
        callback = quick_callback()
        trainer = hf_trainer(tmp_path, callback, Watch())
        trainer.train()
        assert {"training_step"} <= seen[0]
        assert not traces_on(trainer)
        assert [Trainer.training_step, Trainer._run_epoch] == before
        assert not [hook for module in trainer.model.modules() for hook in module._forward_pre_hooks]


class TestErrors:
    @pytest.mark.parametrize("where", ["training_step", "get_batch_samples", "evaluate", "_save_checkpoint"])
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_a_training_that_raises_leaves_nothing_on_the_trainer(self, tmp_path, where, error):
        class Fails(Trainer):
            pass

        def fail(self, *args, **kwargs):
            if self.is_in_train and self.state.global_step >= 2:
                raise error("on purpose")
            return getattr(Trainer, where)(self, *args, **kwargs)

        setattr(Fails, where, fail)
        callback = quick_callback()
        trainer = hf_trainer(
            tmp_path, callback, kind=Fails, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2
        )
        with pytest.raises(error, match="on purpose"):
            trainer.train()
        assert not traces_on(trainer)
        assert callback.monitor.summary.values["total/steps"] == 2

    @pytest.mark.slow
    def test_a_smaller_batch_found_after_running_out_of_memory_is_a_new_session(self, tmp_path):
        class RunsOut(Trainer):
            def training_step(self, model, inputs, *args, **kwargs):
                if len(inputs["input_ids"]) == tiny_run.BATCH_SIZE and self.state.global_step == 1:
                    raise RuntimeError("CUDA out of memory.")
                return super().training_step(model, inputs, *args, **kwargs)

        callback = quick_callback()
        trainer = hf_trainer(tmp_path, callback, kind=RunsOut, auto_find_batch_size=True)
        trainer.train()
        assert trainer._train_batch_size < tiny_run.BATCH_SIZE
        assert callback.monitor.summary.values["total/samples"] == tiny_run.truth()["total/samples"]

    def test_an_error_of_ours_is_reported_once_and_swallowed(self, tmp_path, caplog):
        class BrokenMonitor:
            def __getattr__(self, name):
                raise ValueError("broken on purpose")

        class Break(TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                callback.monitor = BrokenMonitor()

        def train(*callbacks):
            model = tiny_run.model()
            trainer = hf_trainer(
                tmp_path,
                *callbacks,
                model=model,
                eval_strategy="steps",
                eval_steps=2,
                save_strategy="steps",
                save_steps=2,
            )
            trainer.train()
            return trainer, tiny_run.parameters(model)

        _, expected = train()
        callback = quick_callback()
        with caplog.at_level(logging.ERROR, logger="flopwatch"):
            trainer, parameters = train(callback, Break())
        assert trainer.state.global_step == 6
        assert torch.equal(parameters, expected)
        parts = [record.args[0] for record in caplog.records if record.name == "flopwatch"]
        assert len(parts) == len(set(parts))
        assert {"on_step_begin", "_read_batch", "on_step_end", "on_log", "on_evaluate", "on_save", "end"} <= set(parts)
        assert not traces_on(trainer)
