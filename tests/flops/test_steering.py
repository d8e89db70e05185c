"""What steers a cost besides shapes is found, and then no law is called exact."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import flopwatch

pytestmark = pytest.mark.slow


class PackedGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(16, 32, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.recurrent(packed)[1].sum()


class LabelledHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        keep = labels != -100
        return {"loss": F.cross_entropy(self.head(self.embedding(input_ids)[keep]), labels[keep])}


class LayerDrop(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.layers, self.drop = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.drop:
                continue
            x = layer(x)
        return x.sum() + 0 * self.layers[0](x).sum()


IDS = torch.randint(0, 64, (4, 16))


def test_sizes_that_come_from_lengths_make_no_law() -> None:
    batch = {"x": torch.randn(3, 20, 16), "lengths": torch.tensor([20, 5, 3])}
    law = flopwatch.fit_flops_law(PackedGru(), batch)

    assert not law.exact
    assert law.per_batch
    assert "'lengths'" in law.notes[0]


def test_a_head_on_labelled_positions_makes_no_law() -> None:
    law = flopwatch.fit_flops_law(LabelledHead(), {"input_ids": IDS, "labels": IDS})

    assert law.per_batch
    assert "'labels'" in law.notes[0]


def test_layer_drop_is_one_draw_unless_it_is_off() -> None:
    x = torch.randn(4, 8)

    assert any("another draw" in note for note in flopwatch.count_flops(LayerDrop(0.5), x).notes)
    assert not flopwatch.fit_flops_law(LayerDrop(0.5), x).exact
    assert flopwatch.fit_flops_law(LayerDrop(0.0), x).exact


def test_the_length_of_a_target_is_a_variable_of_its_own() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.encoder, self.decoder = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 32)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            source = self.encoder(self.embedding(input_ids))
            return self.decoder(self.embedding(labels)).sum() + source.sum()

    model = Pair()
    law = flopwatch.fit_flops_law(model, {"input_ids": IDS, "labels": IDS})

    longer = {"input_ids": torch.zeros(4, 24, dtype=torch.long), "labels": IDS}
    assert law.exact
    assert law.model_flops(4, 24) == flopwatch.count_flops(model, longer).model_flops


def test_a_shape_outside_of_the_domain_is_counted_first() -> None:
    class Bends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = nn.Embedding(64, 16), nn.Linear(16, 16)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.layer(self.embedding(input_ids))
            return x.sum() if input_ids.shape[1] < 100 else self.layer(x).sum()

    model = Bends()
    law = flopwatch.fit_flops_law(model, {"input_ids": IDS})
    once = 2 * 16 * 16

    assert law.exact_for(4, 16)
    assert law.model_flops(1, 16) == 16 * once * 3
    assert law.model_flops(1, 200) == 200 * once * 6


class StopsWhenSure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
            if x.mean() > 0.3:
                break
        return x


class DrawsItsSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x[: int(torch.randint(1, 4, ()))])
        return out


def test_early_exits_and_drawn_sizes_make_no_law() -> None:
    by_activations = flopwatch.fit_flops_law(StopsWhenSure(), torch.randn(4, 8))
    by_chance = flopwatch.fit_flops_law(DrawsItsSize(), torch.randn(4, 8))

    assert not by_activations.exact
    assert not by_chance.exact
    assert "activations" in by_activations.notes[0]
    assert "random draw" in by_chance.notes[0]
