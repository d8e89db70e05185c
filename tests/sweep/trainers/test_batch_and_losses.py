"""Random batches, and the loss of each sample."""

import pytest
import torch
from torch import nn

from flopwatch import count_flops
from flopwatch.errors import InputError, UnsupportedError
from flopwatch.models.load import load_model
from flopwatch.sweep.trainers.batch import trial_batch
from flopwatch.sweep.trainers.builtin import find_per_sample_losses, label_losses, next_token_losses, own_loss
from support.tiny_transformers import build

TEXT = ["llama", "qwen3", "gpt2", "bert"]


def test_the_same_seed_makes_the_same_batch_and_another_does_not():
    model = load_model("tiny")
    first, again, other = (trial_batch(model, 2, 16, seed, "cpu")["input_ids"] for seed in (0, 0, 1))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (2, 16)
    assert 0 <= first.min() <= first.max() < 1000


@pytest.mark.parametrize("name", TEXT)
def test_positions_are_given_for_each_sample_where_an_embedding_looks_them_up(name):
    batch = trial_batch(build(name), 3, 8, 0, "cpu")

    assert ("position_ids" in batch) == (name in ("gpt2", "bert"))
    assert ("token_type_ids" in batch) == (name == "bert")
    for value in batch.values():
        assert len(value) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize("attention", ["full", "causal"])
def test_giving_them_does_not_change_the_flops(name, attention):
    model = build(name)
    batch = trial_batch(model, 3, 8, 0, "cpu")
    fewer = {key: value for key, value in batch.items() if key not in ("position_ids", "token_type_ids")}

    assert count_flops(model, batch, attention=attention) == count_flops(model, fewer, attention=attention)


def test_the_padding_token_is_not_drawn():
    model = build("bert")

    assert model.bert.embeddings.word_embeddings.padding_idx == 0
    assert trial_batch(model, 8, 64, 0, "cpu")["input_ids"].min() == 1


def test_a_model_that_takes_nothing_known_is_refused_and_one_that_makes_its_own_batch_is_not():
    class Odd(nn.Linear):
        pass

    with pytest.raises(InputError, match="cannot make a batch for Odd"):
        trial_batch(Odd(2, 2), 2, 4, 0, "cpu")
    Odd.trial_batch = lambda self, batch_size, seq_len: {"input": torch.ones(batch_size, seq_len)}
    assert trial_batch(Odd(2, 2), 2, 4, 0, "cpu")["input"].shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "losses"),
    [("llama", next_token_losses), ("gpt2", next_token_losses), ("bert", label_losses), ("vit", label_losses)],
)
def test_the_mean_over_samples_is_the_models_own_loss(name, losses):
    model = build(name).eval()
    batch = trial_batch(model, 4, 8, 0, "cpu")
    with torch.no_grad():
        output = model(**batch)

    assert find_per_sample_losses(model, batch) is losses
    assert float(losses(output, batch).mean()) == pytest.approx(float(output.loss), rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_a_samples_loss_is_that_of_the_sample_alone(name):
    model = build(name).eval()
    batch = trial_batch(model, 3, 8, 0, "cpu")
    together = find_per_sample_losses(model, batch)(model(**batch), batch)
    alone = [model(**{key: value[i : i + 1] for key, value in batch.items()}).loss.detach() for i in range(3)]

    assert together.tolist() == pytest.approx([float(loss) for loss in alone], rel=1e-5)


def test_ignored_labels_do_not_count():
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    labels[0, 3:] = -100
    expected = nn.functional.cross_entropy(logits[0, :3], labels[0, :3])

    assert float(label_losses({"logits": logits}, {"labels": labels})[0]) == pytest.approx(float(expected))


class Regression(nn.Module):
    """Returns a loss that is no cross-entropy."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, input_ids, labels=None):
        logits = self.embedding(input_ids)
        return {"logits": logits, "loss": logits.square().mean()}


def test_a_loss_that_cannot_be_split_over_samples_is_told():
    model = Regression()
    batch = trial_batch(model, 2, 4, 0, "cpu")
    batch["labels"] = batch["labels"] % 4
    with pytest.raises(UnsupportedError, match=r"is not the mean cross-entropy of its logits.*per_sample_losses"):
        find_per_sample_losses(model, batch)


def test_a_model_may_split_its_loss_itself():
    model = Regression()
    model.per_sample_losses = lambda output, batch: output["logits"].square().mean((1, 2))
    batch = trial_batch(model, 2, 4, 0, "cpu")

    assert find_per_sample_losses(model, batch)(model(**batch), batch).shape == (2,)


def test_a_model_without_a_loss_is_told():
    class NoLoss(Regression):
        def forward(self, input_ids):
            return {"logits": self.embedding(input_ids)}

    model = NoLoss()
    batch = trial_batch(model, 2, 4, 0, "cpu")
    with pytest.raises(UnsupportedError, match=r"NoLoss returned no loss \(dict\) for a batch of input_ids"):
        own_loss(model, model(**batch), batch)
