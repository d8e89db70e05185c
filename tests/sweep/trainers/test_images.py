"""Image classifiers and batches of one's own: any torch module can be trained by all four trainers."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flopwatch import count_flops
from flopwatch.errors import InputError, UnsupportedError
from flopwatch.models.load import dummy_batch, load_model
from flopwatch.sweep.spec.matrix import expand, read_matrix
from flopwatch.sweep.trainers.batch import trial_batch
from flopwatch.sweep.trainers.builtin import own_loss
from flopwatch.sweep.trainers.protocol import TrainerSettings, load_trainer, run_step, step_parts
from flopwatch.sweep.worker.step_cost import count_plain, count_step
from support.parity import parity

CPU = torch.device("cpu")

OWN = """
import random
import torch

def images(model, batch_size, seq_len):
    return torch.randn(batch_size, 3, 16, 16), torch.randint(10, (batch_size,))

def mapping(model, batch_size, seq_len):
    return {"input": torch.randn(batch_size, 3, seq_len, seq_len), "labels": torch.zeros(batch_size, dtype=torch.long)}

def alone(model, batch_size, seq_len):
    return torch.rand(batch_size, 2) + random.random()

def too_few(model, batch_size, seq_len):
    return torch.zeros(batch_size - 1, 2)

def nothing(model, batch_size, seq_len):
    return None

number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_batches.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield "own_batches"
    sys.modules.pop("own_batches", None)


def plain_cnn():
    """As people write them: takes x, gives logits, knows nothing of labels."""
    convolutions = (nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU())
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet20-gn", "resnet18-gn@32"])
def test_the_presets_flops_are_those_torch_counts_op_by_op(name):
    model = load_model(name, device="cpu")
    batch = trial_batch(model, 2, 999, 0, "cpu")
    with FlopCounterMode(display=False) as mode:
        model(**batch)["loss"].backward()

    assert count_flops(model, batch).model_flops == mode.get_total_flops()
    assert count_plain(load_model(name), batch).model_flops == mode.get_total_flops()


@pytest.mark.parametrize(("name", "parameters"), [("resnet20-gn", 272_282), ("resnet18-gn", 11_689_512)])
def test_the_presets_have_the_published_sizes(name, parameters):
    """He et al. give 0.27 million and torchvision 11,689,512; group normalisation has as many weights as BatchNorm.

    The 1 x 1 shortcuts of the one are not normalised, as in He et al.'s plain addition, so resnet18 has 1,792 fewer.
    """
    model = load_model(name)
    own = sum(parameter.numel() for parameter in model.parameters())

    assert own == parameters - (1792 if name == "resnet18-gn" else 0)


def test_another_side_is_named_behind_the_preset():
    assert trial_batch(load_model("resnet18-gn@64"), 2, 999, 0, "cpu")["pixel_values"].shape == (2, 3, 64, 64)
    assert dummy_batch(load_model("resnet18-gn"), 2, 999)["pixel_values"].shape == (2, 3, 224, 224)
    for wrong in ("resnet18-gn@0", "resnet18-gn@x", "resnet18-gn@99999", "resnet18-gn@"):
        with pytest.raises(InputError, match="after @, write the side"):
            load_model(wrong)


def test_images_have_one_length_which_is_their_side():
    specs = expand(read_matrix(None, {"model": ["resnet20-gn", "tiny"], "batch_size": 4, "seq_len": [8, 16]}))

    assert [(spec.model, spec.seq_len) for spec in specs] == [("resnet20-gn", 32), ("tiny", 8), ("tiny", 16)]


@pytest.mark.parametrize("build", [plain_cnn, lambda: load_model("resnet20-gn@8", device="cpu")])
def test_dp_trainers_clip_convolutions_as_a_loop_over_the_samples(build, own):
    torch.manual_seed(0)
    model = build().double()
    batch = trial_batch(model, 3, 8, 0, "cpu", f"{own}:images")
    batch = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}

    assert max(parity(model, batch).values()) < 1e-9


def test_a_model_without_a_loss_is_trained_by_cross_entropy(own):
    model = plain_cnn()
    batch = trial_batch(model, 5, 8, 0, "cpu", f"{own}:images")

    assert set(batch) == {"input", "labels"}
    expected = nn.functional.cross_entropy(model(batch["input"]), batch["labels"])
    assert torch.allclose(own_loss(model, model(batch["input"]), batch), expected)


