"""The same truth when parts are frozen, adapted, cast, or recomputed."""

import peft
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import flopwatch
from flopwatch.records.flops import FlopCount
from support.quick import VARIED, for_each
from testbeds.architectures import ARCHITECTURES, SEED, Architecture, true_flops

pytestmark = pytest.mark.slow

each_architecture = for_each(in_ci=VARIED)

# peft refuses some layers (fused experts, Mamba's output): the attention projections or the classifier then.
_LORA_TARGETS = {
    "gpt_neox": ["query_key_value"],
    "phi3": ["qkv_proj"],
    "deepseek_v3": ["q_a_proj", "kv_b_proj"],
    "mamba2": ["in_proj"],
    "bert": ["query", "value"],
    "gpt2": ["c_attn"],
    "t5": ["q", "v"],
    "convnext": ["pwconv1"],
    "resnet": ["classifier.1"],
}


def counted(model: nn.Module, batch: dict[str, object], **options: object) -> FlopCount:
    torch.manual_seed(SEED)
    return flopwatch.count_flops(model, batch, **options)  # type: ignore[arg-type]


@each_architecture
def test_frozen_matrices_need_no_gradient(architecture: Architecture) -> None:
    batch = architecture.batch(2, 32)
    model, eager = architecture.build(), architecture.build(eager=True)
    for each in (model, eager):
        matrices = [parameter for parameter in each.parameters() if parameter.dim() >= 2]
        for parameter in matrices[::2]:
            parameter.requires_grad_(False)

    count = counted(model, batch)

    assert (count.model_flops, count.coverage, count.method) == (true_flops(eager, batch), 1.0, "trace")
    assert counted(model, batch, method="step").hardware_flops == count.hardware_flops


@each_architecture
def test_lora_counts_what_it_trains(architecture: Architecture) -> None:
    batch = architecture.batch(2, 32)
    targets = _LORA_TARGETS.get(architecture.name) or _attention_projections(architecture.build())
    model, eager = (
        peft.get_peft_model(
            each, peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=architecture.name == "gpt2")
        )
        for each in (architecture.build(), architecture.build(eager=True))
    )

    count = counted(model, batch)

    assert (count.model_flops, count.coverage, count.method) == (true_flops(eager, batch), 1.0, "trace")


@each_architecture
def test_autocast_changes_no_count(architecture: Architecture) -> None:
    batch = architecture.batch(2, 32)
    with torch.autocast("cpu", torch.bfloat16):
        truth = true_flops(architecture.build(eager=True), batch)
        count = counted(architecture.build(), batch)

    assert (count.model_flops, count.coverage, count.method) == (truth, 1.0, "trace")


@each_architecture
@pytest.mark.parametrize("is_other_kind", [False, pytest.param(True, marks=pytest.mark.campaign)])
@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl.NO_REENTRANT")  # torch 2.10 and earlier
def test_recomputation_is_told_apart(architecture: Architecture, is_other_kind: bool) -> None:
    """Half of the architectures use reentrant checkpointing, half the other kind; `make campaign` runs both."""
    reentrant = (ARCHITECTURES.index(architecture) % 2 == 0) != is_other_kind
    batch = architecture.batch(2, 32)
    model, eager = architecture.build(), architecture.build(eager=True)
    needed = true_flops(eager, batch)
    for each in (model, eager):
        _checkpoint(each, reentrant=reentrant)
    executed = true_flops(eager, batch)

    count, eager_count = counted(model, batch), counted(eager, batch)

    assert executed > needed
    assert (count.model_flops, count.coverage, count.method) == (needed, 1.0, "trace")
    # With eager attention torch itself sees every product that runs, so here hardware FLOPs have a truth ...
    assert (eager_count.model_flops, eager_count.hardware_flops) == (needed, executed)
    # ... and with fused attention they equal what our own mode sees in a real step.
    assert count.hardware_flops == counted(model, batch, method="step").hardware_flops


def _attention_projections(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith(("q_proj", "v_proj", "attn.qkv"))]


def _checkpoint(model: nn.Module, *, reentrant: bool) -> None:
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        return
    # ConvNeXt and ResNet have no switch of their own; a user wraps their layers.
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda module: checkpoint_wrapper(module, checkpoint_impl=_implementation(reentrant)),
        check_fn=lambda module: type(module).__name__ in ("ConvNextLayer", "ResNetBasicLayer", "ResNetBottleNeckLayer"),
    )


def _implementation(reentrant: bool) -> CheckpointImpl:
    return CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
