"""Before a slot is used: which trainer can train which model."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import transformers

from flopwatch import count_flops
from flopwatch.models.load import load_model
from flopwatch.process import start_ticks
from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.preflight import PreflightResult, pair_of, refusals
from flopwatch.sweep.trainers.batch import trial_batch
from flopwatch.sweep.trainers.protocol import TrainerSettings, load_trainer
from flopwatch.sweep.trainers.unsupported import layer_paths
from flopwatch.sweep.worker.preflight_main import smaller, tiny_copies
from support.tiny_transformers import build, config
from support.warm_sweep import run_preflight_warm

ALL = ["standard", "dpsgd", "ghost", "fast"]
LLAMA_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}


def test_other_options_than_those_tried_are_not_refused():
    tried, other = (TrialSpec("mine:Own", "tiny", 4, 8, options={"precision": kind}) for kind in ("fp8", "bf16"))
    no = PreflightResult("mine:Own", "tiny", checkpointing=False, dtype="fp32", supported=False, reason="no fp8 here")
    why_not = refusals({pair_of(no): no}, [tried, other])
    assert why_not(tried) == "no fp8 here"
    assert why_not(replace(tried, batch_size=8)) == "no fp8 here"
    assert why_not(other) is None


def specs(*models, trainers=ALL, **settings):
    return [
        TrialSpec(trainer, model, batch_size, seq_len, **settings)
        for model in models
        for trainer in trainers
        for batch_size in (4, 8)
        for seq_len in (512, 1024)
    ]


@pytest.mark.slow
def test_a_resumed_sweep_keeps_what_the_preflight_found_before(tmp_path):
    misspelt = PreflightResult("gohst", "tiny", False, "fp32", supported=False, is_mistake=True)
    earlier = PreflightResult("ghost", "gpt2", False, "fp32", supported=False, reason="tied weights")
    (tmp_path / "preflight.json").write_text(json.dumps([one.to_json() for one in (misspelt, earlier)]))
    found = run_preflight_warm(tmp_path, specs("tiny", trainers=["standard"]))
    assert list(found) == [pair_of(earlier), ("standard", "tiny", False, "fp32")]
    assert found[pair_of(earlier)].reason == "tied weights"


@pytest.mark.slow
@pytest.mark.requirement("R24")
def test_the_1b_preset_is_looked_at_in_a_few_hundred_megabytes(tmp_path):
    # In a process of its own: the most that any child held is remembered for good.
    script = (
        "import resource, sys; from pathlib import Path; from flopwatch.sweep.preflight import run_preflight\n"
        "from flopwatch.records.trial import TrialSpec\n"
        "run_preflight(Path(sys.argv[1]), [TrialSpec(name, '1b', 4, 512) for name in sys.argv[2:]])\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", script, str(tmp_path), *ALL]
    megabytes = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024
    stored = [PreflightResult(**row) for row in json.loads((tmp_path / "preflight.json").read_text())]
    found = {pair_of(result): result for result in stored}

    assert [trainer for trainer, *_ in found] == ALL
    full = load_model("1b")
    model_flops = count_flops(full, trial_batch(full, 4, 512, 0, "cpu")).model_flops
    for result in found.values():
        assert (result.supported, result.tried, result.reason) == (True, True, "")
        assert (result.parameters, result.model_flops) == (1_339_674_624, model_flops)
    ghost = found["ghost", "1b", False, "fp32"]
    assert ghost.shares["ghost"] > 0.999
    assert set(ghost.layers["ghost"]) == {"Linear", "Embedding"}
    assert set(ghost.layers["hook"]) == {"LayerNorm"}
    assert sum(ghost.shares.values()) == pytest.approx(1)
    assert ghost.difference < 1e-5
    assert megabytes < 700  # torch, Opacus and transformers loaded; the weights alone would be 5,100
    assert sorted(file.name for file in tmp_path.iterdir()) == ["logs", "preflight.json"]


@pytest.mark.slow
def test_what_cannot_run_is_told_with_the_true_reason(tmp_path):
    tied, experts = tmp_path / "tied.json", tmp_path / "experts.json"
    tied.write_text(json.dumps(LLAMA_7B))
    experts.write_text(
        json.dumps(
            {**LLAMA_7B, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
        )
    )
    asked = [
        *specs(str(tied)),
        *specs("tiny", checkpointing=True),
        *specs(str(experts), trainers=["standard", "dpsgd"]),
        TrialSpec("command", "", 1, 1, command="true"),
    ]
    found = {(r.trainer, r.model, r.checkpointing): r for r in run_preflight_warm(tmp_path, asked).values()}

    assert not any(pair[0] == "command" for pair in found)
    assert {pair for pair, result in found.items() if not result.supported} == {
        ("ghost", str(tied), False),
        *((trainer, "tiny", True) for trainer in ("dpsgd", "ghost", "fast")),
        ("dpsgd", str(experts), False),
    }
    assert all(result.tried for result in found.values())
    ghost = found["ghost", str(tied), False]
    assert "model.embed_tokens.weight and lm_head.weight are tied" in ghost.reason
    assert "tie_word_embeddings: false" in ghost.reason
    assert ghost.parameters == sum(p.numel() for p in load_model(str(tied)).parameters())
    assert "turn checkpointing off" in found["dpsgd", "tiny", True].reason
    assert "takes more than one input (as in a mixture of experts)" in found["dpsgd", str(experts), False].reason


USERS_FILE = """
import os, signal, subprocess, sys, time
import torch
from flopwatch.models.load import load_model
from flopwatch.sweep.trainers.builtin import StandardTrainer

