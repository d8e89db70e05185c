"""`flopwatch init` writes files that the real readers accept, with every setting at its default."""

import re

import yaml

from flopwatch.monitor.config import MonitorConfig, read_config
from flopwatch.sweep.spec.matrix import Matrix, expand, read_matrix


def with_every_setting(text):
    """The file after the user has removed the `#` before every setting."""
    return re.sub(r"^( *)#(\w+: )", r"\1\2", text, flags=re.MULTILINE)


def test_the_monitors_file_changes_nothing_until_it_is_edited(flopwatch, tmp_path):
    file = tmp_path / "flopwatch.yaml"
    status, said, _ = flopwatch("init", str(file))
    assert status == 0
    assert f"flopwatch run --config {file} train.py" in said
    assert read_config(file) == (MonitorConfig(), [])


def test_the_monitors_file_has_every_setting_with_its_default_and_what_it_does(flopwatch, tmp_path):
    file = tmp_path / "flopwatch.yaml"
    flopwatch("init", str(file))
    file.write_text(with_every_setting(file.read_text()))
    config, problems = read_config(file)
    assert problems == []
    assert config == MonitorConfig()
    assert config.model_fields_set == set(MonitorConfig.model_fields)
    assert all(field.description in file.read_text() for field in MonitorConfig.model_fields.values())


def test_an_edited_setting_is_read(flopwatch, tmp_path):
    file = tmp_path / "flopwatch.yaml"
    flopwatch("init", str(file))
    file.write_text(file.read_text().replace("#log_every: 50", "log_every: 7"))
    assert read_config(file) == (MonitorConfig(log_every=7), [])


def test_the_sweeps_file_is_accepted_by_sweep_as_it_is(flopwatch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert flopwatch("init", "--sweep")[0] == 0
    status, shown, _ = flopwatch("sweep", "sweep.yaml", "--dry-run")
    assert status == 0
    assert "4 trials, 4 to run" in shown


def test_the_sweeps_file_has_every_setting_with_its_default(flopwatch, tmp_path):
    file = tmp_path / "matrix.yaml"
    flopwatch("init", "--sweep", str(file))
    file.write_text(with_every_setting(file.read_text()))
    assert set(yaml.safe_load(file.read_text())) == set(Matrix.model_fields)
    assert expand(read_matrix(file, {})) == expand(Matrix())


def test_a_file_is_replaced_only_with_force(flopwatch, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    status, _, said = flopwatch("init", str(file))
    assert (status, file.read_text()) == (2, "mine")
    assert "--force" in said
    assert flopwatch("init", str(file), "--force")[0] == 0
    assert file.read_text().startswith("# Settings of flopwatch's monitor.")
