"""Reading a run's log: what counts after resumes, kills and fresh starts, and without reading more than needed."""

import json
import math
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwatch.errors import InputError
from flopwatch.records.run import FORMAT, Notice, Provenance, Row, RunStart, Summary
from flopwatch.runs import LogFollower, NoLogError, find_log, read_around, read_log, rows_from_end, step_cells
from flopwatch.runs.log_file import lines_from_end
from support.make_run_log import Accounts, Story, session, summary_of, to_line, write_log, write_run

LOG = "training_log.jsonl"


def start(resumed_after_step=None, **more):
    return RunStart("s", 1.0, "out", resumed_after_step, **more)


def row(first, last, mark=0.0):
    """A window whose steps carry `mark` as their loss, to tell sessions apart."""
    steps = list(range(first, last + 1))
    return Row(last, 2.0, {"training/loss": mark}, steps={"step": steps, "loss": [mark] * len(steps)})


def write(path, *records):
    return write_log(path / LOG, records)


def steps_and_marks(rows):
    return {step: mark for item in rows for step, mark in zip(item.steps["step"], item.steps["loss"], strict=True)}


def test_every_record_comes_back_as_it_was_written(tmp_path):
    records = [
        start(total_steps=9, config={"mode": "smart"}, environment={"host": "a"}),
        Provenance(1, "smart", "trace", True, "full", 1.0, {"flops_per_s": 1.0}, 2, ("n",)),
        Row(3, 2.5, {"training/loss": 0.5}, True, {"step": [3], "loss": [None]}, {"steps": 3}),
        Notice(None, "info", "code", "said"),
        Summary(3, 4.0, {"total/steps": 3}, {"code": 1}, {"wandb": "gone"}, {"wandb": 2}),
    ]
    log = read_log(write(tmp_path, *records))
    assert [*log.starts, *log.provenances, *log.rows, *log.notices, log.summary] == records
    assert log.torn_lines == 0


def test_numbers_that_json_cannot_write_come_back(tmp_path):
    infinite = Row(2, 0.0, {"training/loss": math.inf, "b": -math.inf}, steps={"step": [1, 2], "loss": [math.nan, 2.0]})
    path = write(tmp_path, start(), infinite)
    assert b"NaN" not in path.read_bytes()

    (read,) = read_log(path).rows
    assert read.values == {"training/loss": math.inf, "b": -math.inf}
    assert math.isnan(read.steps["loss"][0])


def test_wherever_a_write_was_cut_off_all_lines_before_it_are_read(tmp_path):
    path = write(tmp_path, start(), row(1, 10), row(11, 20))
    whole = path.read_bytes()
    end_of_second = len(whole) - len(to_line(row(11, 20)))
    for size in range(end_of_second + 1, len(whole) - 1):
        path.write_bytes(whole[:size])
        log = read_log(path)
        assert (log.rows, log.torn_lines) == ((row(1, 10),), 1)
        assert [item["step"] for item in rows_from_end(path)] == [10]
        assert read_around(path).rows == (row(1, 10),)
    path.write_bytes(whole[:-1])
    assert read_log(path).rows == (row(1, 10), row(11, 20)), "only the end of the line is missing"


def test_a_torn_line_of_a_killed_session_is_skipped_and_counted(tmp_path):
    path = write(tmp_path, start(), row(1, 10))
    with path.open("ab") as file:
        file.write(to_line(row(11, 20))[:40] + b"\n")
    write_log(path, [start(10), row(11, 20, mark=2.0)], append=True)

    log = read_log(path)
    assert log.torn_lines == 1
    assert steps_and_marks(log.rows)[15] == 2.0


def test_steps_that_were_run_again_count_once_and_as_run_last(tmp_path):
    path = write(tmp_path, start(), row(1, 10), row(11, 20), row(21, 30), start(10), row(11, 20, mark=2.0))
    marks = steps_and_marks(read_log(path).rows)
    assert marks == {step: 0.0 if step <= 10 else 2.0 for step in range(1, 21)}
    assert [item["step"] for item in rows_from_end(path)] == [20, 10]


def test_a_window_of_which_only_the_end_was_run_again_keeps_its_first_steps(tmp_path):
    path = write(tmp_path, start(), row(1, 10), row(11, 20), start(14), row(15, 20, mark=2.0))
    log = read_log(path)
    marks = steps_and_marks(log.rows)
    assert marks == {step: 0.0 if step <= 14 else 2.0 for step in range(1, 21)}
    assert log.rows[1].values == {}, "they were of the whole window"
    assert [item["step"] for item in rows_from_end(path)] == [20, 10], "totals of a cut window would be wrong"


