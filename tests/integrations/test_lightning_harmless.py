"""Lightning trains with the callback as it would without, and keeps nothing of it."""

import json
import logging

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch._dynamo.utils import counters

from flopwatch.integrations.lightning import FlopwatchCallback
from testbeds.frameworks import tiny_run
from testbeds.frameworks.tiny_lightning import ImageModule, TextModule, lightning_trainer, quick_callback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo, of itself
]


def counting_method(callback):
    records = map(json.loads, callback.monitor.log_path.read_text().splitlines())
    return [record["method"] for record in records if record["type"] == "provenance"][-1]


class TestNoTrace:
    def test_parameters_are_bitwise_equal(self, tmp_path):
        def train(*callbacks):
            torch.manual_seed(0)
            module = ImageModule()
            lightning_trainer(tmp_path, *callbacks, max_epochs=6).fit(module, ImageModule.batches())
            return tiny_run.parameters(module)

        assert torch.equal(train(), train(FlopwatchCallback()))

    @pytest.mark.parametrize(
        "what",
        [
            "a module with forward",
            *(pytest.param(what, marks=pytest.mark.campaign) for what in ("a module with a child", "the child")),
        ],
    )
    def test_a_compiled_model_has_as_many_graphs(self, tmp_path, what):
        batches = ImageModule.batches() if what == "a module with forward" else tiny_run.loader()

        def graphs(*callbacks):
            torch._dynamo.reset()
            counters.clear()
            torch.manual_seed(0)
            module = ImageModule() if what == "a module with forward" else TextModule()
            module.logs = False  # Lightning 2.6 cannot log in a compiled training_step with torch 2.13
            if what == "the child":
                module.model = torch.compile(module.model, backend="eager")
            fitted = module if what == "the child" else torch.compile(module, backend="eager")
            lightning_trainer(tmp_path, *callbacks, max_epochs=1).fit(fitted, batches)
            return counters["stats"]["unique_graphs"], tiny_run.parameters(module)

        bare, bare_parameters = graphs()
        callback = FlopwatchCallback()
        watched, watched_parameters = graphs(callback)
        assert watched == bare > 0
        assert torch.equal(watched_parameters, bare_parameters)
        assert counting_method(callback) == "step"
        of_images = 12 * ImageModule.step_flops()
        expected = of_images if what == "a module with forward" else tiny_run.truth()["total/model_flops"] // 2
        assert callback.monitor.summary.values["total/model_flops"] == expected

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_nothing_stays_on_the_trainer_even_when_the_training_raises(self, tmp_path, error):
        class Fails(TextModule):
            def training_step(self, batch, batch_idx):
                if self.global_step == 2:
                    raise error("on purpose")
                return super().training_step(batch, batch_idx)

        callback = quick_callback()
        trainer = lightning_trainer(tmp_path, callback)
        with pytest.raises((error, SystemExit)):
            trainer.fit(Fails(), tiny_run.loader())
        assert "save_checkpoint" not in vars(trainer)
        assert callback.monitor.summary.values["total/steps"] == 2


def test_an_error_of_ours_is_reported_once_and_swallowed(tmp_path, caplog):
    class BrokenMonitor:
        def __getattr__(self, name):
            raise ValueError("broken on purpose")

    class Break(Callback):
        def on_train_start(self, trainer, pl_module):
            callback.monitor = BrokenMonitor()

    def train(*callbacks):
        module = TextModule()
        trainer = lightning_trainer(tmp_path, *callbacks, val_check_interval=2)
        trainer.fit(module, tiny_run.loader(), tiny_run.loader())
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        return trainer.global_step, tiny_run.parameters(module)

    steps, expected = train()
    callback = quick_callback()
    with caplog.at_level(logging.ERROR, logger="flopwatch"):
        steps_watched, parameters = train(callback, Break())
    assert steps_watched == steps == 6
    assert torch.equal(parameters, expected)
    parts = [record.args[0] for record in caplog.records if record.name == "flopwatch"]
    assert len(parts) == len(set(parts))
    assert {"on_train_batch_start", "on_train_batch_end", "_enter", "end"} <= set(parts)


def test_a_broken_monitor_does_not_stop_a_checkpoint(tmp_path):
    callback = quick_callback()
    trainer = lightning_trainer(
        tmp_path, callback, ModelCheckpoint(tmp_path, every_n_train_steps=3), enable_checkpointing=True
    )

    class Break(Callback):
        def on_train_start(self, trainer, pl_module):
            callback.monitor = None

    trainer.callbacks.insert(1, Break())
    trainer.fit(TextModule(), tiny_run.loader())
    assert list(tmp_path.glob("*.ckpt"))
