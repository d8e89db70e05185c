"""`flopwatch watch` comes back when there is nothing more to see, and refuses at once what is no run."""

import os
import time
from dataclasses import replace

import pytest

from cli.test_watch import Terminal, assert_clean_end, text_of, watched
from support.make_run_log import Accounts, Story, session, summary_of, write_log, write_run


@pytest.mark.slow
def test_on_a_terminal_an_ended_run_is_shown_and_the_command_returns(tmp_path):
    """As with `!flopwatch watch RUN` in a notebook, which gives the command a terminal of its own."""
    write_run(tmp_path, 100, ended=True)
    with Terminal(str(tmp_path), "--refresh", "0.05") as terminal:
        assert terminal.end() == 0
        assert terminal.text.count("100 of 20,000 steps") == 1
        assert "■ ended" in terminal.text
        assert "\x1b[?1049h" not in terminal.raw, "the ordinary screen was never left"


@pytest.mark.slow
def test_a_run_that_ends_while_it_is_watched_is_left_with_its_last_frame(tmp_path):
    path = write_run(tmp_path, 30)
    with Terminal(str(tmp_path), "--refresh", "0.05") as terminal:
        terminal.wait_for("30 of 20,000 steps")
        write_log(path, [summary_of(Accounts(unix_time=time.time()), 30)], append=True)
        assert terminal.end() == 0
        assert "■ ended" in assert_clean_end(terminal)


@pytest.mark.parametrize("name", ["model.py", "weights.bin"])
def test_a_file_that_is_no_log_is_refused_at_once(flopwatch, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"import torch\nclass Model:\n    pass\n" if name == "model.py" else os.urandom(5000))
    for arguments in ([], ["--once"]):
        status, out, err = flopwatch("watch", str(path), *arguments)
        assert (status, out) == (2, "")
        assert "is not a log of a run" in err
        assert name in err


def test_the_folder_of_a_hugging_face_run_is_enough(flopwatch, tmp_path):
    write_run(tmp_path / "hf_run" / "flopwatch", 100)
    status, out, _ = flopwatch("watch", str(tmp_path / "hf_run"))
    assert (status, out.count("100 of 20,000 steps")) == (0, 1)
    for command in ("explain",):
        assert flopwatch(command, str(tmp_path / "hf_run"))[0] == 0


def test_list_answers_a_folder_above_several_runs_with_their_names(flopwatch, tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, 20)
    status, out, _ = flopwatch("watch", str(tmp_path), "--list")
    assert status == 0
    rows = [line for line in out.splitlines()[1:] if line.strip(" ─━")]
    assert [line.split()[0] for line in rows] == ["a", "b"]


def test_a_run_that_says_nothing_any_more_has_no_time_left():
    run = watched(session(Story(), 1, 200, Accounts()))
    text = text_of(run, run.heard_unix_time + 600)
    assert "silent for 10 min" in text
    assert " left" not in text


def test_a_long_message_of_an_exception_does_not_break_the_frame():
    accounts = Accounts()
    records = list(session(Story(), 1, 200, accounts))
    end = replace(summary_of(accounts, 200), ended_by="torch.OutOfMemoryError: " + "words " * 90)
    for width, height in ((80, 24), (120, 40)):
        lines = text_of(watched([*records, end]), width=width, height=height).splitlines()
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        assert "failed: torch.OutOfMemoryError" in lines[0]
