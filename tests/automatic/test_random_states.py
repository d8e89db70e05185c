"""flopwatch draws no random number that a training would have drawn, wherever it begins and whichever sinks it has."""

import os
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from flopwatch import TrainingMonitor
from flopwatch.random_state import same_random_states
from support.sinks.servers import free_port

TRAINING = """
import random, sys
{first}
import numpy, torch
{setting}
random.seed(0); numpy.random.seed(0); torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(random.random(), numpy.random.rand(), torch.rand(()))
for step in range(20):
    batch = torch.randn(4, 8)
    if random.random() < 0.5:
        batch = batch.flip(-1)
    loss = model(batch).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(loss.item(), random.random(), numpy.random.rand())
print(random.getstate(), numpy.random.get_state(), torch.get_rng_state().tolist(), {asked})
"""


def printed(folder, *command, first="", setting="", asked=0):
    (folder / "script.py").write_text(TRAINING.format(first=first, setting=setting, asked=asked))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command, "script.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return printed(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("options", [(), pytest.param(("--quiet", "--sinks", "tensorboard"), marks=pytest.mark.slow)])
def test_a_script_draws_the_same_numbers_under_flopwatch_run(tmp_path, plain, options):
    assert printed(tmp_path, "-m", "flopwatch", "run", *options) == plain
    assert list(tmp_path.glob("flopwatch-runs/*/training_log.jsonl"))


def states():
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tolist(), *rest), torch.get_rng_state().tolist()


def sink_options(name, folder):
    return {"prometheus": {"port": free_port()}, "mlflow": {"tracking_uri": f"file://{folder}/mlruns"}}.get(name, {})


DRAWING_SINK = """
import random, torch, numpy as np

class Sink:
    name = "drawing"
    def __init__(self): random.random(), np.random.rand(), torch.rand(3)
    def write(self, record): pass
    flush = close = lambda self: None
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sink", [None, "console", "tensorboard", "wandb", "mlflow", "prometheus", "sink_that_draws:Sink"]
)
def test_neither_the_monitor_nor_a_sink_moves_a_generator(tmp_path, monkeypatch, sink):
    for name in ("WANDB_SILENT", "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "sink_that_draws.py").write_text(DRAWING_SINK)
    monkeypatch.syspath_prepend(tmp_path)
    model, batch = torch.nn.Linear(8, 8), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = states()
    config = {"sink_options": {sink: sink_options(sink, tmp_path)}} if sink else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow's file store
        monitor = TrainingMonitor(tmp_path, config, model=model, sinks=sink, log_every=5, peak_flops_per_s=1e12)
        assert states() == before, "the constructor"
        for _ in range(20):
            with monitor.step(batch):
                model(batch).sum().backward()
                optimizer.step()
        assert states() == before, "the steps"
        monitor.close()
    assert states() == before, "the end"
    assert monitor.summary.failed_parts == {}


def test_states_are_restored_after_an_error_and_with_another_bit_generator():
    before = states()
    with pytest.raises(ZeroDivisionError), same_random_states():
        random.random() / (0 * np.random.rand() * torch.rand(()).item())
    assert states() == before
    mine = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    try:
        with same_random_states():
            first = np.random.rand()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(mine)