def test_the_newest_window_of_a_run_just_resumed_is_the_last_that_counts(tmp_path):
    path = write(tmp_path, start(), row(1, 10), row(11, 20), row(21, 30), start(20))
    assert read_around(path).rows[-1] == row(11, 20)


def test_what_stands_before_a_fresh_start_is_another_run(tmp_path):
    other = [start(), row(1, 500), Notice(5, "info", "old", "old"), Summary(500, 3.0)]
    path = write(tmp_path, *other, start(), row(1, 10, mark=2.0))
    log = read_log(path)
    assert (len(log.starts), len(log.rows), log.notices, log.summary) == (1, 1, (), None)
    assert [item["step"] for item in rows_from_end(path)] == [10]


def test_the_provenance_of_steps_that_were_run_again_goes_with_them(tmp_path):
    def provenance(step, mode):
        return Provenance(step, mode, "trace", True, "full")

    path = write(
        tmp_path,
        *(start(), provenance(1, "smart"), row(1, 10), provenance(11, "gone"), row(11, 20)),
        *(start(10), row(11, 20)),
    )
    log = read_log(path)
    assert [step_cells(log, step).provenance.mode for step in (5, 15)] == ["smart", "smart"]


@st.composite
def sessions(draw):
    """(resumed after, first step, window ends) of sessions in the order they ran."""
    history, last = [], 0
    for _ in range(draw(st.integers(1, 5))):
        resumed = draw(st.none() | st.integers(0, last)) if history else None
        first = (resumed or 0) + 1
        sizes = draw(st.lists(st.integers(1, 5), max_size=4))
        ends = [first - 1 + sum(sizes[: index + 1]) for index in range(len(sizes))]
        last = ends[-1] if ends else first - 1
        history.append((resumed, first, ends))
    return history


@pytest.mark.slow
@given(sessions())
@settings(max_examples=300, deadline=None)
def test_any_history_of_resumes_leaves_what_simulating_it_leaves(tmp_path_factory, history):
    records, truth = [], {}
    for index, (resumed, first, ends) in enumerate(history):
        records.append(start(resumed))
        truth = {} if resumed is None else {step: mark for step, mark in truth.items() if step <= resumed}
        for begin, end in zip([first, *(end + 1 for end in ends)], ends, strict=False):
            records.append(row(begin, end, mark=float(index)))
            truth |= dict.fromkeys(range(begin, end + 1), float(index))
    path = write_log(tmp_path_factory.mktemp("run") / LOG, records)

    log = read_log(path)
    assert steps_and_marks(log.rows) == truth
    assert list(steps_and_marks(log.rows)) == sorted(truth)
    for step, mark in truth.items():
        assert step_cells(read_around(path, step), step).cells["loss"] == mark


@given(st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b""))), st.integers(1, 12))
@settings(deadline=None)
def test_lines_from_the_end_are_the_lines_whatever_the_block_size(tmp_path_factory, lines, block_bytes):
    path = tmp_path_factory.mktemp("run") / "file"
    path.write_bytes(b"\n".join(lines))
    assert list(lines_from_end(path, block_bytes)) == [line for line in reversed(lines) if line]


def test_rows_whose_type_is_not_the_first_field_are_rows_all_the_same(tmp_path):
    path = tmp_path / LOG
    records = (start(), row(1, 10), row(11, 20), start(10), row(11, 12))
    path.write_text("".join(json.dumps(record.to_json(), sort_keys=True) + "\n" for record in records))
    assert [item["step"] for item in rows_from_end(path)] == [12, 10]


def test_a_newer_format_is_refused_with_advice(tmp_path):
    path = write(tmp_path, start(format=FORMAT + 1), row(1, 10))
    for read in (read_log, read_around, lambda log: list(LogFollower(log).poll())):
        with pytest.raises(InputError, match=rf"format {FORMAT + 1}.*up to format {FORMAT}: upgrade flopwatch"):
            read(path)


def test_records_and_fields_of_a_later_version_in_the_same_format_are_passed_over(tmp_path):
    path = write(tmp_path, start())
    with path.open("ab") as file:
        file.write(b'{"type": "weather", "sun": true}\n')
        file.write(json.dumps({**row(1, 10).to_json(), "mood": "good"}).encode() + b"\n")
    log = read_log(path)
    assert (log.rows, log.torn_lines) == ((row(1, 10),), 0)


