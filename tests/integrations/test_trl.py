"""The Hugging Face callback in TRL's SFTTrainer: padded, packed, and padding-free."""

import pytest
import torch

from flopwatch.integrations.hugging_face import FlopwatchCallback
from testbeds.frameworks import tiny_run
from testbeds.frameworks.tiny_hf import logged_rows
from testbeds.frameworks.tiny_sft import model_flops, sft_trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*padding-free training"),
    pytest.mark.filterwarnings("ignore:.*packing"),
]


@pytest.mark.parametrize(
    "layout",
    [
        {"padding_free": True},
        pytest.param({"packing": True, "max_length": 64}, marks=pytest.mark.campaign),
        {"packing": True, "max_length": 64, "padding_free": False},
    ],
    ids=["padding-free", "packed", "packed and padded"],
)
def test_documents_without_padding_cost_what_each_costs_alone(tmp_path, layout):
    callback = FlopwatchCallback()
    sft_trainer(tmp_path, callback, **layout).train()
    values = callback.monitor.summary.values
    assert values["total/model_flops"] == model_flops()
    for key in ("total/samples", "total/real_tokens"):
        assert values[key] == tiny_run.truth()[key]


@pytest.mark.parametrize(
    "checkpointing",
    [
        pytest.param(True, id="checkpointed"),
        pytest.param(False, id="not checkpointed", marks=pytest.mark.campaign),
    ],
)
def test_lora_counts_no_weight_gradient_of_frozen_weights(tmp_path, checkpointing):
    """TRL's gradient checkpointing makes the embeddings ask for a gradient; the first layer then computes one."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    callback = FlopwatchCallback()
    sft_trainer(tmp_path, callback, peft_config=lora, gradient_checkpointing=checkpointing).train()
    flops = model_flops(lora_rank=4, input_gradients=checkpointing)
    assert callback.monitor.summary.values["total/model_flops"] == flops
    assert callback.monitor.summary.exact, callback.monitor.summary.notes


def test_parameters_are_bitwise_equal_and_nothing_stays(tmp_path):
    def train(*callbacks):
        torch.manual_seed(0)
        model = tiny_run.model(dropout=0.2)
        trainer = sft_trainer(tmp_path, *callbacks, model=model, num_train_epochs=3)
        trainer.train()
        assert "training_step" not in vars(trainer)
        return tiny_run.parameters(model)

    assert torch.equal(train(), train(FlopwatchCallback()))


def test_rows_follow_the_trainers(tmp_path):
    trainer = sft_trainer(tmp_path, FlopwatchCallback(mode="estimate"))
    trainer.train()
    told = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [row["values"]["training/loss"] for row in logged_rows(tmp_path / "flopwatch")] == told
