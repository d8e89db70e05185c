"""A release of a framework that lacks a private name costs what the name was for, and nothing of the training's."""

from types import SimpleNamespace

import torch

from flopwatch.library_internals import (
    find_trainer,
    guarded_part,
    lightning_logs_this_step,
    without_fabric_wrapper,
)


class Trainer:
    """As much of a Trainer as calls its callbacks."""

    def __init__(self, callbacks):
        self.callback_handler = SimpleNamespace(callbacks=callbacks)

    def train(self, find):
        return find()


def test_the_trainer_is_found_only_if_it_calls_this_callback():
    callback, other = object(), object()
    trainer = Trainer([callback])

    assert trainer.train(lambda: find_trainer(callback)) is trainer
    assert trainer.train(lambda: find_trainer(other)) is None


def test_without_run_epoch_the_public_training_step_is_guarded():
    assert guarded_part(SimpleNamespace(_run_epoch=None)) == "_run_epoch"
    assert guarded_part(SimpleNamespace()) == "training_step"


def test_without_the_logger_connector_lightnings_documented_rule_decides():
    def logs(step, **more):
        return lightning_logs_this_step(SimpleNamespace(global_step=step, log_every_n_steps=50, **more))

    assert [step for step in range(1, 160) if logs(step)] == [50, 100, 150]
    assert logs(7, _logger_connector=SimpleNamespace(should_update_logs=True))
    assert not logs(50, _logger_connector=SimpleNamespace(should_update_logs=False))


def test_a_model_that_fabric_has_not_wrapped_is_itself():
    model = torch.nn.Linear(2, 2)
    assert without_fabric_wrapper(model) is model
