"""What trainers are called."""

import subprocess
import sys

import pytest

from flopwatch.errors import InputError
from flopwatch.records.trial import canonical_trainer, is_private


@pytest.mark.requirement("R23")
@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("StandardTrainer", "standard"),
        ("DPSGDTrainer", "dpsgd"),
        ("DPGhostClippingTrainer", "ghost"),
        ("DPFastGradientClippingTrainer", "fast"),
    ],
)
def test_the_documents_names_are_taken_as_written_and_kept_as_labels(name, trainer):
    assert canonical_trainer(name) == (trainer, name)
    assert canonical_trainer(trainer) == (trainer, name)


@pytest.mark.parametrize(
    ("name", "trainer"),
    [("dp-sgd", "dpsgd"), ("Ghost_Clipping", "ghost"), ("fast gradient clipping", "fast"), (" standard ", "standard")],
)
def test_spelling_does_not_matter(name, trainer):
    assert canonical_trainer(name)[0] == trainer


def test_a_class_of_the_user_goes_by_its_own_name():
    assert canonical_trainer("my_lab.training:LoraTrainer") == ("my_lab.training:LoraTrainer", "LoraTrainer")


@pytest.mark.parametrize(("typo", "meant"), [("gohst", "ghost"), ("StandartTrainer", "StandardTrainer")])
def test_an_unknown_name_is_answered_with_the_nearest_and_all_there_are(typo, meant):
    with pytest.raises(
        InputError, match=f"'{typo}'; did you mean '{meant}'.*standard, dpsgd, ghost, fast.*module:Class"
    ):
        canonical_trainer(typo)


@pytest.mark.parametrize("name", ["../evil:Class", "a b:Class", "module:", ":Class", "module:Class;rm", "m:C\nD"])
def test_what_is_no_path_of_a_class_is_refused(name):
    with pytest.raises(InputError, match=r"not of the form 'package\.module:Class'"):
        canonical_trainer(name)


def test_which_trainers_are_private():
    assert [is_private(name) for name in ("standard", "dpsgd", "ghost", "fast", "mine:Class")] == [
        False,
        True,
        True,
        True,
        None,
    ]


def test_names_and_the_runner_do_not_load_torch():
    code = "import sys, flopwatch.records.trial, flopwatch.sweep.start; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
