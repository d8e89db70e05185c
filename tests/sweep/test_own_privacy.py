"""A trainer of the user says that it is private: it gets epsilon, and stands with the private trainers."""

import json
import warnings
from dataclasses import replace

import pytest

from flopwatch.errors import InputError
from flopwatch.records.privacy import Privacy
from flopwatch.records.sweep_results import read_results
from flopwatch.sweep.spec.matrix import expand, read_matrix
from flopwatch.sweep.trainers.privacy import declared_spent
from flopwatch.sweep.trainers.protocol import declared_privacy
from support.few_results import ran, summary_of
from support.warm_sweep import flopwatch_warm

PLAN = {"dataset_size": 1000, "epochs": 2, "delta": 1e-3, "accountant": "rdp"}
OWN = """
import torch

from flopwatch.sweep import Privacy


class DPLoop:
    # DP-SGD, one sample at a time

    def __init__(self, model, settings):
        noise, bound = settings.options.get("noise_multiplier", 1.0), settings.options.get("max_grad_norm", 1.0)
        self.privacy = Privacy(noise_multiplier=noise, max_grad_norm=bound)
        self.model, self.size = model, settings.batch_size
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]

    def forward(self, batch):
        rows = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(self.size)]
        return [self.model(**row)["loss"] for row in rows]

    def backward(self, losses):
        self.sums = [torch.zeros_like(weight) for weight in self.weights]
        for loss in losses:
            gradients = torch.autograd.grad(loss, self.weights)
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            share = (self.privacy.max_grad_norm / norm).clamp(max=1)
            self.sums = [total + share * gradient for total, gradient in zip(self.sums, gradients)]

    def update(self):
        scale = self.privacy.noise_multiplier * self.privacy.max_grad_norm
        with torch.no_grad():
            for weight, total in zip(self.weights, self.sums):
                weight -= 0.1 * (total + scale * torch.randn_like(total)) / self.size


class Silent(DPLoop):
    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.privacy = Privacy(max_grad_norm=1.0)

    def update(self):
        pass
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A class that declares its noise beside built-in trainers, and one that keeps its noise to itself."""
    place = tmp_path_factory.mktemp("own")
    (place / "private.py").write_text(OWN)
    words = "--trainer standard,dpsgd,private:DPLoop,private:Silent --model tiny --batch-size 2,4 --seq-len 16"
    words += " --steps 2 warmup_steps=1 trace=false options.noise_multiplier=0.8"
    words += " privacy.dataset_size=1000 privacy.epochs=2 privacy.accountant=rdp"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        done = flopwatch_warm("sweep", *words.split(), "-o", str(place / "sweep"), COLUMNS="120")
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "sweep"