@pytest.mark.parametrize("trainer", ["standard", "dpsgd", "ghost", "fast"])
def test_every_trainer_trains_it_and_its_flops_are_exact(trainer, own):
    model = plain_cnn()
    batch = trial_batch(model, 5, 8, 0, "cpu", f"{own}:images")
    made = load_trainer(trainer)(copy.deepcopy(model), TrainerSettings(5, CPU))

    def step():
        made.backward(made.forward(batch))
        made.update()

    step()
    with FlopCounterMode(display=False) as executed:
        step()
    with FlopCounterMode(display=False) as standard:
        own_loss(model, model(batch["input"]), batch).backward()
    cost = count_step(made, model, batch)

    assert (cost.model_flops, cost.hardware_flops) == (standard.get_total_flops(), executed.get_total_flops())
    assert not cost.is_lower_bound


def test_a_batch_of_ones_own_comes_from_the_seed_and_leaves_the_random_numbers_alone(own):
    model = nn.Linear(2, 2)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, again, other = (trial_batch(model, 4, 8, seed, "cpu", f"{own}:alone")["input"] for seed in (0, 0, 1))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_mapping_is_taken_as_it_is(own):
    assert trial_batch(plain_cnn(), 4, 9, 0, "cpu", f"{own}:mapping")["input"].shape == (4, 3, 9, 9)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", "should return 4 samples, but returned input with 3"),
        ("nothing", "returned a NoneType"),
        ("missing", "cannot load the batch"),
        ("number", "is a int; name a function instead"),
    ],
)
def test_what_is_no_batch_is_refused_with_what_it_was(function, message, own):
    with pytest.raises(InputError, match=message):
        trial_batch(nn.Linear(2, 2), 4, 8, 0, "cpu", f"{own}:{function}")


def test_labels_that_do_not_fit_the_logits_are_told(own):
    model = nn.Linear(2, 2)
    batch = {"input": torch.zeros(4, 2), "labels": torch.zeros(4, 3, dtype=torch.long)}
    with pytest.raises(UnsupportedError, match=r"returned no loss \(Tensor \(4, 2\)\)"):
        own_loss(model, model(batch["input"]), batch)


class WithItsLoss(nn.Module):
    """Takes labels and returns its loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"logits": logits} | ({} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)})


class WithNeededLabels(WithItsLoss):
    def forward(self, x, labels):
        return super().forward(x, labels)


def test_labels_with_a_default_are_what_the_private_trainers_ask_for():
    batch = {"x": torch.randn(4, 2), "labels": torch.randint(3, (4,))}
    assert max(parity(WithItsLoss().double(), {**batch, "x": batch["x"].double()}).values()) < 1e-9
    trainer = load_trainer("dpsgd")(WithNeededLabels(), TrainerSettings(4, CPU))
    with pytest.raises(UnsupportedError, match="private trainers call the model's forward without labels") as raised:
        trainer.forward(batch)
    assert "the default None" in str(raised.value)


class WithAnIdleLayer(WithItsLoss):
    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(2, 2)


@pytest.mark.parametrize("name", ["dpsgd", "ghost", "fast"])
def test_a_parameter_without_a_gradient_is_named_instead_of_opacus_s_message(name):
    batch = {"x": torch.randn(4, 2), "labels": torch.randint(3, (4,))}
    trainer = load_trainer(name)(WithAnIdleLayer(), TrainerSettings(4, CPU))
    with pytest.raises(UnsupportedError, match=r"^idle\.weight, idle\.bias got no gradient in the step"):
        run_step(step_parts(trainer, [batch]))


def test_an_error_of_the_users_own_code_stays_as_it_is():
    class Failing(WithItsLoss):
        def forward(self, x, labels=None):
            raise ValueError("mine")

    trainer = load_trainer("dpsgd")(Failing(), TrainerSettings(4, CPU))
    with pytest.raises(ValueError, match="mine"):
        trainer.forward({"x": torch.randn(4, 2), "labels": torch.randint(3, (4,))})
