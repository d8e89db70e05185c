"""A log that is damaged, or that tells only part of the story, never gives a traceback, and never a wrong number."""

import json
import random

import pytest

from flopwatch.errors import FlopwatchError
from flopwatch.present.markdown import to_markdown
from flopwatch.present.page import to_page
from flopwatch.records.run import Row
from flopwatch.report.run.contents import read_report
from flopwatch.report.run.document import run_document, run_json
from flopwatch.runs import read_around, read_log
from flopwatch.runs.advice import conclusion_of
from flopwatch.runs.comparison import compare
from flopwatch.runs.waterfall import exactness_of, seconds_of, waterfall_of
from support.ledgers import records_of
from support.make_run_log import write_log, write_run
from testbeds.documents import document_text

SECONDS = {"wall": 1000.0, "train": 900.0, "model_at_peak": 300.0, "hardware_at_peak": 300.0}
WRONG = (None, True, -1, 1e308, 10**400, "x", "nan", "", [], {}, [1, "a", None], {"a": {"b": [1]}}, [[]], 3.7)


def places(value, place=()):
    yield place
    if isinstance(value, dict):
        for name, item in value.items():
            yield from places(item, (*place, name))
    elif isinstance(value, list):
        for index, item in enumerate(value[:2]):
            yield from places(item, (*place, index))


def damaged(lines, chance):
    """The lines with one value replaced by one of another type, and where that is."""
    number = chance.choice([0, 1, 2, len(lines) - 1, len(lines) - 2, chance.randrange(len(lines))])
    record = json.loads(lines[number])
    *above, last = chance.choice([place for place in places(record) if place])
    inside = record
    for name in above:
        inside = inside[name]
    inside[last] = chance.choice(WRONG)
    return [*lines[:number], json.dumps(record), *lines[number + 1 :]], (number, *above, last, inside[last])


def use(path):
    log = read_around(path)
    conclusion_of(log, waterfall_of(log))
    whole = read_log(path)
    whole._repr_html_()
    compare(whole, whole)
    report = read_report(path)
    assert run_json(report)
    for write in (to_markdown, to_page, document_text):
        assert write(run_document(report))


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_run(folder, 40, ended=True)
    return (folder / "training_log.jsonl").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_value_of_the_wrong_type_gives_a_message_or_is_left_out(tmp_path, lines, seed):
    chance = random.Random(seed)
    path = tmp_path / "training_log.jsonl"
    for _ in range(25):
        shown = lines[:-1] if chance.random() < 0.5 else lines  # without the summary, as after a kill
        changed, place = damaged(shown, chance)
        path.write_text("\n".join(changed) + "\n")
        try:
            use(path)
        except FlopwatchError:
            continue
        except Exception as error:
            raise AssertionError(f"at {place}") from error


def test_a_row_with_a_value_of_the_wrong_type_is_left_out_and_the_waterfall_says_so(tmp_path):
    path = tmp_path / "training_log.jsonl"
    first, provenance, row = records_of(SECONDS)
    wrong = {**row.to_json(), "step": 1001, "values": {"perf/mfu_percent": "high"}}
    write_log(path, [first, provenance, row])
    path.write_text(path.read_text() + json.dumps(wrong) + "\n")
    log = read_around(path)

    assert [each.step for each in log.rows] == [1000]
    assert waterfall_of(log).notes[0].startswith("1 line of the log cannot be read and is left out")


def test_if_the_newest_rows_are_damaged_the_newest_good_one_is_used_and_not_the_first(tmp_path):
    path = tmp_path / "training_log.jsonl"
    first, provenance, _ = records_of(SECONDS)
    rows = [
        Row(step, 2.0, {}, ledger={"steps": step, "totals": {}, "seconds": SECONDS | {"wall": 1000.0 + step}})
        for step in range(1, 6)
    ]
    write_log(path, [first, provenance, *rows])
    good = path.read_text().splitlines()
    path.write_text("\n".join([*good[:-2], *(line[: len(line) // 2] for line in good[-2:])]) + "\n")
    log = read_around(path)

    assert seconds_of(log)["wall"] == 1003.0
    assert log.torn_lines == 2


@pytest.mark.parametrize("read", [read_log, read_around])
def test_a_killed_run_is_not_exact_if_an_earlier_window_was_not(tmp_path, read):
    path = tmp_path / "training_log.jsonl"
    first, provenance, row = records_of(SECONDS)
    early = [Row(step, 2.0, {}, exact=step != 2, notes=("a random draw",) if step == 2 else ()) for step in (1, 2, 3)]
    write_log(path, [first, provenance, *early, row])

    assert exactness_of(read(path)) == (False, ("a random draw",))
    assert any("a random draw" in note for note in read_report(path).waterfall.notes)
