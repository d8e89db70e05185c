"""`flopwatch run` with scripts that use a framework: its metrics are in the framework's own W&B and TensorBoard runs.

What the script prints, and what its own callbacks are given, stays as it is.
"""

import csv
import json
import os

import pytest

from support.sinks.wandb_file import find_file, read_history
from support.warm_python import TRANSFORMERS, start_warm
from testbeds.frameworks import tiny_run

pytestmark = pytest.mark.slow

AS_A_COMMAND = "from flopwatch.cli import main; main()"

HUGGING_FACE = """
import sys
from transformers import TrainerCallback
from flopwatch.integrations.hugging_face import FlopwatchCallback
from testbeds.frameworks.tiny_hf import hf_trainer


class Own(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        print("own callback:", sorted(logs))


callbacks = [FlopwatchCallback()] if "own" in sys.argv else []
hf_trainer("own", Own(), *callbacks, report_to=["wandb", "tensorboard"]).train()
"""

LIGHTNING = """
from lightning.pytorch.loggers import CSVLogger
from testbeds.frameworks import tiny_run
from testbeds.frameworks.tiny_lightning import TextModule, lightning_trainer

trainer = lightning_trainer("own", logger=CSVLogger("csv"), num_sanity_val_steps=2, max_epochs=16)
trainer.fit(TextModule(), tiny_run.loader(), tiny_run.loader())
print(sorted(trainer.progress_bar_metrics))
"""


def flopwatch_run(folder, script, *arguments, mode="smart"):
    (folder / "script.py").write_text(script)
    env = {
        **os.environ,
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
        "FLOPWATCH_PEAK_TFLOPS": "1",
        "FLOPWATCH_MODE": mode,
    }
    command = ["run", "--output-dir", "log", "script.py", *arguments]
    process = start_warm(AS_A_COMMAND, *command, env=env, cwd=folder, modules=TRANSFORMERS)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


def summary(folder):
    (found,) = [
        record
        for record in map(json.loads, (folder / "training_log.jsonl").read_text().splitlines())
        if record["type"] == "summary"
    ]
    return found


@pytest.mark.parametrize("arguments", [(), ("own",)], ids=["unchanged", "with a callback of its own"])
def test_the_trainers_own_wandb_and_tensorboard_runs_have_mfu_once_in_the_row_of_the_loss(tmp_path, arguments):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flopwatch_run(tmp_path, HUGGING_FACE, *arguments, mode="estimate")  # counted steps have no rates
    rows = [row for row in read_history(find_file(tmp_path)) if "train/perf/mfu" in row]  # find_file: one W&B run
    assert [row["train/global_step"] for row in rows] == [2, 4, 6]
    assert all(row["train/loss"] > 0 and row["train/perf/mfu"] > 0 for row in rows)
    assert rows[-1]["train/total/tokens"] == tiny_run.truth()["total/tokens"]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6]
    assert [event.step for event in events.Scalars("train/perf/mfu")] == [2, 4, 6]


def test_the_trainers_lines_and_the_scripts_callbacks_get_nothing_new(tmp_path):
    out, err = flopwatch_run(tmp_path, HUGGING_FACE, mode="estimate")
    assert out.count("'loss': ") == 3
    assert "perf/" not in out
    assert "total/" not in out
    assert "MFU" in err


def test_lightnings_own_logger_has_mfu_in_the_row_of_the_loss_and_validation_leaves_all_exact(tmp_path):
    out, _ = flopwatch_run(tmp_path, LIGHTNING)
    (path,) = tmp_path.glob("csv/**/metrics.csv")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    assert [int(row["step"]) for row in rows] == list(range(1, 48, 2))
    assert float(rows[-1]["perf/mfu"]) > 0  # the first rows have none: their steps are counted
    assert "perf/" not in out
    found = summary(tmp_path / "log")
    assert found["exact"] is True, found["notes"]
    assert {key: found["values"][key] for key in tiny_run.truth()} == {
        key: value * 16 // tiny_run.EPOCHS for key, value in tiny_run.truth().items()
    }
