"""Every example starts as its docstring says, and prints the FLOPs that a formula on paper gives."""

import csv
import importlib.util
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.few_results import ended, ran
from support.sinks.fresh_python import fresh_environment
from support.sinks.wandb_file import read_config, read_kind, read_summary
from support.torchrun import outputs_of_ranks
from support.warm_python import TRANSFORMERS, start_warm
from support.warm_sweep import MODULES as OF_SWEEPS
from testbeds.made_up_sweep import write_sweep

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TRAINED = 3  # the backward pass multiplies by the weights and by the inputs, so it costs two forward passes


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder in which the commands of the docstrings work, and which takes what they write."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(name):
    """The words of the command in the example's docstring."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    found = re.search(rf"^(?:python|torchrun \S+) (examples/{name}.*)$", text, re.MULTILINE)
    assert found is not None, f"{name} does not say how to start it"
    return shlex.split(found[1])


def printed_by(name, modules=TRANSFORMERS):
    script, *arguments = command(name)
    process = start_warm(Path(script), *arguments, modules=modules)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return out


def printed_by_sweep(name):
    """What an example prints whose trials are forks, too."""
    code = "from support import warm_sweep; warm_sweep.fork_instead_of_exec()\n"
    code += f"import runpy; runpy.run_path({command(name)[0]!r}, run_name='__main__')"
    process = start_warm(code, modules=OF_SWEEPS)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def numbers(text):
    """The long whole numbers, which are written with commas."""
    return [int(found.replace(",", "")) for found in re.findall(r"\d{1,3}(?:,\d{3})+", text)]


def tiny_flops(samples, length):
    """A training step of the preset `tiny`: width 64, 2 layers with a hidden width of 256, 1,000 words."""
    products = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 64 * 1000
    return TRAINED * samples * (2 * length * products + 2 * 4 * length**2 * 64)


def llama_forward(samples, length):
    """Forward FLOPs of a layer and of the whole Llama in three examples: width 128, hidden width 256, 512 words."""
    layer = samples * (2 * length * (4 * 128 * 128 + 3 * 128 * 256) + 4 * length**2 * 128)
    head = samples * 2 * length * 128 * 512
    return layer, 2 * layer + head


def test_a_mixture_of_experts_costs_what_its_tokens_use(place):
    out = printed_by("mixture_of_experts.py")
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 64 * 8 + 2 * (3 * 64 * 128)  # two of eight experts
    forward = 2 * 256 * (2 * layer + 64 * 512) + 2 * 4 * 4 * 64**2 * 64
    assert numbers(out)[0] == TRAINED * forward
    assert "exact: True" in out


def test_lora_saves_the_gradients_of_frozen_weights(place):
    full, lora = numbers(printed_by("lora.py"))
    _, forward = llama_forward(4, 64)
    adapter = 2 * 256 * 128 * 8  # one of the two matrices
    square = 2 * 256 * 128 * 128
    scores = 2 * 4 * 64**2 * 128  # one of the two products of attention
    assert full == TRAINED * forward
    # The embedding is frozen, so nothing before the first layer needs a gradient: the inputs of its q, k, v and of two
    # of its adapter matrices need none, and its k itself needs none.
    linear = forward - 4 * scores - 3 * square
    attention = 2 * (4 * scores) - scores
    adapters = (8 + 8 + (8 - 2)) * adapter  # forward, weights, inputs
    assert lora == forward + linear + attention + adapters


def test_checkpointing_runs_all_of_a_layer_again_but_its_last_product(place):
    out = printed_by("checkpointing.py")
    plain_needed, plain_executed, needed, executed = numbers(out)
    layer, forward = llama_forward(4, 64)
    assert plain_needed == plain_executed == needed == TRAINED * forward
    assert executed - needed == 2 * (layer - 2 * 256 * 256 * 128)
    assert f"{executed / needed:.3f} times" in out


def test_packed_documents_need_what_padded_ones_need(place):
    padded_needed, padded_executed, packed_needed, packed_executed = numbers(printed_by("packed_sequences.py"))
    documents = sum(llama_forward(1, length)[1] for length in (128, 17, 40, 71))
    assert padded_needed == packed_needed == TRAINED * documents
    # Fused attention computes the scores of both layers again in its backward pass.
    assert padded_executed == TRAINED * llama_forward(4, 128)[1] + 2 * 2 * 4 * 128**2 * 128
    assert packed_executed == TRAINED * llama_forward(1, 256)[1] + 2 * 2 * 256**2 * 128


def test_each_image_costs_what_its_size_needs(place):
    out = printed_by("vision_language.py")
    for flops, patches in zip(numbers(out), (16, 64, 128, 256), strict=True):
        length = patches // 4 + 2 + 32
        text = 2 * length * (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 64 * 512) + 2 * 4 * length**2 * 64
        blocks = 2 * patches * 2 * (4 * 32 * 32 + 2 * 32 * 128) + 2 * 4 * patches**2 * 32
        merger = 2 * (patches // 4) * (128 * 128 + 128 * 64)
        pixels = 2 * patches * (3 * 2 * 8 * 8) * 32  # pixels need no gradient
        assert flops == TRAINED * (text + blocks + merger) + 2 * pixels
    assert "exact: True" in out


def test_a_formula_makes_a_custom_op_count(place):
    out = printed_by("extending/custom_op.py")
    before, after = numbers(out)
    product = 2 * 32 * 64 * 64
    assert (before, after) == (2 * product, 5 * product)
    assert "example::product, called 3 times" in out


def test_a_sink_of_its_own_gets_every_row(place):
    out = printed_by("extending/custom_sink.py")
    with (place / "runs/custom_sink/metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["9", "19", "29", "39", "49"]
    assert "end of the run at step 49" in out


def test_a_language_model_is_charged_for_its_texts_and_not_for_padding(place):
    out = printed_by("train.py")
    spec = importlib.util.spec_from_file_location("example_train", ROOT / "examples/train.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    batches = example.batches(batch_size=8, longest=128)
    drawn = [next(batches) for _ in range(65)]
    trained = [batch for number, batch in enumerate(drawn) if not 50 <= number < 55]  # five were held out
    lengths = [int(length) for batch in trained for length in batch["attention_mask"].sum(dim=1)]
    expected = sum(tiny_flops(1, length) for length in lengths)
    from flopwatch.runs import read_log

    assert read_log(place / "runs/example/training_log.jsonl").summary.values["total/model_flops"] == expected
    assert re.search(rf"model FLOPs +{expected / 1e9:.1f} GFLOP", out)


_RUN_CELLS = """
import ast, json, sys
shared = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        body = ast.parse("".join(cell["source"])).body
        shown = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "<cell>", "exec"), shared)
        if shown is not None:
            value = eval(compile(ast.Expression(shown.value), "<cell>", "eval"), shared)
            print(value._repr_html_() if hasattr(value, "_repr_html_") else "" if value is None else repr(value))
