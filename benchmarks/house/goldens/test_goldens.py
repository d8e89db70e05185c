"""The comparison with the goldens names a changed word, number or cell, and lets markup change."""

import json

import pytest

from house.goldens import __main__ as command
from house.goldens.forms import digests, kept

PAGE = "<h1>Run</h1><table><tr><td>MFU</td><td>31.4 %</td></tr></table><p>It <b>ended</b>.</p>"


@pytest.fixture
def differences(capsys):
    def differences(form, before, after):
        count = command.compare("texts", {"case": kept(form, before)}, {"case": kept(form, after)}, 20)
        return count, capsys.readouterr().out

    return differences


@pytest.mark.parametrize(
    ("form", "before", "after", "named"),
    [
        ("text", "MFU 31.4 %\nloss 2.0", "MFU 31.5 %\nloss 2.0", "+MFU 31.5 %"),
        ("text", "What to run", "What to start", "words lost: run"),
        ("json", '{"a": {"b": [1, 2]}}', '{"a": {"b": [1, 3]}}', "+a.b = [1, 3]"),
        ("html", PAGE, PAGE.replace("<td>31.4 %</td>", ""), "-31.4 %"),
        ("html", PAGE, PAGE + "<script>" + "x" * 100 + "</script>", "size of the page"),
    ],
)
def test_what_is_changed_or_lost_is_named(differences, form, before, after, named):
    count, said = differences(form, before, after)
    assert count == 1
    assert named in said


def test_the_same_texts_in_other_markup_are_no_difference(differences):
    other = PAGE.replace("<td>", '<td class="n">').replace("<p>", "<div>").replace("</p>", "</div>")
    assert differences("html", PAGE + "<!-- room for a class -->" * 20, other)[0] == 0


def test_keys_in_another_order_and_the_last_digit_of_a_float_are_no_difference(differences):
    one, other = {"a": 0.1 + 0.2, "b": 1}, {"b": 1, "a": 0.3}
    assert differences("json", json.dumps(one), json.dumps(other))[0] == 0


def test_a_table_that_only_moved_has_lost_no_word(differences):
    count, said = differences("text", "a  1\nb  2", "b  2\na  1")
    assert count == 1
    assert "the same words" in said


def test_a_difference_that_is_announced_does_not_fail(differences, monkeypatch, tmp_path):
    (tmp_path / "intended.txt").write_text("# reasons\ntexts/ca*: a better word\n")
    monkeypatch.setattr(command, "DATA", tmp_path)
    count, said = differences("text", "old", "new")
    assert count == 0
    assert "intended: a better word" in said


def test_of_a_large_output_the_section_that_changed_is_named():
    before, after = (digests("text", f"# S\n## A\nsame\n## B\n{word}\n") for word in ("one", "two"))
    assert [one.partition(":")[0] for one, other in zip(before, after, strict=True) if one != other] == ["## B"]
