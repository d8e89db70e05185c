"""What a step minimises, and in which mode its modules run, is what the model says; a choice is told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flopwatch

X = torch.randn(8, 16)


def true_flops(model: nn.Module, loss: Callable[[Any], torch.Tensor]) -> int:
    """The step run for real under torch's own counter."""
    with FlopCounterMode(display=False) as counter:
        loss(model(X)).backward()
    model.zero_grad()
    return counter.get_total_flops()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other_head = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 100)

    def losses(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.head(hidden).mean(), self.other_head(hidden).square().mean()


class Pair(TwoHeads):
    def forward(self, x: torch.Tensor) -> Any:
        return self.losses(x)


class Named(TwoHeads):
    def forward(self, x: torch.Tensor) -> Any:
        loss, aux = self.losses(x)
        return {"loss": loss, "aux_loss": aux}


@dataclass
class Output:
    loss: torch.Tensor
    aux_loss: torch.Tensor
    logits: torch.Tensor


class AsDataclass(TwoHeads):
    def forward(self, x: torch.Tensor) -> Any:
        return Output(*self.losses(x), logits=x)


@pytest.mark.parametrize(
    ("model", "added", "names"),
    [
        (Pair(), lambda out: out[0] + out[1], "output[0], output[1]"),
        (Named(), lambda out: out["loss"] + out["aux_loss"], "loss, aux_loss"),
        (AsDataclass(), lambda out: out.loss + out.aux_loss, "loss, aux_loss"),
    ],
    ids=["a pair", "by name", "a dataclass"],
)
def test_several_losses_are_added_and_told(model: nn.Module, added: Callable[[Any], torch.Tensor], names: str) -> None:
    count = flopwatch.count_flops(model, X)

    assert count.model_flops == true_flops(model, added)
    assert any(f"the sum of the model's outputs {names};" in note for note in count.notes)


def test_the_loss_may_come_after_the_logits() -> None:
    """As nanoGPT returns them."""

    class LogitsAndLoss(TwoHeads):
        def forward(self, x: torch.Tensor) -> Any:
            logits = self.head(self.body(x))
            return logits, logits.mean()

    model = LogitsAndLoss()

    count = flopwatch.count_flops(model, X)

    assert count.model_flops == true_flops(model, lambda out: out[1])
    assert count.notes == ()


class HeadInTraining(TwoHeads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.body(x)
        return hidden.mean() + self.other_head(hidden).mean() if self.training else hidden.mean()


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_counted_in_the_mode_it_is_in(training: bool) -> None:
    model = HeadInTraining().train(training)

    count = flopwatch.count_flops(model, X)

    assert count.model_flops == true_flops(model, lambda out: out)


def test_a_module_that_stays_in_eval_mode_does_so_in_the_count() -> None:
    """Frozen batch norms, frozen towers: only a part of the model is in eval mode."""
    model = nn.Sequential(HeadInTraining().eval(), nn.Identity())

    assert flopwatch.count_flops(model, X).model_flops == true_flops(model, lambda out: out)


def test_checkpointing_that_eval_mode_switches_off_is_told() -> None:
    class Checkpointed(TwoHeads):
        gradient_checkpointing = True

        def forward(self, x: torch.Tensor) -> Any:
            hidden = checkpoint(self.body, x, use_reentrant=False) if self.training else self.body(x)
            return self.head(hidden)

    in_eval, in_training = Checkpointed().eval(), Checkpointed()

    assert any("eval mode" in note for note in flopwatch.count_flops(in_eval, X).notes)
    assert flopwatch.count_flops(in_training, X).notes == ()
