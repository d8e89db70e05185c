"""The four trainers train."""

import warnings

import pytest
import torch

from flopwatch.errors import InputError, UnsupportedError
from flopwatch.models.load import load_model
from flopwatch.sweep.trainers.batch import trial_batch
from flopwatch.sweep.trainers.protocol import TrainerSettings, load_trainer
from support.tiny_transformers import build

CPU = torch.device("cpu")
ALL = ["standard", "dpsgd", "ghost", "fast"]


def steps(name, model, batch, count=6, **settings):
    trainer = load_trainer(name)(model, TrainerSettings(len(batch["labels"]), CPU, **settings))
    losses = []
    for _ in range(count):
        loss = trainer.forward(batch)
        losses.append(float(loss.detach()))
        trainer.backward(loss)
        trainer.update()
    return losses


@pytest.mark.requirement("R23")
@pytest.mark.parametrize("trainer", ALL)
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        ("tiny", "fp32"),
        pytest.param("tiny", "bf16", marks=pytest.mark.portable),
        pytest.param("small", "fp32", marks=pytest.mark.campaign),
    ],
)
def test_a_preset_learns_with_every_trainer(trainer, size, dtype):
    torch.manual_seed(0)
    model = load_model(size, device="cpu")
    options = {"lr": 1e-3, "noise_multiplier": 0.0}
    losses = steps(trainer, model, trial_batch(model, 4, 32, 0, "cpu"), dtype=dtype, options=options)

    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_every_trainer_sees_the_same_loss(name):
    first = {}
    for trainer in ALL:
        model = build(name).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        first[trainer] = steps(trainer, model, trial_batch(model, 3, 8, 0, "cpu"), count=1)[0]

    assert list(first.values()) == pytest.approx([first["standard"]] * 4, rel=1e-5)


def test_noise_is_added_as_asked():
    """With next to nothing let through by clipping, what is left in the gradient is the noise: sigma x norm / batch."""
    torch.manual_seed(0)
    for name in ("dpsgd", "ghost", "fast"):
        model = load_model("tiny", device="cpu")
        options = {"noise_multiplier": 1e6, "max_grad_norm": 1e-6}
        trainer = load_trainer(name)(model, TrainerSettings(4, CPU, options=options))
        trainer.backward(trainer.forward(trial_batch(model, 4, 8, 0, "cpu")))
        trainer.optimizer.pre_step()
        spread = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).std()
        assert float(spread) == pytest.approx(1 / 4, rel=0.01)


def test_autocast_reaches_the_matmuls():
    model = load_model("tiny", device="cpu")
    seen = []
    model.head.register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    steps("standard", model, trial_batch(model, 2, 8, 0, "cpu"), count=1, dtype="bf16")

    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("trainer", ["dpsgd", "ghost", "fast"])
def test_checkpointing_does_not_go_with_private_trainers(trainer):
    model = load_model("tiny", device="cpu")
    model.gradient_checkpointing_enable()

    with pytest.raises(UnsupportedError, match=r"checkpointing runs every layer a second time.*turn checkpointing off"):
        load_trainer(trainer)(model, TrainerSettings(2, CPU))


def test_tied_weights_go_with_all_but_ghost_clipping():
    model = build("llama_tied")
    batch = trial_batch(model, 3, 8, 0, "cpu")
    with pytest.raises(UnsupportedError, match=r"embed_tokens.weight and lm_head.weight are tied.*tie_word_embeddings"):
        load_trainer("ghost")(model, TrainerSettings(3, CPU))
    for trainer in ("standard", "dpsgd", "fast"):
        assert len(steps(trainer, build("llama_tied"), batch, count=2)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_nrom": 1.0}, "no option 'max_grad_nrom'; they have lr, max_grad_norm, noise_multiplier"),
        ({"lr": "fast"}, "lr must be a number of at least 0, got 'fast'"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        load_trainer("standard")(load_model("tiny", device="cpu"), TrainerSettings(2, CPU, options=options))


@pytest.mark.slow
def test_opacus_leaves_the_programs_log_and_warnings_alone():
    """In a fresh interpreter, because Opacus does it when it is first imported."""
    import subprocess
    import sys

    code = """
import logging, warnings
warnings.simplefilter("error")
from flopwatch.sweep.trainers.opacus_internals import load_opacus
load_opacus()
assert logging.getLogger().handlers == []
try:
    warnings.warn("of the user")
except UserWarning:
    print("raised")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("raised\n", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_model("tiny", device="cpu")
        steps("ghost", model, trial_batch(model, 2, 8, 0, "cpu"), count=1)
