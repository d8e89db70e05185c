"""What a step of each trainer costs."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flopwatch import count_flops
from flopwatch.models.load import load_model
from flopwatch.sweep.trainers.batch import trial_batch
from flopwatch.sweep.trainers.protocol import TrainerSettings, load_trainer
from flopwatch.sweep.worker.step_cost import count_step
from support.tiny_transformers import build

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ALL = ["standard", "dpsgd", "ghost", "fast"]
B, T, VOCABULARY, WIDTH, INNER = 3, 10, 23, 7, 11


class OwnLinear(nn.Module):
    """A layer Opacus has no rule for, so it goes by functorch."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class Perceptron(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, INNER)
        self.head = head or nn.Linear(INNER, VOCABULARY, bias=False)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.inner(self.tokens(input_ids)).relu())
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def ready(name, model, batch, **settings):
    """A trainer that has made a step, as after warm-up."""
    trainer = load_trainer(name)(model, TrainerSettings(len(batch["labels"]), CPU, **settings))
    trainer.backward(trainer.forward(batch))
    trainer.update()
    return trainer


def by_torch(trainer, batch):
    with FlopCounterMode(display=False) as counter:
        trainer.backward(trainer.forward(batch))
        trainer.update()
    return counter.get_total_flops()


INNER_FLOPS, HEAD_FLOPS = 2 * B * T * WIDTH * INNER, 2 * B * T * INNER * VOCABULARY
FORWARD = INNER_FLOPS + HEAD_FLOPS
BACKWARD = 2 * FORWARD  # inputs and weights; the embedding below wants a gradient
PARAMETERS = VOCABULARY * WIDTH + WIDTH * INNER + INNER + INNER * VOCABULARY
# Every sample's weight gradient is a product over its positions: together as many FLOPs as the batch's.
SAMPLES = FORWARD
# The clipped sum is a product of B factors with B gradients of each parameter.
CLIPPING = 2 * B * PARAMETERS
# Ghost: T x T products of the inputs and of the output gradients, the latter once more for the bias, and the sum of the
# products of their entries.
GRAMS = 2 * B * T * T * (WIDTH + 2 * INNER + 1) + 2 * B * T * T * (INNER + VOCABULARY + 1)

FORMULAS = {
    "standard": FORWARD + BACKWARD,
    "dpsgd": FORWARD + BACKWARD + SAMPLES + CLIPPING,
    "ghost": FORWARD + 2 * BACKWARD + GRAMS,
    "fast": FORWARD + 2 * BACKWARD + SAMPLES,
}


@pytest.mark.parametrize("name", ALL)
def test_a_perceptron_costs_what_the_formulas_say(name):
    batch = trial_batch(Perceptron(), B, T, 0, "cpu")
    trainer = ready(name, Perceptron(), batch)
    cost = count_step(trainer, Perceptron(), batch)

    assert cost.model_flops == FORWARD + BACKWARD
    assert cost.hardware_flops == FORMULAS[name] == by_torch(trainer, batch)
    assert (cost.coverage, cost.is_lower_bound, cost.notes) == (1.0, False, ())


def test_a_layer_that_goes_by_functorch_runs_once_more_and_is_counted():
    batch = trial_batch(Perceptron(), B, T, 0, "cpu")
    trainer = ready("dpsgd", Perceptron(OwnLinear(INNER, VOCABULARY)), batch)
    cost = count_step(trainer, Perceptron(), batch)

    assert cost.hardware_flops == FORMULAS["dpsgd"] + HEAD_FLOPS == by_torch(trainer, batch)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_transformer_costs_what_torch_counts(name, architecture):
    """With attention written out: torch counts nothing for the fused one on a CPU."""
    plain, model = (build(architecture) for _ in range(2))
    for each in (plain, model):
        each.set_attn_implementation("eager")
    batch = trial_batch(model, B, T, 0, "cpu")
    trainer = ready(name, model, batch)

    assert count_step(trainer, plain, batch).hardware_flops == by_torch(trainer, batch)