@pytest.mark.parametrize("content", [b"", b"\n", b"hello\n", b'{"loss": 1}\n', b"\x00" * 100])
def test_a_file_that_is_no_log_is_refused(tmp_path, content):
    (tmp_path / LOG).write_bytes(content)
    with pytest.raises(InputError, match="no record of a run"):
        read_log(tmp_path / LOG)


def test_rows_of_a_log_that_is_not_there_are_none(tmp_path):
    assert list(rows_from_end(tmp_path / LOG)) == []


# Finding the log


def test_the_log_is_found_by_its_usual_name_or_as_the_file_itself(tmp_path):
    path = write(tmp_path, start())
    write_log(tmp_path / "another.jsonl", [start()])
    assert find_log(tmp_path) == find_log(str(path)) == path


def test_a_log_of_another_name_is_found_among_files_that_are_no_logs(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "broken.jsonl").write_text("{")
    path = write_log(tmp_path / "mine.jsonl", [start()])
    assert find_log(tmp_path) == path


def test_several_logs_are_named_and_not_chosen_from(tmp_path):
    write_log(tmp_path / "a.jsonl", [start()])
    write_log(tmp_path / "b.jsonl", [start()])
    with pytest.raises(InputError, match=r"several logs \(a.jsonl, b.jsonl\): pass one of these files"):
        find_log(tmp_path)


def test_no_log_and_no_folder_are_told_apart(tmp_path):
    with pytest.raises(NoLogError, match=r"has no training_log\.jsonl"):
        find_log(tmp_path)
    with pytest.raises(NoLogError, match="does not exist"):
        find_log(tmp_path / "typo")


# One step


def test_a_step_comes_with_its_own_cells_its_window_and_its_provenance(tmp_path):
    path = write_run(tmp_path, 40)
    found = step_cells(read_log(path), 23)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    third = [line for line in lines if line["type"] == "row"][2]
    assert found.cells == {name: column[2] for name, column in third["steps"].items()}
    assert (found.row.step, found.provenance.method) == (30, "trace")


def test_what_is_not_known_of_a_step_has_no_cell(tmp_path):
    found = step_cells(read_log(write_run(tmp_path, 10, Story(knows_tokens=False))), 1)
    assert "seconds" not in found.cells, "the first step of a session has no beginning"
    assert "tokens" not in found.cells


def test_the_provenance_that_began_last_holds(tmp_path):
    changes = [Provenance(step, f"from {step}", "trace", True, "full") for step in (1, 15)]
    path = write(tmp_path, start(), changes[0], row(1, 10), changes[1], row(11, 20))
    log = read_log(path)
    assert [step_cells(log, step).provenance.mode for step in (14, 15)] == ["from 1", "from 15"]


@pytest.mark.parametrize("read", [read_log, read_around])
def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path, read):
    path = write(tmp_path, start(), row(1, 10), row(11, 20), row(31, 40), row(41, 50))
    asked = (lambda step: read(path, step)) if read is read_around else (lambda step: read(path))
    with pytest.raises(InputError, match=r"step 51 is not in .*: the log has steps 1 to 50$"):
        step_cells(asked(51), 51)
    with pytest.raises(InputError, match=r"steps 1 to 50, but step 25 is missing$"):
        step_cells(asked(25), 25)


def test_a_log_without_a_window_has_no_steps_yet(tmp_path):
    with pytest.raises(InputError, match="the log has no steps yet"):
        step_cells(read_log(write(tmp_path, start())), 1)


# Following


def test_a_follower_gives_each_record_once_as_it_is_written(tmp_path):
    path = tmp_path / LOG
    follower = LogFollower(path)
    assert list(follower.poll()) == [], "not there yet"

    records = [start(), row(1, 10), row(11, 20)]
    for record in records:
        write_log(path, [record], append=True)
        assert list(follower.poll()) == [record]
    assert list(follower.poll()) == []


def test_a_follower_waits_for_the_end_of_a_line_whatever_part_of_it_is_there(tmp_path):
    path = tmp_path / LOG
    follower = LogFollower(path)
    seen = []
    content = b"".join(map(to_line, [start(), row(1, 10)]))
    for byte in range(len(content)):
        with path.open("ab") as file:
            file.write(content[byte : byte + 1])
        seen += follower.poll()
    assert (seen, follower.torn_lines) == ([start(), row(1, 10)], 0)


