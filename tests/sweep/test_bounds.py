"""What comes from outside is cut where it enters, and its length told."""

import json

import pytest

from flopwatch.sweep.supervisor.build_result import tail
from flopwatch.sweep.worker.exception_outcome import describe_exception
from flopwatch.text import cut, one_line, plain

LARGE = 50_000_000


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_message_of_50_mb_is_kept_cut_with_its_length():
    content = describe_exception(raised(ValueError("begin" + "x" * LARGE + "end")))
    assert len(json.dumps(content)) < 30_000
    assert content["message"].startswith("beginxxx")
    assert content["message"].endswith("xxxend")
    assert "50,000,008 characters in all" in content["message"]
    assert "test_bounds.py" in content["traceback"], "where it was raised is still told"


class UnreadableError(Exception):
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("error", [UnreadableError(), SystemExit({1: object()}), ValueError("\ud800\x00")])
def test_every_exception_has_a_json_form(error):
    json.dumps(describe_exception(raised(error))).encode("ascii")


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_last_line_longer_than_the_tail_still_gives_one(tmp_path, end):
    log = tmp_path / "log"
    log.write_text("first\n" + "y" * 20_000 + "the end" + end)
    assert tail(log).rstrip().endswith("the end")
    assert len(tail(log)) <= 6010


def test_bytes_that_a_terminal_does_not_show_do_not_push_the_last_words_out_of_the_tail(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"first\0 words\nlast words\n" + bytes(20_000))
    assert tail(log) == "first words\nlast words\n"


def test_a_cut_text_is_short_and_a_short_one_is_not_cut():
    assert cut("short") == "short"
    assert len(cut("x" * LARGE, 1000)) < 1100
    assert len(one_line("\x00" * LARGE, 100)) <= 101


@pytest.mark.parametrize(
    "sign", ["\x1b", "\x9b", "\u202e", "\u2066", "\ud800", "\U000e0041", "\u200b", "\r\n\x00", "\x07"]
)
def test_nothing_that_steers_a_terminal_is_left(sign):
    shown = plain(f"a{sign}b")
    shown.encode("utf-8")
    assert sign not in shown
