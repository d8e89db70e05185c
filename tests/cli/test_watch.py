"""`flopwatch watch`: what stands on the screen is what the log says, at every size, live and after the end."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flopwatch.cli.run_logs.watch_screen import draw_frame
from flopwatch.records.run import Notice, Row, RunStart
from flopwatch.runs import read_log
from flopwatch.runs.state import WatchedRun, WatchFeed
from support.make_run_log import Accounts, Story, session, summary_of, to_line, write_log, write_run

LOG = "training_log.jsonl"
MAKE_RUN_LOG = Path(__file__).parents[1] / "support" / "make_run_log.py"
STORIES = {
    "all known": Story(),
    "no peak": Story(knows_peak=False),
    "no tokens": Story(knows_tokens=False),
    "no FLOPs": Story(knows_flops=False),
    "nothing known": Story(knows_peak=False, knows_tokens=False, knows_flops=False, total_steps=None),
}


def watched(records):
    run = WatchedRun()
    for record in records:
        run.add(record)
    return run


def text_of(run, unix_time=None, width=80, height=24):
    now = run.heard_unix_time + 1 if unix_time is None else unix_time
    lines = draw_frame(run, "runs/a", now, width=width, height=height)
    return "\n".join(line.plain for line in lines)


def a_row(step, *, mfu, rate, **more):
    values = {"perf/mfu_percent": mfu, "perf/hfu_percent": mfu, "perf/step_time": 0.1}
    if rate is not None:
        values |= {f"perf/{kind}_flops_per_second_per_device": rate for kind in ("model", "hardware")}
    return Row(step, 10.0 + step, values, **more)


def rows_in(path):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record["type"] == "row"]


# The frame


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 40), (220, 70)], ids=str)
@pytest.mark.parametrize("steps", [0, 10, 700], ids="{} steps".format)
@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_frame_fits_the_terminal(story, steps, size):
    width, height = size
    records = list(session(story, 1, steps, Accounts())) if steps else list(session(story, 1, 1, Accounts()))[:2]
    notices = [Notice(5, "warning", "a", "words " * 60), Notice(None, "error", "b", "more " * 60)]
    for run in (watched(records), watched([*records, *notices])):
        lines = draw_frame(run, "/a/very/long/folder" * 9, 2e9, width=width, height=height)
        assert len(lines) <= height
        assert max(line.cell_len for line in lines) <= width


def test_the_numbers_are_those_of_the_newest_window(tmp_path):
    path = write_run(tmp_path, 3000)
    values = rows_in(path)[-1]["values"]
    text = text_of(watched(read_all(path)))
    assert "3,000 of 20,000 steps" in text
    assert "15.0 %" in text
    for shown in (
        f"{values['perf/mfu_percent']:.1f} %",
        f"{values['perf/hfu_percent']:.1f} %",
        f"{values['training/loss']:.3f}",
        f"{values['perf/tokens_per_second']:,.0f}",
        f"{1e3 * values['perf/step_time']:.1f} ms",
    ):
        assert shown in text


def read_all(path):
    log = read_log(path)
    return [*log.starts, *log.provenances, *log.rows, *log.notices, *([log.summary] if log.summary else [])]


@pytest.mark.parametrize("name", ["no peak", "no FLOPs", "nothing known"])
def test_what_nobody_knows_is_called_unknown_and_never_zero(name):
    text = text_of(watched(session(STORIES[name], 1, 200, Accounts())))
    numbers = text.splitlines()[6]
    assert numbers.count("unknown") == 2
    assert not re.search(r"(?<![\d.])0(\.0)? %", numbers)
    assert re.search(r"^step +[▁▂▃▄▅▆▇█]", text, re.MULTILINE), "in place of the MFU curve"


def test_a_loss_that_is_not_a_number_is_shown_and_does_not_break_the_curve():
    records = list(session(Story(), 1, 200, Accounts()))
    broken = replace(records[-1], values={**records[-1].values, "training/loss": float("nan")})
    text = text_of(watched([*records[:-1], broken]))
    assert "nan" in text.splitlines()[6]
    assert re.search(r"^loss +[▁▂▃▄▅▆▇█]", text, re.MULTILINE)


def test_the_last_notices_are_shown_newest_first():
    run = watched(session(Story(), 1, 200, Accounts()))
    run.add(Notice(120, "warning", "a", "first thing"))
    run.add(Notice(150, "error", "b", "second thing"))
    text = text_of(run, height=40)
    assert text.index("x step 150: second thing") < text.index("! step 120: first thing")


def test_texts_of_the_log_do_not_steer_the_terminal():
    evil = "\x1b]0;owned\x07 \u202eevil \x00"
    run = watched(session(Story(), 1, 200, Accounts()))
    run.start = replace(run.start, environment={**run.start.environment, "host": evil})
    run.add(Notice(None, "warning", "a", evil))
    run.add(Notice(None, "warning", "b", "\x1b[31m"))
    text = text_of(run, width=220, height=70)
    assert "\\u202eevil \\x00" in text
    assert not set("\x1b\x07\u202e\x00") & set(text)


def test_all_shares_of_time_are_of_the_wall_time():
    seconds = {"wall": 200.0, "train": 60.0, "count": 43.0, "eval": 7.0, "start_up": 40.0, "restart": 30.0}
    row = a_row(10, mfu=40.0, rate=1e9, ledger={"steps": 10, "totals": {}, "seconds": seconds})
    text = text_of(watched([RunStart("s", 0.0, "out"), row]))
    shares = dict(re.findall(r"[█▒▓░·] ([A-Za-z -]+) ([\d.]+) %", text))
    expected = {"training steps": "30.0", "counting FLOPs": "21.5", "start-up": "20.0", "restarts": "15.0"}
    assert shares == {**expected, "everything else": "13.5"}
    bar = next(line for line in text.splitlines() if line.startswith("time"))
    drawn = [bar.count(pattern) / len(re.sub("[^█▒▓░·]", "", bar)) for pattern in "█▒▓░·"]
    assert drawn == pytest.approx([float(share) / 100 for share in shares.values()], abs=0.02)
    assert bar.endswith("3 min 20 s")
    assert "goodput 30.0 %" in text


def test_flops_per_second_and_mfu_are_of_the_same_window():
    """The peak is 320 GFLOP/s: 104.2 of it are 32.6 %, and the newest window had 30.5 %."""
    detailed = a_row(10, mfu=32.6, rate=104.2e9, detailed=True)
    newest_without = a_row(20, mfu=30.5, rate=None)
    text = text_of(watched([RunStart("s", 0.0, "out"), detailed, newest_without]))
    assert "30.5 %" in text
    assert "104.2 GFLOP/s" not in text
    newest = a_row(20, mfu=30.5, rate=97.6e9)
    assert "97.6 GFLOP/s" in text_of(watched([RunStart("s", 0.0, "out"), detailed, newest]))


def test_a_run_that_ended_without_a_loss_in_its_last_window_keeps_the_loss_it_had():
    records = list(session(Story(), 1, 40, Accounts()))
    last = replace(records[-1], step=43, values={"perf/step_time": 0.3})
    text = text_of(watched([*records, last]))
    assert f"{records[-1].values['training/loss']:.3f}" in text
    assert "at step 40" in text


def test_an_mfu_that_is_small_is_not_shown_as_nothing():
    text = text_of(watched([RunStart("s", 0.0, "out"), a_row(10, mfu=0.00034, rate=1e6)]))
    assert "0.00034 %" in text
    assert "0.0 %" not in text


# The state


def test_a_run_is_running_while_it_speaks_silent_after_and_ended_with_its_summary():
    accounts = Accounts()
    run = watched(session(Story(), 1, 200, accounts))
    heard = run.heard_unix_time
    assert "● running" in text_of(run, heard + 5)
    assert "● silent for 10 min" in text_of(run, heard + 600)
    assert "● running" in text_of(run, heard - 600), "the clock of the other machine may be ahead"
    run.add(summary_of(accounts, 200))
    assert "■ ended" in text_of(run, heard + 600)
    run.add(RunStart("s2", accounts.unix_time, "out", resumed_after_step=200))
    assert "○ starting" in text_of(run)


def test_slow_windows_are_not_taken_for_silence():
    rows = [Row(10 * index, 600.0 * index, {}, steps={"step": list(range(10))}) for index in range(1, 5)]
    run = watched([RunStart("s", 0.0, "out"), *rows])
    assert run.state(2400 + 900) == "running"
    assert run.state(2400 + 3000) == "silent"


def test_time_left_follows_the_pace_of_this_session_with_everything_in_it():
    rows = [Row(step, 1000.0 + 2 * step, {}) for step in (10, 20, 30)]
    run = watched([RunStart("s", 0.0, "out", total_steps=130), *rows])
    assert run.seconds_left == pytest.approx(200)
    assert "3 min left" in text_of(run)


def test_the_last_of_the_steps_planned_is_all_of_them_also_when_they_are_counted_from_0():
    for last_step in (119, 120):
        rows = [Row(step, 10.0 + step, {}, ledger={"steps": 120 + step - last_step}) for step in (59, last_step)]
        text = text_of(watched([RunStart("s", 0.0, "out", total_steps=120), *rows]))
        assert "120 of 120 steps" in text
        assert "100" in text


# What is kept


def test_curves_forget_what_was_run_again_and_all_of_an_older_run():
    accounts = Accounts()
    first = [*session(Story(), 1, 300, accounts), *session(Story(seed=1), 101, 150, accounts, 100)]
    points = watched(first).curves["training/loss"].items()
    assert [step for step, _ in points] == list(range(10, 160, 10))
    assert watched(first).sessions == 2

    fresh = watched([*first, *session(Story(), 1, 50, Accounts())])
    assert [step for step, _ in fresh.curves["training/loss"].items()] == [10, 20, 30, 40, 50]
    assert fresh.sessions == 1


# The feed


def test_a_log_may_come_later_grow_and_be_replaced(tmp_path):
    now = 100.0
    feed = WatchFeed(str(tmp_path / "run"), lambda: now)
    feed.look()
    assert feed.run.state(now) == "no log"

    path = write_run(tmp_path / "run", 30)
    feed.look()
    assert feed.run.row.step == 30

    now = 5e9
    write_log(path, list(session(Story(), 31, 40, Accounts(), 30)), append=True)
    feed.look()
    assert (feed.run.row.step, feed.run.heard_unix_time) == (40, now), "heard by the clock here"

    write_log(tmp_path / "new", session(Story(), 101, 120, Accounts(), 100)).replace(path)
    feed.look()
    assert [step for step, _ in feed.run.curves["training/loss"].items()] == [110, 120]


# The command


def test_once_prints_one_frame(flopwatch, tmp_path):
    path = write_run(tmp_path, 100)
    status, out, err = flopwatch("watch", str(tmp_path), "--once")
    assert (status, err) == (0, "")
    assert out.count("100 of 20,000 steps") == 1
    assert "\x1b" not in out
    status, out, _ = flopwatch("watch", str(path))
    assert (status, out.count("100 of 20,000 steps")) == (0, 1), "not a terminal: one frame as well"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--once"], "has no training_log.jsonl"),
        (["--refresh", "0"], "--refresh must be a positive number of seconds, got 0"),
        (["--refresh", "nan"], "--refresh must be a positive number of seconds, got nan"),
    ],
)
def test_wrong_input_ends_with_status_2_and_a_message(flopwatch, tmp_path, arguments, message):
    status, out, err = flopwatch("watch", str(tmp_path), *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_nothing_heavy_is_loaded_and_pydantic_neither(tmp_path):
    write_run(tmp_path, 50)
    code = f"""
