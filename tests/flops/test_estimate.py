"""The estimate: close where it claims to be, and honest that it is one."""

import pytest
import torch
from torch import nn

import flopwatch
from support.quick import for_each
from testbeds.architectures import ARCHITECTURES, Architecture, true_flops

DECODERS = [item for item in ARCHITECTURES if item.kind in ("dense decoder", "MoE decoder")]


@pytest.mark.requirement("R21")
@for_each(DECODERS)
def test_it_is_within_five_percent_on_every_decoder(architecture: Architecture) -> None:
    batch = architecture.batch(2, 32)
    truth = true_flops(architecture.build(eager=True), batch)

    count = flopwatch.count_flops(architecture.build(), batch, method="estimate")

    assert abs(count.model_flops / truth - 1) <= 0.05
    assert count.method == "estimate"
    assert "are estimated" in count.notes[0]
    assert count.coverage is None


@for_each(DECODERS)
def test_frozen_weights_and_padding_are_taken_into_account(architecture: Architecture) -> None:
    batch, eager, model = architecture.batch(2, 32), architecture.build(eager=True), architecture.build()
    batch["attention_mask"][1, 20:] = 0
    for each in (model, eager):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("layers.1" in name or ".h.1." in name)
    truth = sum(true_flops(eager, architecture.batch(1, length)) for length in (32, 20))

    estimate = flopwatch.count_flops(model, batch, method="estimate").model_flops

    # Two layers of which one trains: where exactly gradients stop weighs far more here than in a real model.
    assert abs(estimate / truth - 1) <= 0.10


@pytest.mark.requirement("R19")
def test_profile_model_flops_is_the_estimate_and_runs_nothing() -> None:
    class NeverRun(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 16)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            raise AssertionError("was run")

    flops = flopwatch.profile_model_flops(NeverRun(), {"input_ids": torch.ones(2, 5, dtype=torch.long)})

    assert flops == 2 * 10 * 8 * 16 * 2  # forward and weight gradient; the input needs none
