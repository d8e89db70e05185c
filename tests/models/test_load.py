"""Models by name, by config file, by function."""

import json
from pathlib import Path

import pytest
import torch

import flopwatch
from flopwatch.models.load import dummy_batch, load_model
from flopwatch.models.presets import PRESETS


@pytest.mark.requirement("R24")
@pytest.mark.parametrize(
    ("name", "parameters"), [("tiny", 228_096), ("small", 7_255_552), ("medium", 41_604_096), ("1b", 1_339_674_624)]
)
def test_presets_have_the_parameters_their_sizes_give(name: str, parameters: int) -> None:
    sizes = PRESETS[name]
    width, layers = sizes.width, sizes.layers
    per_layer = 12 * width**2 + 13 * width  # qkv, projection, two MLP matrices; their biases and two norms
    by_formula = 2 * sizes.vocab_size * width + layers * per_layer + 2 * width

    model = load_model(name)

    assert sum(parameter.numel() for parameter in model.parameters()) == by_formula == parameters
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_a_preset_learns() -> None:
    torch.manual_seed(0)
    model = load_model("tiny", device="cpu")
    ids = torch.randint(0, 1000, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_preset_recomputes_its_blocks_when_asked() -> None:
    model = load_model("tiny")
    plain = flopwatch.count_flops(model, dummy_batch(model, 2, 32))
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    checkpointed = flopwatch.count_flops(model, dummy_batch(model, 2, 32))

    assert checkpointed.model_flops == plain.model_flops
    assert checkpointed.recompute_flops > plain.recompute_flops


def test_a_config_file_is_built_as_the_class_it_names(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    settings = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_attention_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(settings))

    model = load_model(str(tmp_path / "config.json"))

    assert type(model).__name__ == "BertForMaskedLM"
    assert type(load_model(str(tmp_path))).__name__ == "BertForMaskedLM"
    assert model.training


def test_a_function_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models.py").write_text(
        "import torch\ndef net(): return torch.nn.Linear(3, 2)\ndef nothing(): return 3\n"
    )
    monkeypatch.chdir(tmp_path)

    assert isinstance(load_model("my_models:net"), torch.nn.Linear)
    with pytest.raises(flopwatch.InputError, match=r"returned int, not a torch\.nn\.Module"):
        load_model("my_models:nothing")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gigantic", "must be a preset"),
        ("nowhere.json", "config file nowhere.json does not exist"),
        ("os:nonexistent", "cannot load the model 'os:nonexistent'"),
        ("no_such_module_here:f", "cannot load"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_advice(spec: str, says: str) -> None:
    with pytest.raises(flopwatch.InputError, match=says):
        load_model(spec)
