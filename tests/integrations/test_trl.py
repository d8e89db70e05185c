"""The Hugging Face callback in TRL's SFTTrainer: padded, packed, and padding-free."""

import pytest
import torch

from flopwatch.integrations.hugging_face import FlopwatchCallback
from integrations import tiny_run
from integrations.tiny_hf import logged_rows
from integrations.tiny_sft import sft_trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*padding-free training"),
    pytest.mark.filterwarnings("ignore:.*packing"),
]


@pytest.mark.xfail(
    reason="wrong and exact: TRL's fused head computes its product again in an autograd function, and that counts "
    "as needed; model FLOPs are about 3 % too high, executed FLOPs are right"
)
@pytest.mark.parametrize(
    "layout",
    [
        {"padding_free": True},
        {"packing": True, "max_length": 64},
        {"packing": True, "max_length": 64, "padding_free": False},
    ],
    ids=["padding-free", "packed", "packed and padded"],
)
def test_documents_without_padding_cost_what_each_costs_alone(tmp_path, layout):
    callback = FlopwatchCallback()
    sft_trainer(tmp_path, callback, **layout).train()
    values = callback.monitor.summary.values
    for key in ("total/samples", "total/real_tokens", "total/model_flops"):
        assert values[key] == tiny_run.truth()[key]


@pytest.mark.xfail(
    reason="wrong and exact: TRL's fused head computes its product again in an autograd function, and that counts "
    "as needed; model FLOPs are about 3 % too high, executed FLOPs are right"
)
def test_lora_counts_no_weight_gradient_of_frozen_weights(tmp_path):
    """As torch counts the same adapters on an eager twin."""
    from peft import LoraConfig, get_peft_model

    from architectures import BY_NAME, true_flops

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    callback = FlopwatchCallback()
    sft_trainer(tmp_path, callback, peft_config=lora).train()
    eager = get_peft_model(BY_NAME["llama"].build(eager=True), lora).train()
    ids = [torch.tensor([row]) for row in tiny_run.rows()]
    # The first layer's inputs need no gradient here, but the embeddings do in TRL's gradient checkpointing.
    eager.enable_input_require_grads()
    flops = tiny_run.EPOCHS * sum(true_flops(eager, {"input_ids": row, "labels": row}) for row in ids)
    assert callback.monitor.summary.values["total/model_flops"] == flops < tiny_run.truth()["total/model_flops"]


def test_parameters_are_bitwise_equal_and_nothing_stays(tmp_path):
    def train(*callbacks):
        torch.manual_seed(0)
        model = tiny_run.model(dropout=0.2)
        trainer = sft_trainer(tmp_path, *callbacks, model=model, num_train_epochs=8)
        trainer.train()
        assert "training_step" not in vars(trainer)
        return tiny_run.parameters(model)

    assert torch.equal(train(), train(FlopwatchCallback()))


def test_rows_follow_the_trainers(tmp_path):
    trainer = sft_trainer(tmp_path, FlopwatchCallback(mode="estimate"))
    trainer.train()
    told = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [row["values"]["training/loss"] for row in logged_rows(tmp_path / "flopwatch")] == told
