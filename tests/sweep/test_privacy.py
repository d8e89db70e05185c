"""Epsilon is what Opacus's own accountants say, for the training that was asked about."""

import math
import random
import warnings
from dataclasses import asdict

import pytest

from flopwatch.decode import read_record
from flopwatch.errors import InputError
from flopwatch.records.trial import Measured, TrialSpec, content_key
from flopwatch.sweep.spec.matrix import expand, read_matrix
from flopwatch.sweep.trainers.privacy import privacy_spent, training_plan

pytestmark = pytest.mark.slow

accountants = pytest.importorskip("opacus.accountants")

CLASSES = {
    "rdp": accountants.RDPAccountant,
    "prv": accountants.PRVAccountant,
    "gdp": accountants.GaussianAccountant,
}


def by_opacus(accountant, noise, rate, steps, delta):
    """As a training loop does it: one `step` of the accountant for each step of the optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = CLASSES[accountant]()
        for _ in range(steps):
            one.step(noise_multiplier=noise, sample_rate=rate)
        return one.get_epsilon(delta=delta)


def random_settings(seed):
    chance = random.Random(seed)
    size = chance.randint(500, 100_000)
    batch_size = max(1, int(size * 10 ** chance.uniform(-3, -1)))
    settings = {"dataset_size": size, "delta": 10 ** chance.uniform(-7, -4)}
    length = {"steps": chance.randint(1, 2000)} if chance.random() < 0.5 else {"epochs": chance.randint(1, 5)}
    return settings | length, batch_size, chance.uniform(0.7, 4.0)


@pytest.mark.parametrize(
    ("accountant", "count"),
    [("rdp", 50), ("gdp", 50), ("prv", 8), pytest.param("prv", 50, marks=pytest.mark.campaign)],
)
def test_epsilon_is_opacus_own_for_random_settings(accountant, count):
    compared = 0
    for seed in range(count):
        privacy, batch_size, noise = random_settings(seed)
        found = privacy_spent({**privacy, "accountant": accountant}, batch_size, noise)
        rate = batch_size / privacy["dataset_size"]
        steps = privacy.get("steps") or math.ceil(privacy["epochs"] * privacy["dataset_size"] / batch_size)
        assert (found.sample_rate, found.steps, found.accountant) == (rate, steps, accountant), (seed, found)
        if found.epsilon is None:
            with pytest.raises(ValueError, match="must have different signs"):  # the Gaussian one, for some
                by_opacus(accountant, noise, rate, steps, privacy["delta"])
            continue
        compared += 1
        expected = by_opacus(accountant, noise, rate, steps, privacy["delta"])
        assert found.epsilon == pytest.approx(expected, rel=1e-12), (seed, found)
    assert compared >= 0.9 * count


def test_a_part_of_a_step_counts_as_a_whole_one():
    assert training_plan({"dataset_size": 1000, "epochs": 1}, 300)[1] == 4
    assert training_plan({"dataset_size": 49, "epochs": 1}, 1)[1] == 49  # 1 / (1 / 49) is 48.99... in floats
    assert training_plan({"sample_rate": 0.1, "epochs": 3}, 7)[1] == 30
    assert training_plan({"sample_rate": 0.1, "steps": 5}, 7)[1] == 5


@pytest.mark.parametrize(
    ("accountant", "batch_size", "target"),
    [
        ("rdp", 512, 3.0),
        ("prv", 512, 3.0),
        ("gdp", 512, 3.0),
        pytest.param("prv", 6, 2.0, marks=pytest.mark.campaign),
        ("prv", 60, 0.05),
    ],
)
def test_the_noise_for_a_target_keeps_epsilon_at_most_there(accountant, batch_size, target):
    privacy = {"dataset_size": 50_000, "epochs": 1, "delta": 1e-5, "target_epsilon": target}
    found = privacy_spent({**privacy, "accountant": accountant}, batch_size, 1.0)

    assert target - 0.011 <= found.epsilon <= target
    assert found.accountant == accountant
    assert found.epsilon == by_opacus(accountant, found.noise_multiplier, batch_size / 50_000, found.steps, 1e-5)
    assert found.steps == math.ceil(50_000 / batch_size)


def test_a_target_nobody_can_reach_is_told():
    privacy = {"sample_rate": 0.01, "steps": 1000, "delta": 1e-5, "target_epsilon": 0.01, "accountant": "rdp"}
    found = privacy_spent(privacy, 4, 1.0)

    assert found.epsilon is None
    assert "privacy budget is too low" in found.note


def test_without_noise_there_is_no_epsilon():
    found = privacy_spent({"sample_rate": 0.1, "steps": 5, "delta": 1e-5, "accountant": "prv"}, 4, 0.0)

    assert found.epsilon is None
    assert found.note == "epsilon is infinite, because the noise multiplier is 0"


def test_a_batch_larger_than_the_data_has_no_epsilon():
    """`flopwatch fit` tries larger batches than the matrix named."""
    found = privacy_spent({"dataset_size": 10, "steps": 5, "delta": 1e-5, "accountant": "rdp"}, 16, 1.0)

    assert found.epsilon is None
    assert found.note == "a batch of 16 is larger than the data set"


def test_a_grid_of_gigabytes_is_not_made_and_the_bound_of_rdp_is_given_by_its_name():
    found = privacy_spent({"sample_rate": 0.1, "steps": 1000, "delta": 1e-5, "accountant": "prv"}, 4, 0.3)

    assert found.accountant == "rdp"
    assert "looser bound of the accountant rdp" in found.note
    assert found.epsilon == by_opacus("rdp", 0.3, 0.1, 1000, 1e-5)


def test_what_opacus_warns_of_stands_in_the_note():
    found = privacy_spent({"sample_rate": 0.01, "steps": 100, "delta": 1e-5, "accountant": "gdp"}, 4, 1.0)

    assert "GDP accounting is experimental" in found.note


def specs(**settings):
    given = {"trainer": ["standard", "ghost"], "model": "tiny", "batch_size": [4], "seq_len": [8]}
    return expand(read_matrix(None, {**given, **settings}))


def test_only_private_trainers_are_asked_and_the_others_are_not_measured_again():
    plain = {spec.trainer: spec for spec in specs()}
    asked = {spec.trainer: spec for spec in specs(privacy={"dataset_size": 1000, "epochs": 2})}

    assert content_key(plain["standard"], {}) == content_key(asked["standard"], {})
    assert content_key(plain["ghost"], {}) != content_key(asked["ghost"], {})
    assert asked["ghost"].privacy == {"delta": 1e-3, "dataset_size": 1000, "epochs": 2, "accountant": "prv"}
    assert read_record(TrialSpec, asked["ghost"].to_json()) == asked["ghost"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy": {"epochs": 2}}, "exactly one of dataset_size and sample_rate"),
        (
            {"privacy": {"dataset_size": 9, "sample_rate": 0.1, "epochs": 2}},
            "exactly one of dataset_size and sample_rate",
        ),
        ({"privacy": {"dataset_size": 9}}, "exactly one of epochs and steps"),
        ({"privacy": {"dataset_size": 3, "epochs": 1}}, "less than the batch size of 4"),
        ({"privacy": {"dataset_size": 9, "epochs": 1, "delta": 1}}, "less than 1"),
        ({"privacy": {"dataset_size": 9, "epochs": 1, "accountant": "moments"}}, "'prv', 'rdp' or 'gdp'"),
        ({"privacy": {"dataset_size": 9, "epochs": 1, "epsilon": 1}}, "no setting 'privacy.epsilon'"),
        ({"privacy": {"dataset_size": 9, "epochs": 1}, "trainer": "standard"}, "the matrix has only standard"),
        (
            {"privacy": {"dataset_size": 9, "epochs": 1, "target_epsilon": 3}, "options": {"noise_multiplier": 1.0}},
            "leave one out",
        ),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_before_anything_runs(settings, message):
    with pytest.raises(InputError, match=message):
        specs(**settings)


def test_what_was_spent_is_read_back():
    found = privacy_spent({"sample_rate": 0.01, "steps": 10, "delta": 1e-5, "accountant": "rdp"}, 4, 1.0)

    assert read_record(Measured, asdict(Measured(privacy=found))).privacy == found
