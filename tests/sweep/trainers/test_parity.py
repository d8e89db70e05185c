"""The DP trainers clip what they should, and ghost and fast clipping are two algorithms."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flopwatch.models.load import load_model
from flopwatch.sweep.trainers import builtin as opacus_two_pass
from flopwatch.sweep.trainers.batch import trial_batch
from flopwatch.sweep.trainers.protocol import TrainerSettings, load_trainer
from flopwatch.sweep.trainers.unsupported import tied_parameters
from support.parity import parity, sample_gradients
from support.tiny_transformers import build

ARCHITECTURES = ["llama", "qwen3", "gpt2", "bert", "vit"]
CPU = torch.device("cpu")


@pytest.mark.requirement("R23")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_clipped_gradients_are_those_of_a_loop_over_the_samples(name):
    model = build(name)
    differences = parity(model, trial_batch(model, 3, 8, 0, "cpu"))

    assert list(differences) == ["dpsgd", "ghost", "fast"]
    assert max(differences.values()) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_what_is_left_is_rounding_because_it_vanishes_in_double_precision(name):
    """Llama and Qwen3 normalise in fp32 whatever they are given, so they cannot show it."""
    model = build(name, torch.float64)
    batch = trial_batch(model, 3, 8, 0, "cpu")
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}

    assert max(parity(model, batch).values()) < 1e-12


def test_the_loop_itself_clips_half_of_the_samples_and_agrees_with_the_definition():
    """Independent of our code: one sample after the other by hand, as Abadi et al. (arXiv 1607.00133) define it."""
    model = build("vit", torch.float64)
    batch = trial_batch(model, 3, 8, 0, "cpu")
    batch["pixel_values"] = batch["pixel_values"].double()
    rows = []
    for index in range(3):
        model.zero_grad()
        model(**{key: value[index : index + 1] for key, value in batch.items()}).loss.backward()
        rows.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    found = [torch.cat([g.flatten() for g in sample.values()]) for sample in sample_gradients(model, batch)]

    assert all(torch.allclose(one, other) for one, other in zip(rows, found, strict=True))
    assert len({round(float(row.norm()), 6) for row in rows}) == 3


def test_parity_sees_a_norm_that_is_wrong():
    """The padding token's gradient: Opacus counts it, torch does not make it."""
    model = build("bert")
    batch = trial_batch(model, 3, 8, 0, "cpu")
    batch["input_ids"][:, ::2] = model.bert.embeddings.word_embeddings.padding_idx

    assert parity(model, batch)["dpsgd"] > 0.1


def test_the_model_stays_as_it_is():
    model = load_model("tiny", device="cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parity(model, trial_batch(model, 3, 8, 0, "cpu"), trainers=["ghost"])

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(hasattr(parameter, "grad_sample") for parameter in model.parameters())
    assert not hasattr(model, "autograd_grad_sample_hooks")


class Shapes(TorchDispatchMode):
    """Every tensor made."""

    def __init__(self):
        super().__init__()
        self.made = set()
        self.products = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.made.add(tuple(out.shape))
            if func._schema.name == "aten::bmm":
                self.products.add(tuple(out.shape))
        return out


class OneLayer(nn.Module):
    """Embeddings that are frozen, and one linear layer of 11 inputs and 13 outputs."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(13, 11).requires_grad_(False)
        self.head = nn.Linear(11, 13, bias=False)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.tokens(input_ids))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def shapes_of(name):
    model = OneLayer()
    trainer = load_trainer(name)(model, TrainerSettings(3, CPU))
    batch = trial_batch(model, 3, 5, 0, "cpu")
    trainer.forward(batch)  # finds out what the samples' losses are
    model = OneLayer()
    trainer = load_trainer(name)(model, TrainerSettings(3, CPU))
    with Shapes() as shapes:
        trainer.backward(trainer.forward(batch))
        trainer.update()
    return shapes


PER_SAMPLE_GRADIENT, GRAM = (3, 13, 11), (3, 5, 5)


def test_ghost_clipping_multiplies_positions_and_never_makes_a_samples_gradient():
    shapes = shapes_of("ghost")

    assert GRAM in shapes.products
    assert PER_SAMPLE_GRADIENT not in shapes.made


@pytest.mark.parametrize("trainer", ["fast", "dpsgd"])
def test_fast_clipping_and_hooks_make_every_samples_gradient_and_no_product_of_positions(trainer):
    shapes = shapes_of(trainer)

    assert PER_SAMPLE_GRADIENT in shapes.made
    assert GRAM not in shapes.made


def test_fast_clipping_drops_the_samples_gradients_that_hooks_keep():
    kept = {}
    for name in ("dpsgd", "fast"):
        model = OneLayer()
        trainer = load_trainer(name)(model, TrainerSettings(3, CPU))
        trainer.backward(trainer.forward(trial_batch(model, 3, 5, 0, "cpu")))
        kept[name] = model.head.weight.grad_sample

    assert kept["dpsgd"].shape == PER_SAMPLE_GRADIENT
    assert kept["fast"] is None


class OwnHead(nn.Module):
    """A layer Opacus has no rule for, so it goes by functorch."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class TiedAcrossPaths(OneLayer):
    def __init__(self):
        super().__init__()
        self.tokens.requires_grad_(True)
        self.head = OwnHead(self.tokens.weight)


def test_tying_that_opacus_does_not_notice_is_noticed(monkeypatch):
    """The embedding has a ghost norm and the head goes by functorch: Opacus raises nothing and clips wrongly."""
    model = TiedAcrossPaths()
    assert tied_parameters(model) == ["tokens.weight", "head.weight"]

    monkeypatch.setattr(opacus_two_pass, "check_supported", lambda trainer, model: None)
    differences = parity(model, trial_batch(model, 3, 5, 0, "cpu"))

    assert differences["fast"] < 1e-5 < 0.01 < differences["ghost"]
