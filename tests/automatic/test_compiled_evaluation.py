"""`flopwatch run` sees the evaluations of a compiled model: their time belongs to no step."""

import json
import os
import subprocess
import sys

import pytest

from flopwatch.runs.reading import read_log

SLEPT_SECONDS = 0.1
SCRIPT = f"""
import json, sys, time, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.dropout(self.linear(x), 0.1, self.training)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


raw = model = Model()
if sys.argv[1] == "wrapped":
    model = torch.compile(raw, backend="aot_eager", fullgraph=True)
elif sys.argv[1] == "in place":
    raw.compile(backend="aot_eager", fullgraph=True)
else:
    for block in raw.blocks:
        block.compile(backend="aot_eager", fullgraph=True)


def evaluate(slept_seconds):
    began = time.perf_counter()
    with torch.no_grad():
        for number in range(3):
            time.sleep(slept_seconds if number else 0)
            model(torch.randn(4, 8))
    return time.perf_counter() - began


for mode in (False, True):  # compiled now, so that no evaluation takes that time
    model.train(mode)
    evaluate(0.0)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
evaluated = generated = 0.0
for step in range(60):
    if step % 20 == 0:
        model.eval()
        evaluated += evaluate({SLEPT_SECONDS})
        model.train()
    elif step % 20 == 10:  # without `model.eval()`, this is no evaluation
        generated += evaluate({SLEPT_SECONDS})
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps([evaluated, generated]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["wrapped", "in place", "blocks"])
def test_evaluations_of_a_compiled_model_are_evaluation_and_no_part_of_steps(place, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "flopwatch", "run", "--quiet", "--output-dir", "run", "train.py", place]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    evaluated, generated = json.loads(done.stdout)

    values = read_log(tmp_path / "run" / "training_log.jsonl").summary.values
    assert values["time/eval_seconds"] == pytest.approx(evaluated, abs=SLEPT_SECONDS)
    assert values.get("time/outside_seconds", 0) < generated + SLEPT_SECONDS


COMPILES_IN_EVALUATION = """
import json, sys, time, torch
from torch import nn
from flopwatch import TrainingMonitor

model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1)) for _ in range(20)])
compiled = torch.compile(model, backend="aot_eager")
monitor = TrainingMonitor(output_dir="run") if sys.argv[1] == "monitor" else None


def evaluate():
    seconds = []
    with torch.no_grad():
        for _ in range(2):
            began = time.perf_counter()
            compiled(torch.randn(4, 8))
            seconds.append(time.perf_counter() - began)
    return seconds[0] - seconds[1]


def evaluate_all():
    model.eval()
    spent = evaluate()
    model.train()
    return spent + evaluate()


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if monitor is None:
    spent = evaluate_all()
else:
    with monitor.phase("eval"):
        spent = evaluate_all()
for step in range(60):
    if monitor is not None:
        monitor.start_step()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if monitor is not None:
        monitor.log_step(step)
if monitor is not None:
    monitor.close()
print(json.dumps(spent), file=open("spent.json", "w"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["run", "monitor"])
def test_what_an_evaluation_compiles_is_compilation_and_neither_evaluation_nor_start_up(how, tmp_path):
    (tmp_path / "train.py").write_text(COMPILES_IN_EVALUATION)
    run = ["-m", "flopwatch", "run", "--quiet", "--output-dir", "run"] if how == "run" else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *run, "train.py", how], cwd=tmp_path, env=environment, check=True)
    spent = json.loads((tmp_path / "spent.json").read_text())

    values = read_log(tmp_path / "run" / "training_log.jsonl").summary.values
    # On a busy machine, much of the first evaluation is spent around the compiler.
    assert 0.25 * spent < values["time/compile_outside_seconds"] < 1.05 * spent
    assert values.get("time/eval_seconds", 0.0) < 0.75 * spent
    assert values["time/other_seconds"] > -0.1, "nothing is counted twice"