@pytest.mark.parametrize("name", ALL)
def test_model_flops_are_those_of_standard_training_whichever_trainer_runs(name):
    batch = trial_batch(load_model("tiny"), 2, 16, 0, "cpu")
    trainer = ready(name, load_model("tiny", device="cpu"), batch)
    cost = count_step(trainer, load_model("tiny"), batch)
    plain = count_flops(load_model("tiny"), batch)

    assert cost.model_flops == plain.model_flops
    assert (cost.hardware_flops == plain.hardware_flops) == (name == "standard")
    assert (cost.method, cost.attention) == ("trace", "full")


def test_checkpointing_costs_hardware_flops_only():
    model = load_model("tiny", device="cpu")
    model.gradient_checkpointing_enable()
    batch = trial_batch(model, 2, 16, 0, "cpu")
    plain = count_flops(load_model("tiny"), batch)
    cost = count_step(ready("standard", model, batch), model, batch)

    assert cost.model_flops == plain.model_flops
    assert cost.hardware_flops > plain.hardware_flops


class Mine:
    """A user's trainer; runs the model twice."""

    def __init__(self, model, settings):
        self.model = model

    def forward(self, batch):
        return self.model(**batch)["loss"] + self.model(**batch)["loss"]

    def backward(self, loss):
        loss.backward()

    def update(self):
        self.model.zero_grad()


def test_a_users_trainer_is_counted_as_it_runs():
    batch = trial_batch(Perceptron(), B, T, 0, "cpu")
    cost = count_step(Mine(Perceptron(), None), Perceptron(), batch)

    assert cost.hardware_flops == 2 * cost.model_flops == 2 * (FORWARD + BACKWARD)


def test_compiled_code_is_not_counted_rather_than_counted_wrongly():
    batch = trial_batch(Perceptron(), B, T, 0, "cpu")
    compiled_in_place = Perceptron()
    compiled_in_place.compile(backend="eager")
    for model in (torch.compile(Perceptron(), backend="eager"), compiled_in_place):
        cost = count_step(Mine(model, None), Perceptron(), batch)

        assert cost.hardware_flops is None
        assert cost.model_flops == FORWARD + BACKWARD
        assert cost.notes == ("the hardware FLOPs are unknown, because the trainer's compiled code hides its ops",)


def test_a_trainer_that_fails_while_it_is_counted_keeps_the_model_flops():
    class Failing(Mine):
        def update(self):
            raise RuntimeError("out of luck")

    batch = trial_batch(Perceptron(), B, T, 0, "cpu")
    cost = count_step(Failing(Perceptron(), None), Perceptron(), batch)

    assert (cost.model_flops, cost.hardware_flops) == (FORWARD + BACKWARD, None)
    assert cost.notes == ("the hardware FLOPs could not be counted: out of luck",)


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("error", [UnprintableError(), RuntimeError("x" * 10_000_000)])
def test_what_a_trainer_says_when_it_fails_costs_no_more_than_its_own_flops(error):
    class Failing(Mine):
        def update(self):
            raise error

    batch = trial_batch(Perceptron(), B, T, 0, "cpu")
    cost = count_step(Failing(Perceptron(), None), Perceptron(), batch)

    assert (cost.model_flops, cost.hardware_flops) == (FORWARD + BACKWARD, None)
    assert len(cost.notes[0]) < 1000


def test_a_trainer_with_slots_is_counted():
    class Slotted:
        __slots__ = ("model",)
        __init__, forward, backward, update = Mine.__init__, Mine.forward, Mine.backward, Mine.update

    batch = trial_batch(Perceptron(), B, T, 0, "cpu")
    cost = count_step(Slotted(Perceptron(), None), Perceptron(), batch)

    assert cost.hardware_flops == 2 * (FORWARD + BACKWARD)