"""


def test_the_notebook_runs_from_top_to_bottom(place):
    """Runs the cells in order as Jupyter does, which is no dependency of the tests."""
    process = start_warm(_RUN_CELLS, "examples/flopwatch.ipynb", modules=TRANSFORMERS)
    out, err = process.communicate()
    assert process.returncode == 0, err
    counted, watched = re.findall(r"<table>.*?</table>", out)
    assert numbers(counted)[0] == tiny_flops(4, 64)
    assert "runs/notebook: step 39" in watched
    assert f"{40 * tiny_flops(4, 64):,} FLOPs in 40 steps" in out


def test_the_table_of_examples_lists_each_with_the_command_of_its_docstring():
    table = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    scripts = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "examples").rglob("*.py"))
    assert [script for script in scripts if f"{script}" not in table] == []
    for found in re.findall(r"`((?:python|torchrun|flopwatch) [^`]*examples/([\w/]+\.py)[^`]*)`", table):
        assert f"\n{found[0]}\n" in (ROOT / "examples" / found[1]).read_text(encoding="utf-8")


def test_two_ranks_are_one_job(place):
    script, *arguments = command("train_ranks.py")
    first, second = outputs_of_ranks(Path(script), *arguments, ranks=2)
    assert numbers(first) == [120 * (4 + 5) * 64, 120 * tiny_flops(4 + 5, 64)]
    assert second == ""


def test_private_trainers_need_the_same_and_execute_more(place):
    found = re.findall(
        r"^(\w+): executes ([\d,]+) FLOPs per step, [\d.]+ times the ([\d,]+) ",
        printed_by_sweep("dp_sgd.py"),
        re.MULTILINE,
    )
    executed = {trainer: numbers(flops)[0] for trainer, flops, _ in found}
    assert {numbers(needed)[0] for *_, needed in found} == {tiny_flops(4, 64)}
    assert executed["standard"] < executed["dpsgd"] < executed["fast"] < executed["ghost"]


def test_a_trainer_in_the_script_is_found_by_its_trials(place):
    out = printed_by_sweep("extending/custom_trainer.py")
    assert numbers(out) == [tiny_flops(4, 64)] * 2
    assert "SignTrainer: ok" in out


def test_each_trial_is_one_run_of_wandb_however_often_it_is_logged(place):
    good, failed = ran("ghost", 4, 64, gib=2, options={"lr": 0.5}), ended("standard", 8, 64, "error", reason="boom")
    failed = replace(failed, key="failed")
    write_sweep(place / "runs/dp_sgd", [good, failed])
    environment = fresh_environment(WANDB_MODE="offline", WANDB_DIR=str(place), WANDB_SILENT="true")
    for _ in range(2):
        words = [sys.executable, *command("trials_to_wandb.py")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)
        assert (done.returncode, done.stdout) == (0, "2 trials are in the project my-project of W&B\n"), done.stderr
    files = sorted(place.glob("wandb/offline-run-*/run-*.wandb"))
    ids = [file.stem.removeprefix("run-") for file in files]
    assert sorted(ids) == ["dp_sgd-failed"] * 2 + ["dp_sgd-key"] * 2
    file = next(file for file in files if "dp_sgd-key" in file.name)
    run, config, summary = read_kind(file, "run")[0].run, read_config(file), read_summary(file)
    assert (run.project, run.run_group, run.display_name, list(run.tags)) == ("my-project", "dp_sgd", good.name, ["ok"])
    assert (config["trainer"], config["batch_size"], config["options.lr"]) == ("ghost", 4, 0.5)
    assert (summary["peak_bytes"], summary["step_seconds_median"]) == (2 * 2**30, good.measured.steps.median)
    assert "batch_size" not in summary
    other = next(file for file in files if "dp_sgd-failed" in file.name)
    assert (read_summary(other)["outcome"], read_summary(other)["reason"]) == ("error", "boom")
