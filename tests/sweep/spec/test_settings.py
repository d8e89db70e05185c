"""A setting of a trial is declared once: as a field of `TrialSpec` with a `Setting` in its metadata."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

import flopwatch
from flopwatch.cli.app import app
from flopwatch.decode import read_record
from flopwatch.errors import InputError
from flopwatch.records.settings import REPORTED, SETTINGS, Setting, TrialSpec
from flopwatch.sweep.spec.matrix import Matrix, expand, read_matrix
from flopwatch.sweep.spec.names import trial_names
from flopwatch.sweep.spec.parsing import settings_without_flags

LAST = "    privacy: Mapping[str, Any] = field("
MADE_UP = """\
    compile_mode: str = field(default="none", metadata=_set(
        "How torch.compile works.", ("none",), "mode of torch.compile", compared="beside", since=2))
"""
SHOWN = """
from flopwatch.records.trial import TrialSpec, content_key
from flopwatch.report.cells import column_names
from flopwatch.report.table import COLUMNS
print([(column.name, column.kind, column.meaning) for column in COLUMNS if column.name == "compile_mode"])
specs = {mode: TrialSpec("standard", "tiny", 4, 8, compile_mode=mode) for mode in ("none", "fast")}
print(column_names(specs))
print({mode: content_key(spec, {}) for mode, spec in specs.items()})
"""


def test_every_setting_says_how_it_is_called_and_shown():
    assert all(isinstance(field.metadata["setting"], Setting) for field in dataclasses.fields(TrialSpec))
    assert set(REPORTED) == set(SETTINGS) == {field.name for field in dataclasses.fields(TrialSpec)}
    assert {name for name, setting in SETTINGS.items() if setting.text} < set(Matrix.model_fields)


@pytest.mark.parametrize("command", ["trial", "fit", "sweep"])
def test_a_setting_has_a_flag_of_its_name_or_is_written_as_a_key_but_not_both(command):
    app.commands[command].load()
    flags = {parameter.name for parameter in app.commands[command].params}
    expected = {name for name, setting in SETTINGS.items() if setting.has_flag}
    assert flags & set(SETTINGS) == expected - ({"batch_size"} if command == "fit" else set())
    with pytest.raises(InputError, match="write 'batch_size=4' as --batch-size 4"):
        settings_without_flags(["seed=1", "batch_size=4"])


@pytest.fixture(scope="module")
def with_a_new_setting(tmp_path_factory):
    """Runs Python with a copy of flopwatch to which one field was added."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(Path(flopwatch.__file__).parent, root / "flopwatch", ignore=shutil.ignore_patterns("__pycache__"))
    file = root / "flopwatch/records/settings.py"
    file.write_text(file.read_text().replace(LAST, MADE_UP + LAST))

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(root)}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout

    return run


@pytest.mark.slow
def test_a_new_setting_is_a_key_of_the_matrix_and_an_axis(with_a_new_setting):
    words = ("--trainer=standard", "--batch-size=4", "--seq-len=8", "compile_mode=none,fast")
    shown = with_a_new_setting("-m", "flopwatch", "sweep", *words, "--dry-run")
    assert "StandardTrainer_bs4_seq8_compile_modenone" in shown
    assert "StandardTrainer_bs4_seq8_compile_modefast" in shown
    with_a_new_setting("-m", "flopwatch", "init", "--sweep", "made.yaml")
    template = with_a_new_setting("-c", "print(open('made.yaml').read())")
    assert "#compile_mode: [none]" in template
    assert "# How torch.compile works." in template


def test_a_new_setting_is_a_column_and_a_part_of_the_trials_key(with_a_new_setting):
    column, names, keys = with_a_new_setting("-c", SHOWN).splitlines()
    assert column == "[('compile_mode', 'text', 'mode of torch.compile')]"
    assert names == "{'none': 'standard compile_mode=none', 'fast': 'standard compile_mode=fast'}"
    before = flopwatch.records.trial.content_key(TrialSpec("standard", "tiny", 4, 8), {})
    assert f"'none': '{before}'" in keys  # results of the time before the setting stay valid
    assert f"'fast': '{before}'" not in keys


AXES = {name: Matrix.model_fields[name] for name, setting in SETTINGS.items() if setting.axis}
VALUES = {
    "model": st.sampled_from(["tiny", "small", "a/config.json", "mine:build"]),
    "dtype": st.sampled_from(["fp32", "bf16", "fp16"]),
    "checkpointing": st.booleans(),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "batch_size": st.integers(1, 2**63 - 1),
    "seq_len": st.integers(1, 2**63 - 1),
    "micro_batch_size": st.none() | st.integers(1, 2**63 - 1),
}


@pytest.mark.slow
@hypothesis.given(st.fixed_dictionaries({}, optional={key: st.lists(each, max_size=3) for key, each in VALUES.items()}))
def test_every_combination_is_one_trial_with_a_name_of_its_own_that_is_read_back(matrix):
    hypothesis.assume(all(matrix.values()))
    specs = expand(read_matrix(None, matrix))
    assert len(specs) == math.prod(len(set(matrix.get(key, field.default))) for key, field in AXES.items())
    assert len(set(trial_names(specs))) == len(specs)
    assert [read_record(TrialSpec, json.loads(json.dumps(spec.to_json()))) for spec in specs] == specs
