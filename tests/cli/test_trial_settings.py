"""What `flopwatch trial` is given, as settings or as a `spec.json`: used, or refused in words."""

import json

import pytest

from flopwatch.records.trial import FORMAT, TrialSpec

SPEC = TrialSpec("standard", "tiny", 2, 8).to_json()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([], "expected a JSON object, found list"),
        (3, "expected a JSON object, found int"),
        ({"spec": SPEC}, "the field 'name' is missing"),
        ({"spec": {"trainer": "standard"}, "name": "t"}, "spec: the field 'model' is missing"),
        ({"spec": SPEC, "name": 3}, "name: expected text, found 3"),
        ({"format": FORMAT + 1, "spec": SPEC, "name": "t"}, "a newer flopwatch wrote this record"),
        ({"spec": {**SPEC, "processes": 3}, "name": "t"}, "cannot share a batch of"),
    ],
)
def test_a_spec_that_cannot_be_run_is_refused_in_words(tmp_path, flopwatch, content, told):
    file = tmp_path / "sweep" / "trials" / "t" / "spec.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(content))
    code, _, errors = flopwatch("trial", "--spec", str(file))
    assert code == 2
    assert told in " ".join(errors.split())
    assert "indices" not in errors


def test_a_spec_that_lies_in_no_sweep_is_refused(tmp_path, monkeypatch, flopwatch):
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({"spec": SPEC, "name": "t"}))
    code, _, errors = flopwatch("trial", "--spec", str(file))
    assert code == 2
    assert "is not in the folder of a sweep" in errors