class Crashing(StandardTrainer):
    def forward(self, batch):
        os.kill(os.getpid(), signal.SIGSEGV)

class Claims(StandardTrainer):
    privacy = "epsilon 3"

class Raising(StandardTrainer):
    def forward(self, batch):
        raise RuntimeError("no CUDA here")

class Hanging(StandardTrainer):
    def forward(self, batch):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        open("child.pid", "w").write(str(child.pid))
        time.sleep(1000)

def small():
    return load_model("tiny", device=str(torch.get_default_device()))

def large():
    return load_model("medium", device=str(torch.get_default_device()))

class MixesSamples(torch.nn.Module):
    # Centres over the batch: runs under DP-SGD, and means nothing.
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(16, 8)
        self.head = torch.nn.Linear(8, 16)
    def forward(self, input_ids, labels=None):
        x = self.tokens(input_ids)
        logits = self.head(x - x.mean(0, keepdim=True))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}
"""


@pytest.fixture
def users_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(USERS_FILE)
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    return sweep


@pytest.mark.slow
def test_a_crash_costs_no_other_pair_and_blocks_nothing(users_folder):
    trainers = ["standard", "mine:Crashing", "mine:Raising", "ghost"]
    asked = [*specs("tiny", trainers=trainers), *specs("mine:small", "mine:large", trainers=["standard"])]
    found = {(r.trainer, r.model): r for r in run_preflight_warm(users_folder, asked).values()}

    assert all(result.supported for result in found.values())
    assert {pair for pair, result in found.items() if result.tried} == {
        ("standard", "tiny"),
        ("ghost", "tiny"),
        ("standard", "mine:small"),
    }
    assert "killed by SIGSEGV" in found["mine:Crashing", "tiny"].reason
    assert found["mine:Raising", "tiny"].reason == "not tried: RuntimeError: no CUDA here"
    assert found["standard", "mine:large"].reason == "not tried: no copy of the model is small enough for the preflight"
    assert found["standard", "mine:large"].parameters == 41_604_096


@pytest.mark.slow
def test_an_attribute_privacy_of_another_type_is_said_to_declare_nothing(users_folder):
    (found,) = run_preflight_warm(users_folder, specs("tiny", trainers=["mine:Claims"])).values()

    assert found.supported
    assert found.tried
    assert "its attribute `privacy` is a str, not a flopwatch.sweep.Privacy" in found.reason


@pytest.mark.slow
def test_a_hang_is_ended_with_all_it_started_and_what_was_found_is_kept(users_folder):
    asked = [*specs("tiny", trainers=["standard", "mine:Hanging", "ghost"])]
    # Long enough for the first of them, since the process has imported torch already.
    found = {r.trainer: r for r in run_preflight_warm(users_folder, asked, timeout_seconds=12).values()}
    child = int((users_folder.parent / "child.pid").read_text())

    assert found["standard"].tried
    assert "it took too long" in found["mine:Hanging"].reason
    assert not found["ghost"].tried
    assert all(result.supported for result in found.values())
    assert start_ticks(child) is None


@pytest.mark.slow
def test_a_step_that_runs_and_clips_wrongly_is_unsupported(users_folder):
    asked = specs("mine:MixesSamples", trainers=["standard", "dpsgd"])
    found = {r.trainer: r for r in run_preflight_warm(users_folder, asked).values()}

    assert found["standard"].supported
    assert not found["dpsgd"].supported
    assert "from those of a loop over the samples" in found["dpsgd"].reason


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
@pytest.mark.parametrize("trainer", ["dpsgd", "ghost", "fast"])
def test_the_paths_are_those_opacus_takes(name, trainer):
    """Opacus prepares the layers it hands to functorch, which shows."""
    model = build(name)
    paths = layer_paths(trainer, model)
    instance = load_trainer(trainer)(model, TrainerSettings(2, next(model.parameters()).device))
    by_functorch = [m for m in instance.model._module.modules() if hasattr(m, "ft_compute_sample_grad")]
    total = sum(p.numel() for p in model.parameters())

    assert {type(module).__name__ for module in by_functorch} == set(paths.get("functorch", {}))
    share = sum(p.numel() for module in by_functorch for p in module.parameters()) / total
    assert sum(paths.get("functorch", {}).values()) == pytest.approx(share)
    assert ("ghost" in paths) == (trainer == "ghost")
    assert sum(sum(by_class.values()) for by_class in paths.values()) == pytest.approx(1)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3", "gpt2", "bert", "vit"])
def test_a_tiny_copy_has_the_same_classes_of_layers(name, tmp_path):
    big = {**config(name), "num_hidden_layers": 12, "hidden_size": 768, "vocab_size": 30000}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(big))
    tiny, full = next(tiny_copies(str(file))), load_model(str(file))

    assert type(tiny) is type(full)
    assert {type(module) for module in tiny.modules()} == {type(module) for module in full.modules()}
    assert sum(p.numel() for p in tiny.parameters()) < 100_000


def test_shrinking_keeps_one_layer_of_each_kind_and_the_ratio_of_heads():
    kinds = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 6
    small = smaller({**LLAMA_7B, "num_hidden_layers": 12, "layer_types": kinds, "bos_token_id": 31999}, is_narrow=True)

    assert (small["num_hidden_layers"], small["layer_types"]) == (6, kinds[:6])
    assert small["num_attention_heads"] // small["num_key_value_heads"] == 4
    assert small["bos_token_id"] is None
    assert transformers.AutoConfig.for_model(**small).tie_word_embeddings
