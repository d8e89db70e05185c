"""From a trainer's name to its class."""

import sys

import pytest
import torch

from flopwatch.errors import InputError
from flopwatch.models.load import load_model
from flopwatch.sweep.trainers.batch import trial_batch
from flopwatch.sweep.trainers.protocol import TrainerSettings, load_trainer

USERS_FILE = """
import torch

class Mine:
    def __init__(self, model, settings):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=settings.options["lr"])
    def forward(self, batch):
        return self.model(**batch)["loss"]
    def backward(self, loss):
        loss.backward()
    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

class Lacking:
    def __init__(self, model, settings): ...
    def forward(self, batch): ...

not_a_class = 3
"""


@pytest.fixture
def users_folder(tmp_path, monkeypatch):
    (tmp_path / "my_trainers.py").write_text(USERS_FILE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_trainers", None)


def test_a_users_trainer_lies_in_the_working_directory(users_folder):
    model = load_model("tiny", device="cpu")
    settings = TrainerSettings(2, torch.device("cpu"), options={"lr": 0.5})
    trainer = load_trainer("my_trainers:Mine")(model, settings)
    batch = trial_batch(model, 2, 16, 0, "cpu")
    losses = []
    for _ in range(3):
        loss = trainer.forward(batch)
        trainer.backward(loss)
        trainer.update()
        losses.append(float(loss.detach()))

    assert losses[2] < losses[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_trainers:Lacking", "has no method backward, update; a trainer needs"),
        ("my_trainers:not_a_class", "is a int; name a class instead"),
        ("my_trainers:Missing", "cannot load the trainer 'my_trainers:Missing'"),
        ("nowhere.to_be:Found", "No module named 'nowhere'"),
    ],
)
def test_what_is_no_trainer_is_refused_with_the_reason(users_folder, name, message):
    with pytest.raises(InputError, match=message):
        load_trainer(name)
