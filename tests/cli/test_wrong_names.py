"""A name that cannot be is told before anything runs, with what to write instead."""

import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from flopwatch.cli import main
from flopwatch.cli.run_logs.watch import _refuse_typing_error
from flopwatch.cli.run_logs.watch_screen import draw_frame
from flopwatch.errors import InputError
from flopwatch.runs.state import WatchedRun
from flopwatch.sweep.spec.matrix import expand, layered, read_matrix
from flopwatch.sweep.spec.names import check_names
from flopwatch.sweep.spec.parsing import parse_overrides


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", str(tmp_path / "slots"))


def checked(settings):
    specs = expand(read_matrix(None, settings))
    check_names(specs)
    return specs


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dtype": "fp8"}, "there is no dtype 'fp8'"),
        ({"device": "tpu9"}, "there is no device 'tpu9'"),
        ({"options": {"lrr": 1}}, "Did you mean 'lr'?"),
        ({"exclude": [""]}, "would remove all trials"),
        ({"trainer": [{"command": "run {bacth_size}"}]}, "did you mean {batch_size}?"),
        ({"batchsize": 4}, "there is no setting 'batchsize'"),
        ({"memroy": "4GiB"}, "did you mean 'memory'?"),
        ({"options": {"start": date(2026, 1, 1)}}, "options.start: input was not a valid JSON value"),
        (
            {"trainer": [{"trainer": "ghost", "option": {}}]},
            "there is no setting 'trainer.0.option'; did you mean 'options'",
        ),
        ({"memory": "9999999999TB"}, "than any machine has"),
        ({"batch_size": 10**31}, "less than or equal to"),
        ({"seed": [2**64]}, "less than or equal to"),
        ({"gpus": "inf"}, "valid integer"),
    ],
)
def test_a_wrong_name_is_told(settings, told):
    with pytest.raises(InputError) as caught:
        checked(settings)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer": "mine:Plain"},
        {"model": "torch.nn:Linear"},
        {
            "trainer": [{"command": "awk '{print}' ${batch} {batch_size} {rank}"}],
            "options": {"rank": 3},
            "dtype": "fp8",
        },
        {"device": "cuda:1"},
        {"trainer": "standard,ghost", "exclude": ["trainer=dp-ghost-clipping"]},
        {"trainer": "standard", "exclude": ["trainer=ghost seq_len>=4096", "dtype=bf16"]},  # of a file, with flags
    ],
)
def test_a_right_name_is_taken(settings):
    assert checked(settings)


def test_a_trainer_is_excluded_by_any_of_its_names():
    specs = checked({"trainer": "standard,ghost", "exclude": ["trainer=dp-ghost-clipping"]})
    assert {spec.trainer for spec in specs} == {"standard"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["options=3", "options.lr=0.1"], "'options.lr=0.1' sets a part of 'options'"),
        (["options.=3"], "a name is missing"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(words, told):
    with pytest.raises(InputError, match=told.replace(".", r"\.")):
        parse_overrides(words)


def test_a_later_layer_goes_over_an_earlier_one(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("batch_size: [4, 8]\nseq_len: 16\nmodel: tiny\n")
    specs = expand(read_matrix(file, layered({"batch_size": 2}, {"seq_len": [64]})))
    assert [(spec.batch_size, spec.seq_len, spec.model) for spec in specs] == [(2, 64, "tiny")]


def flopwatch(*words):
    done = subprocess.run([sys.executable, "-m", "flopwatch", *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", "k8s"], "there is no engine 'k8s'"),
        (["--jobs", "4000"], "each trial needs a core"),
        (["retry_on=foo"], "retry_on must be one of"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(tmp_path, words, told):
    code, text = flopwatch("sweep", *words, "--dry-run")
    assert (code, told in text, "Traceback" in text) == (2, True, False), text


@pytest.mark.slow
def test_a_slot_folder_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOPWATCH_SLOT_DIR", "/proc/nowhere")
    code, text = flopwatch("sweep", "--command", "true", "--batch-size=1", "--seq-len=8")
    assert code == 2
    assert "set FLOPWATCH_SLOT_DIR to another folder" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_a_trainer_that_cannot_be_loaded_costs_its_smallest_trial(tmp_path):
    code, text = flopwatch(
        "sweep", "--trainer", "nosuch:Own", "--model", "tiny", "--batch-size", "1,2", "--seq-len", "8"
    )
    assert code == 1
    assert "Own_bs1_seq8 invalid: InputError: cannot load the trainer 'nosuch:Own': No module named 'nosuch'" in text
    assert "Own_bs2_seq8 skipped: not run, because Own_bs1_seq8 could not begin" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *((("--peak-tflops", value), f"such as 989.4, got {value}") for value in ("0", "-5", "nan", "inf")),
        (("--dtype", "bf61"), "did you mean 'bf16'?"),
        (("--attention", "casual"), "did you mean 'causal'?"),
        (("--sinks", "wandb,tensorbord"), "did you mean 'tensorboard'?"),
        (("--sinks", "prometheus:x"), "'x' is not a port"),
        (("--log-every", "0"), "--log-every must be 1 step or more, got 0"),
    ],
)
def test_run_refuses_a_value_before_the_script_starts(capsys, options, told):
    Path("train.py").write_text("print('started')\n")
    with pytest.raises(SystemExit) as end:
        main(["run", *options, "train.py"])
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "")
    assert told in printed.err
    assert not Path("flopwatch-runs").exists()


@pytest.mark.parametrize("place", ["typo", "nowhere/run"])
def test_watch_does_not_wait_for_a_path_that_looks_like_a_typing_error(place):
    with pytest.raises(InputError, match=re.escape(str(Path(place).absolute()))):
        _refuse_typing_error(place)
    Path("outputs").mkdir()
    _refuse_typing_error("outputs/later")  # a training that starts soon
    lines = draw_frame(WatchedRun(), "outputs/later", 0.0, width=300, height=24)[2:]
    where = f"Waiting for the first record of a run in {Path('outputs/later').absolute()}"
    assert "".join(line.plain for line in lines).replace(" ", "").startswith(where.replace(" ", ""))