def by_opacus(batch_size, noise=0.8):
    accountant = pytest.importorskip("opacus.accountants").RDPAccountant()
    accountant.history = [(noise, batch_size / 1000, 2 * 1000 // batch_size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accountant.get_epsilon(delta=1e-3)


@pytest.mark.slow
def test_an_own_class_that_declares_its_noise_gets_the_epsilon_of_opacus_as_dpsgd_does(swept):
    spent = {(r.spec.label, r.spec.batch_size): r.measured.privacy for r in read_results(swept).values()}

    for batch_size in (2, 4):
        assert spent["DPLoop", batch_size].epsilon == by_opacus(batch_size)
        assert spent["DPLoop", batch_size] == spent["DPSGDTrainer", batch_size]
        assert spent["StandardTrainer", batch_size] is None
        assert spent["Silent", batch_size].epsilon is None
        assert spent["Silent", batch_size].note == "epsilon is unknown: the trainer declares no noise_multiplier"


@pytest.mark.slow
def test_it_is_compared_with_the_private_trainers_in_every_part_of_the_report(swept):
    group = json.loads(flopwatch_warm("report", str(swept), "--json").stdout)["groups"][0]
    text = " ".join(flopwatch_warm("report", str(swept), COLUMNS="140").stdout.split())

    assert {(one["privacy"], one["candidates"]) for one in group["choices"]} == {("not private", 2), ("private", 4)}
    assert {tuple(row["trainers"]) for row in group["privacy_spent"]} == {("dpsgd", "DPLoop"), ("Silent",)}
    assert "Batch 2, 4 of Silent: epsilon is unknown: the trainer declares no noise_multiplier." in text


def declaring(trainer, batch, seconds, declared):
    result = ran(trainer, batch, 32, seconds)
    return replace(result, measured=replace(result.measured, declared_privacy=declared))


def test_a_declared_trainer_competes_with_private_ones_and_an_undeclared_one_with_neither():
    own = Privacy(1.0, 1.0)
    results = [declaring("mine:Own", 4, 1.0, own), declaring("mine:Own", 16, 6.0, own)]
    summary = summary_of(
        *results, ran("dpsgd", 4, 32, 2.0), ran("dpsgd", 16, 32, 3.0), declaring("mine:Other", 4, 0.1, None)
    )
    (group,) = summary.groups

    assert {(c.privacy, c.fastest.trainer, c.candidates) for c in group.choices} == {
        ("private", "dpsgd", 4),
        ("unknown", "mine:Other", 1),
    }
    assert {one.trainer: one.privacy for one in summary.trainers} == {
        "dpsgd": "private",
        "mine:Other": "unknown",
        "mine:Own": "private",
    }


@pytest.mark.parametrize(
    ("declared", "part"),
    [
        (None, "the trainer has no attribute `privacy`"),
        (Privacy(max_grad_norm=1.0), "declares no noise_multiplier"),
        (Privacy(noise_multiplier=1.0), "declares no max_grad_norm"),
        (Privacy(), "declares no noise_multiplier and no max_grad_norm"),
        (Privacy(1.0, 1.0, "shuffled"), "declares the sampling 'shuffled'"),
    ],
)
def test_what_is_not_declared_is_told_and_epsilon_stays_unknown(declared, part):
    found = declared_spent(PLAN, 4, declared)

    assert found.epsilon is None
    assert part in found.note
    assert found.noise_multiplier == (declared.noise_multiplier if declared else None)
    assert (found.sample_rate, found.steps) == (0.004, 500)


def test_a_target_needs_no_declared_noise():
    pytest.importorskip("opacus")
    found = declared_spent({**PLAN, "target_epsilon": 3.0}, 4, Privacy(max_grad_norm=1.0, sampling="poisson"))

    assert found.epsilon <= 3.0
    assert found.epsilon == by_opacus(4, found.noise_multiplier)


def test_poisson_sampling_may_be_written_as_the_name_that_it_is():
    assert Privacy(1.0, 1.0, "Poisson").why_unknown() == ""
    assert "declares the sampling 'poison'" in Privacy(1.0, 1.0, "poison").why_unknown()


def test_declared_noise_keeps_its_epsilon_whatever_the_target():
    pytest.importorskip("opacus")
    targeted = {**PLAN, "target_epsilon": 0.3}
    found = declared_spent(targeted, 4, Privacy(0.8, 1.0))
    searched = declared_spent(targeted, 4, Privacy(1.0, 1.0), is_builtin=True)

    assert (found.noise_multiplier, found.epsilon) == (0.8, by_opacus(4))
    assert found.note == "the trainer declares its noise, so the target epsilon of 0.3 does not change it"
    assert searched.epsilon <= 0.3
    assert searched.note == ""


class Declares:
    def __init__(self, privacy):
        self.privacy = privacy


def test_a_value_that_cannot_be_is_refused_and_an_attribute_of_another_kind_left_alone():
    with pytest.raises(InputError, match="Declares: max_grad_norm of Privacy must be a number above 0, got 0"):
        declared_privacy(Declares(Privacy(1.0, 0)))
    with pytest.raises(InputError, match="noise_multiplier of Privacy must be a number at least 0, got '1'"):
        declared_privacy(Declares(Privacy("1", 1.0)))
    assert declared_privacy(Declares({"engine": 1})) is None
    assert declared_privacy(Declares(Privacy(0.0, 1.0))) == Privacy(0.0, 1.0)


def test_settings_of_a_private_training_are_for_own_classes_too_and_not_for_commands():
    def asked(*trainers):
        matrix = {"trainer": list(trainers), "model": "tiny", "batch_size": 4, "seq_len": 8}
        return expand(read_matrix(None, {**matrix, "privacy": {"dataset_size": 1000, "epochs": 2}}))

    assert [bool(spec.privacy) for spec in asked("standard", "mine:Own")] == [False, True]
    with pytest.raises(InputError, match="or a class of your own that declares its privacy"):
        asked("standard", {"label": "x", "command": "true"})
