"""Records read back from JSON: more, fewer and broken fields."""

import json

import pytest

from flopwatch.decode import BrokenRecordError, read_record
from flopwatch.errors import FlopwatchError
from flopwatch.records.privacy import PrivacySpent
from flopwatch.records.trial import (
    Measured,
    MemoryUse,
    StepCost,
    StepTimes,
    TrialResult,
    TrialSpec,
)

WHOLE = TrialResult(
    "standard_bs4_seq8",
    "key",
    TrialSpec("standard", "tiny", 4, 8, options={"lr": [0.1, {"a": None}]}),
    "ok",
    evidence={"exit_code": 0, "deep": {"er": [1, 2.5, "x", None, True]}},
    step=3,
    measured=Measured(
        parameters=10**12,
        steps=StepTimes(10, 1.0, 0.9, 1.1, 0.8, 1.2, 1.3, 2.0, False),
        phase_seconds={"forward": 0.5},
        memory=MemoryUse(host_bytes=5, by_phase={"build": 4}),
        cost=StepCost(10**20, None, "trace", peak={"flops_per_s": 1e12, "kind": "table"}, notes=("a", "b")),
        extra={"loss": 1},
        privacy=PrivacySpent(float("inf"), 1e-5, 0.0, 0.1, 100, "rdp"),
    ),
    unix_time=1.7e9,
    seconds=2,
    earlier_attempts=({"outcome": "lost"},),
)


def content(**changes):
    return {**json.loads(json.dumps(WHOLE.to_json())), **changes}


def changed(path, value):
    """The whole record but for one value, by its path such as `measured.steps.median`."""
    record = content()
    place = record
    *parents, last = path.split(".")
    for name in parents:
        place = place[name]
    place[last] = value
    return record


def without(path):
    record = content()
    place = record
    *parents, last = path.split(".")
    for name in parents:
        place = place[name]
    del place[last]
    return record


def test_what_was_written_is_read_back_equal():
    assert read_record(TrialResult, content()) == WHOLE


def test_a_field_of_a_later_version_is_left_out_on_every_level():
    record = content(colour="blue")
    for name in ("spec", "measured"):
        record[name]["colour"] = "blue"
    record["measured"]["steps"]["colour"] = {"r": 1}
    assert read_record(TrialResult, record) == WHOLE


def test_a_record_without_optional_fields_has_their_defaults():
    record = {"name": "a", "key": "k", "spec": {"trainer": "t", "model": "m", "batch_size": 1, "seq_len": 1}}
    read = read_record(TrialResult, {**record, "outcome": "ok"})
    assert read == TrialResult("a", "k", TrialSpec("t", "m", 1, 1), "ok")


@pytest.mark.parametrize("path", ["name", "key", "spec", "outcome", "spec.batch_size", "measured.steps.median"])
def test_a_missing_field_without_a_default_is_told(path):
    with pytest.raises(BrokenRecordError, match=f"the field '{path.split('.')[-1]}' is missing"):
        read_record(TrialResult, without(path))


BROKEN = [
    ("name", 7),
    ("name", "../other"),
    ("name", "a\0b"),
    ("name", ""),
    ("key", None),
    ("spec", []),
    ("spec", None),
    ("spec.batch_size", "4"),
    ("spec.batch_size", True),
    ("spec.batch_size", 4.5),
    ("spec.batch_size", 0),
    ("spec.batch_size", float("inf")),
    ("spec.seq_len", -1),
    ("spec.options", "x"),
    ("spec.limits", 3),
    ("spec.limits.wall_seconds", "60"),
    ("spec.checkpointing", 1),
    ("outcome", "triumph"),
    ("outcome", ["ok"]),
    ("reason", {"a": 1}),
    ("evidence", "none"),
    ("step", "one"),
    ("measured", None),
    ("measured.parameters", 10**400),
    ("measured.steps", [1]),
    ("measured.steps.median", "fast"),
    ("measured.steps.median", float("nan")),
    ("measured.steps.median", -1.0),
    ("measured.memory", None),
    ("measured.memory.host_bytes", -5),
    ("measured.memory.by_phase", {"build": "much"}),
    ("measured.cost.peak", {"flops_per_s": "many"}),
    ("measured.cost.peak", {"kind": "table"}),
    ("measured.cost.notes", "a"),
    ("measured.cost.notes", [1]),
    ("measured.privacy", 1.0),
    ("seconds", "2"),
    ("format", "1"),
    ("log_tail", None),
    ("earlier_attempts", {"0": {}}),
]


@pytest.mark.parametrize(("path", "value"), BROKEN, ids=[f"{path}={str(value)[:20]}" for path, value in BROKEN])
def test_a_value_of_the_wrong_type_is_told_with_its_field(path, value):
    with pytest.raises(BrokenRecordError) as error:
        read_record(TrialResult, changed(path, value))
    record, _, field = path.rpartition(".")
    assert str(error.value).startswith(f"{record}: " if record else "the name") or field in str(error.value)
    assert len(str(error.value)) < 200


def test_a_number_that_is_none_is_not_known_where_that_may_be():
    nan = float("nan")
    assert read_record(TrialResult, changed("measured.samples_per_s", nan)).measured.samples_per_s is None
    assert read_record(TrialResult, changed("unix_time", float("inf"))).unix_time is None
    assert read_record(TrialResult, changed("measured.extra", {"a": nan, "b": 2})).measured.extra == {"b": 2}


def test_nesting_that_could_not_be_written_again_is_told():
    deep = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(BrokenRecordError, match="nested"):
        read_record(TrialResult, content(evidence={"a": deep}))


def test_an_epsilon_that_is_infinite_or_not_known_stands():
    assert read_record(TrialResult, changed("measured.privacy.epsilon", None)).measured.privacy.epsilon is None
    assert read_record(TrialResult, content()).measured.privacy.epsilon == float("inf")


def test_half_a_surrogate_pair_is_made_writable():
    read = read_record(TrialResult, content(reason="a\ud800b", evidence={"\udfff": ["\ud800"]}))
    assert read.reason == "a?b"
    json.dumps(read.to_json(), ensure_ascii=False).encode()


@pytest.mark.parametrize("kind", [TrialResult, TrialSpec, Measured])
@pytest.mark.parametrize("content", [[], 3, {"format": 1, "spec": 3, "steps": "x"}])
def test_what_from_json_raises_is_an_error_of_flopwatch(kind, content):
    with pytest.raises(FlopwatchError):
        read_record(kind, content)