def test_a_follower_skips_and_counts_torn_lines(tmp_path):
    path = tmp_path / LOG
    path.write_bytes(to_line(start()) + to_line(row(1, 10))[:33] + b"\n" + to_line(start(0)))
    follower = LogFollower(path)
    assert list(follower.poll()) == [start(), start(0)]
    assert follower.torn_lines == 1


@pytest.mark.parametrize("how", ["replaced", "cut", "deleted"])
def test_a_follower_begins_again_with_a_new_file(tmp_path, how):
    path = write(tmp_path, start(), row(1, 10))
    follower = LogFollower(path)
    list(follower.poll())
    if how == "deleted":
        path.unlink()
        assert list(follower.poll()) == []
    if how == "replaced":
        write_log(tmp_path / "new", [start(), row(1, 10), row(11, 20)]).replace(path)
        expected = [start(), row(1, 10), row(11, 20)]
    else:
        write_log(path, [start()])
        expected = [start()]
    assert list(follower.poll()) == expected
    assert follower.times_replaced == 1


def test_a_long_backlog_is_thinned_but_only_rows_and_not_the_newest(tmp_path, monkeypatch):
    monkeypatch.setattr("flopwatch.runs.reading.MOST_ROWS", 50)
    monkeypatch.setattr("flopwatch.runs.reading.WHOLE_BYTES", 10_000)
    said = Notice(5, "info", "code", "message")
    rows = [row(10 * index + 1, 10 * index + 10) for index in range(3000)]
    path = write(tmp_path, start(), *rows[:1500], said, *rows[1500:], Summary(30_000, 1.0))

    records = list(LogFollower(path).poll())
    kept = [record for record in records if isinstance(record, Row)]
    newest = 10_000 // len(to_line(rows[-1])) - 1
    assert kept[-newest:] == rows[-newest:]
    assert 40 <= len(kept) - newest <= 60
    assert [type(record) for record in records if not isinstance(record, Row)] == [RunStart, Notice, Summary]
    gaps = [later.step - earlier.step for earlier, later in pairwise(kept)]
    assert max(gaps) < 3 * 30_000 / 50, "evenly"


def test_a_summary_is_of_the_last_session_only(tmp_path):
    accounts = Accounts()
    path = write_log(tmp_path / LOG, session(Story(), 1, 20, accounts))
    write_log(path, [summary_of(accounts, 20)], append=True)
    assert read_log(path).summary is not None
    write_log(path, session(Story(), 21, 40, accounts, 20), append=True)
    assert read_log(path).summary is None


# Length


def seconds_of(action):
    """Processor time, which other programs do not lengthen."""
    began = time.process_time()
    action()
    return time.process_time() - began


def write_long_log(path, size_bytes):
    """A realistic log, its windows repeated under new step numbers."""
    head, *windows = map(to_line, session(Story(), 1, 2000, Accounts()))
    with path.open("wb") as file:
        written, step = file.write(head), 0
        while written < size_bytes:
            rest = windows[1 + step % (len(windows) - 1)].partition(b', "unix_time"')[2]
            step += 10
            written += file.write(b'{"type": "row", "step": %d, "unix_time"' % step + rest)
    return step


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [120, pytest.param(200, marks=pytest.mark.campaign)])
def test_of_a_long_log_no_more_is_read_than_was_asked_for(tmp_path, megabytes):
    path = tmp_path / LOG
    last = write_long_log(path, 1e6 * megabytes)
    whole = seconds_of(lambda: sum(1 for _ in rows_from_end(path)))

    assert next(rows_from_end(path))["step"] == last
    assert seconds_of(lambda: next(rows_from_end(path))) < whole / 100
    assert seconds_of(lambda: read_around(path)) < whole / 2
    assert seconds_of(lambda: list(LogFollower(path).poll())) < whole / 2


def test_an_earlier_run_in_the_same_file_is_left_out_with_a_word(tmp_path):
    path = write(tmp_path, start(), row(1, 10), start(10), row(11, 40), start(), row(1, 5))
    for log in (read_log(path), read_around(path)):
        assert (log.earlier_step, [item.step for item in log.rows]) == (40, [5])
    with pytest.raises(InputError, match=r"the log has steps 1 to 5\. The log also has an earlier run, up to step 40"):
        step_cells(read_log(path), 30)
    assert read_log(write(tmp_path, start(), row(1, 10), start(10), row(11, 40))).earlier_step is None