import sys
from flopwatch.cli import main
try:
    main(["watch", {str(tmp_path)!r}, "--once"])
except SystemExit as end:
    assert not end.code
assert "rich.console" in sys.modules
sys.exit([name for name in ("torch", "pydantic", "numpy") if name in sys.modules] or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class Terminal:
    """A real terminal of a given size in which `flopwatch watch` runs."""

    def __init__(self, *arguments, columns=100, lines=30):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flopwatch", "watch", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.raw = ""

    @property
    def text(self):
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw)

    def wait_for(self, shown, since=0):
        self.wait_until(lambda text: shown in text[since:])

    def wait_until(self, is_there):
        deadline = time.monotonic() + 60
        while not is_there(self.text):
            assert time.monotonic() < deadline, f"it never came; the terminal says: {self.text[-3000:]}"
            self._read()

    def _read(self):
        if select.select([self._master], [], [], 0.1)[0]:
            try:
                self.raw += os.read(self._master, 65536).decode(errors="replace")
            except OSError:  # the other side is closed
                return False
        return True

    def type(self, keys):
        os.write(self._master, keys)

    def end(self):
        """Wait for the process; its exit status."""
        while self._read() and self.process.poll() is None:
            pass
        while select.select([self._master], [], [], 0)[0] and self._read():
            pass
        return self.process.wait(60)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def assert_clean_end(terminal):
    assert "Traceback" not in terminal.text
    left = terminal.raw.rpartition("\x1b[?1049l")
    assert left[1], "the ordinary screen is back"
    assert terminal.raw.rfind("\x1b[?25h") > terminal.raw.rfind("\x1b[?25l"), "and the cursor"
    return left[2]


