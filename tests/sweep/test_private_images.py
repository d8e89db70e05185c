"""A CNN swept from the command to the report: four trainers, a batch in parts, and what the private ones spend."""

import json

import pytest

from flopwatch.records.sweep_results import read_results
from support.warm_sweep import flopwatch_warm

pytestmark = pytest.mark.slow


def run(*words):
    return flopwatch_warm(*words, COLUMNS="120")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("images")
    settings = "--steps=2 warmup_steps=1 micro_batch_size=3 options.noise_multiplier=0.8 trace=false"
    asked = "privacy.dataset_size=50000 privacy.epochs=3 privacy.accountant=rdp"
    words = ["--trainer", "standard,dpsgd,ghost,fast", "--model", "resnet20-gn@16", "--batch-size", "8"]
    done = run("sweep", *words, *settings.split(), *asked.split(), "-o", str(place / "sweep"))
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "sweep"


def test_every_trainer_is_measured_as_samples_and_not_as_tokens(folder):
    results = read_results(folder)

    assert {name: result.outcome for name, result in results.items()} == dict.fromkeys(
        (
            "StandardTrainer_bs8_seq16",
            "DPSGDTrainer_bs8_seq16",
            "DPGhostClippingTrainer_bs8_seq16",
            "DPFastGradientClippingTrainer_bs8_seq16",
        ),
        "ok",
    )
    assert {result.measured.tokens_per_s for result in results.values()} == {None}
    assert all(result.measured.samples_per_s > 0 for result in results.values())
    assert len({result.measured.cost.model_flops for result in results.values()}) == 1


def test_private_trials_tell_epsilon_and_the_standard_one_none(folder):
    accountant = pytest.importorskip("opacus.accountants").RDPAccountant()
    accountant.history = [(0.8, 8 / 50_000, 18_750)]
    spent = {result.spec.trainer: result.measured.privacy for result in read_results(folder).values()}

    assert spent.pop("standard") is None
    assert len(spent) == 3
    assert [one.epsilon for one in spent.values()] == [accountant.get_epsilon(delta=1 / 50_000)] * 3


def test_the_report_shows_it(folder):
    text = run("report", str(folder)).stdout
    content = json.loads(run("report", str(folder), "--json").stdout)

    assert "dpsgd micro-batch=3, ghost micro-batch=3, fast micro-batch=3" in " ".join(text.split())
    assert "18,750" in text
    assert len(content["groups"][0]["privacy_spent"]) == 1
