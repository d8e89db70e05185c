"""No package has more lines than its budget."""

import json

from house.budget import BUDGET, ROOT, above, lowered, used_lines


def test_no_package_is_above_its_budget():
    assert not above(used_lines(ROOT), json.loads(BUDGET.read_text("utf-8")))


def test_a_line_too_many_is_named_with_its_package(tmp_path):
    package = tmp_path / "src" / "flopwatch" / "runs"
    package.mkdir(parents=True)
    (package / "log.py").write_text("a = 1\nb = 2\n")
    allowed = used_lines(tmp_path)
    assert above(used_lines(tmp_path), allowed) == []
    (package / "log.py").write_text("a = 1\nb = 2\nc = 3\n")
    assert above(used_lines(tmp_path), allowed) == [
        "runs: 3 lines, 1 more than the 2 of budget.json",
        "all Python of src: 3 lines, 1 more than the 2 of budget.json",
    ]


def test_lines_that_move_into_a_table_are_counted_there(tmp_path):
    package = tmp_path / "src" / "flopwatch" / "runs"
    package.mkdir(parents=True)
    (package / "log.py").write_text("a = 1\n")
    allowed = used_lines(tmp_path)
    (package / "names.json").write_text("{}\n")
    assert above(used_lines(tmp_path), allowed) == ["json of runs: 1 lines, 1 more than the 0 of budget.json"]


def test_lowering_never_raises():
    assert lowered({"runs": 9, "sweep": 5, "new": 1}, {"runs": 8, "sweep": 7, "gone": 3}) == {"runs": 8, "sweep": 5}
