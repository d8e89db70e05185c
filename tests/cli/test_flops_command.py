"""`flopwatch flops`: the screens and the JSON."""

import json
from pathlib import Path

import pytest

import flopwatch
from flopwatch.cli import main
from flopwatch.models.load import dummy_batch, load_model


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ending:
        main(["flops", *arguments])
    captured = capsys.readouterr()
    return int(ending.value.code or 0), captured.out, captured.err


@pytest.mark.portable
def test_json_holds_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--model", "tiny", "--batch-size", "2", "--seq-len", "64", "--json")
    model = load_model("tiny")
    count = flopwatch.count_flops(model, dummy_batch(model, 2, 64))

    assert status == 0
    facts = json.loads(out)
    assert facts["parameters"] == 228_096
    assert facts["flops"]["model_flops"] == count.model_flops
    assert facts["flops"]["method"] == "trace"


@pytest.mark.parametrize(
    ("method", "words"),
    [("trace", "counted by a trace"), ("step", "counted while"), ("estimate", "estimated from the shapes")],
)
def test_the_table_says_how_the_flops_were_counted(capsys: pytest.CaptureFixture[str], method: str, words: str) -> None:
    _, out, _ = run(capsys, "--model", "tiny", "--batch-size", "2", "--seq-len", "64", "--method", method)

    assert f" MFLOP {words}" in " ".join(out.split())


def test_a_hypothetical_step_has_an_mfu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "tiny", "--device", "NVIDIA H100 80GB HBM3", "--step-time", "0.001", "--json"]
    status, out, _ = run(capsys, *arguments)

    facts = json.loads(out)
    assert status == 0
    assert facts["step"]["peak"]["flops_per_s"] == 989.4e12
    assert facts["step"]["mfu"] == facts["flops"]["model_flops"] / 0.001 / 989.4e12
    assert facts["step"]["hfu"] == facts["flops"]["hardware_flops"] / 0.001 / 989.4e12


@pytest.mark.slow
def test_conventions_and_methods_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    flops = {}
    for options in (["--attention", "full"], ["--attention", "causal"], ["--method", "estimate"], ["--method", "step"]):
        _, out, _ = run(capsys, "--model", "tiny", "--seq-len", "32", "--json", *options)
        flops[options[1]] = json.loads(out)["flops"]["model_flops"]

    assert flops["causal"] < flops["full"] == flops["step"] == flops["estimate"]


def test_uncounted_ops_are_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_model.py").write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding = torch.nn.Embedding(9, 4)\n"
        "        self.layer = torch.nn.Linear(4, 4)\n"
        "    def forward(self, input_ids):\n"
        "        x = self.layer(self.embedding(input_ids))\n"
        "        return torch.linalg.svdvals(x).sum() + x.sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "--model", "odd_model:Odd", "--seq-len", "7")

    assert status == 0
    assert "Not counted" in out
    assert "The true FLOPs are higher" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gigantic"], "must be a preset"),
        (["--model", "tiny", "--batch-size", "0"], "positive whole number"),
        (["--model", "tiny", "--attention", "half"], "'full' or 'causal'"),
        (["--model", "tiny", "--method", "guess"], "method must be one of"),
        (["--model", "tiny", "--step-time", "1"], "pass both --device and --step-time"),
        (["--model", "tiny", "--step-time", "nan", "--device", "NVIDIA H100 80GB HBM3"], "positive finite number"),
        (["--model", "tiny", "--step-time", "1", "--device", "NVIDIA RTX A1000"], "peak is not known"),
    ],
)
def test_bad_input_ends_with_status_2_and_advice(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    status, _, err = run(capsys, *arguments)

    assert status == 2
    assert says in err


@pytest.mark.slow
def test_a_convention_stands_beside_the_own_count(capsys: pytest.CaptureFixture[str]) -> None:
    step = ("--device", "NVIDIA H100 80GB HBM3", "--step-time", "0.001")
    arguments = ("--model", "tiny", "--batch-size", "2", "--seq-len", "64", "--convention", "megatron", *step)
    facts = json.loads(run(capsys, *arguments, "--json")[1])
    _, out, _ = run(capsys, *arguments)

    model = load_model("tiny")
    causal = flopwatch.count_flops(model, dummy_batch(model, 2, 64), attention="causal").model_flops
    assert facts["convention"]["flops"] == causal
    assert facts["step"]["mfu_by_convention"] == causal / 0.001 / 989.4e12
    assert f"{causal / facts['flops']['model_flops']:.4f} x the model FLOPs" in out
    assert "flop_utils.py" in out


def test_a_convention_that_does_not_define_the_model_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    method = ("--method", "estimate")
    status, out, _ = run(capsys, "--model", "tiny", "--convention", "palm", *method)

    assert status == 0
    assert (
        "The convention palm has no FLOPs for this model, because the model's own FLOPs are not known exactly."
        in " ".join(out.split())
    )