@pytest.mark.slow
def test_a_growing_log_is_followed_until_ctrl_c(tmp_path):
    writer = subprocess.Popen([sys.executable, str(MAKE_RUN_LOG), str(tmp_path / "run"), "100000", "--live"])
    try:
        with Terminal(str(tmp_path / "run"), "--refresh", "0.05") as terminal:
            terminal.wait_until(lambda text: len(set(re.findall(r"([\d,]+) of 100,000 steps", text))) >= 5)
            terminal.wait_for("● running")
            steps = [int(step.replace(",", "")) for step in re.findall(r"([\d,]+) of [\d,]+ steps", terminal.text)]
            assert steps == sorted(steps)
            assert "\x1b[?1049h" in terminal.raw
            assert "\x1b[1;32m" in terminal.raw, "in colour"
            terminal.type(b"\x03")
            assert terminal.end() == 0
            last_frame = assert_clean_end(terminal)
            assert "MFU    " in last_frame, "the last frame stays"
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.slow
def test_a_run_that_has_not_begun_is_waited_for_then_followed_to_its_end(tmp_path):
    with Terminal(str(tmp_path / "run"), "--refresh", "0.05") as terminal:
        terminal.wait_for("Waiting for the first record of a run in")
        accounts = Accounts(unix_time=time.time())
        path = write_run(tmp_path / "run", 30)
        terminal.wait_for("30 of 20,000 steps")
        half = to_line(summary_of(accounts, 30))
        with path.open("ab", buffering=0) as file:
            file.write(half[:25])
            seen = len(terminal.text)
            terminal.wait_for("30 of 20,000 steps", since=seen)
            assert "ended" not in terminal.text
            file.write(half[25:])
        terminal.wait_for("■ ended")
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.end() == 0
        assert_clean_end(terminal)


@pytest.mark.slow
def test_a_terminal_that_changes_its_size_gets_a_frame_that_fits(tmp_path):
    write_run(tmp_path, 200)
    with Terminal(str(tmp_path), "--refresh", "0.05", columns=80, lines=24) as terminal:
        terminal.wait_for("MFU    ")
        wide_bar = "─" * 60  # what is left of the progress
        assert wide_bar not in terminal.text
        fcntl.ioctl(terminal._master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 130, 0, 0))
        terminal.wait_for(wide_bar)
        terminal.type(b"\x03")
        assert terminal.end() == 0
