"""Loss and accuracy per dataset, against the same numbers worked out sample by sample."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flopwatch

pytestmark = pytest.mark.requirement("R17")

NAMES = ["code", "web", "code", "books", "web", "code"]


def logged(tmp_path, *calls, **config):
    monitor = flopwatch.TrainingMonitor(tmp_path, strict=True, config={"dataset_metrics_every": 1, **config})
    for number, call in enumerate(calls):
        monitor.log_datasets(**call)
        monitor.log_step(number)
    values = monitor.log_now()
    monitor.close()
    return {key: value for key, value in values.items() if key.startswith("dataset/")}


def test_losses_are_means_over_each_datasets_samples(tmp_path):
    losses = torch.tensor([1.0, 10.0, 3.0, 7.0, 20.0, 5.0])
    values = logged(tmp_path, {"names": NAMES, "losses": losses}, {"names": ["code"], "losses": torch.tensor([7.0])})

    assert values["dataset/code/loss"] == (1.0 + 3.0 + 5.0 + 7.0) / 4
    assert values["dataset/web/loss"] == 15.0
    assert values["dataset/books/loss"] == 7.0
    assert values["dataset/code/samples"] == 4


def test_accuracy_counts_what_has_a_label(tmp_path):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 5, 4, generator=generator)
    labels = torch.randint(0, 4, (6, 5), generator=generator)
    labels[0, :3] = -100

    values = logged(tmp_path, {"names": NAMES, "logits": logits, "labels": labels})

    for dataset in set(NAMES):
        judged = [
            int(logits[sample, position].argmax()) == int(labels[sample, position])
            for sample, name in enumerate(NAMES)
            for position in range(5)
            if name == dataset and labels[sample, position] != -100
        ]
        assert values[f"dataset/{dataset}/accuracy"] == sum(judged) / len(judged)


def test_only_every_tenth_step_takes_part_by_default(tmp_path):
    monitor = flopwatch.TrainingMonitor(tmp_path, strict=True, log_every=100)
    for number in range(30):
        monitor.log_datasets(["a"], torch.tensor([float(number)]))
        monitor.log_step(number)
    values = monitor.log_now()
    monitor.close()
    assert values["dataset/a/samples"] == 3
    assert values["dataset/a/loss"] == 10.0


def test_switched_off_it_does_nothing(tmp_path):
    assert logged(tmp_path, {"names": ["a"], "losses": torch.tensor([1.0])}, log_dataset_metrics=False) == {}


def test_no_value_is_read_while_samples_are_added(tmp_path):
    class Reads(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.reads += "_local_scalar_dense" in str(function)
            return function(*args, **(kwargs or {}))

    monitor = flopwatch.TrainingMonitor(tmp_path, strict=True, config={"dataset_metrics_every": 1})
    losses, logits, labels = torch.ones(6), torch.ones(6, 3), torch.ones(6, dtype=torch.long)
    with Reads() as mode:
        monitor.log_datasets(NAMES, losses, logits, labels)
        assert mode.reads == 0
        losses[0].item()
        assert mode.reads == 1, "the guard can see one"
    monitor.close()
