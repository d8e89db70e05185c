import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace

import pytest

from flopwatch.records.run import Notice, Row, Summary
from flopwatch.sinks.console import ConsoleSink
from support.sinks.sample_run import ORIGIN, START, records

FULL = {
    "training/loss": 2.345678,
    "perf/mfu_percent": 41.234,
    "perf/hfu_percent": 45.01,
    "perf/tokens_per_second": 182_345.0,
    "perf/step_time": 0.2134,
}


def printed(*written):
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    for record in written:
        sink.write(record)
    sink.close()
    return stream.getvalue()


def test_a_row_is_one_plain_line():
    line = printed(Row(20, 0.0, FULL))
    assert line == "step 20  loss  2.3457  MFU 41.2 %  HFU 45.0 %   182k tok/s  213 ms/step\n"


def test_what_is_not_known_is_left_out():
    assert printed(Row(20, 0.0, {})) == "step 20\n"
    assert printed(Row(20, 0.0, {"perf/step_time": 2.5})) == "step 20  2.50 s/step\n"


def test_the_first_row_without_rates_says_why():
    first = Row(1, 0.0, {"training/loss": 2.0}, steps={"step": [0, 1], "warm_up": [True, True]})
    lines = printed(first, replace(first, step=3)).splitlines()
    assert lines == ["step 1  loss  2.0000  no rates yet, because these steps were counted or are warm-up",
                     "step 3  loss  2.0000"]  # fmt: skip


def test_a_file_gets_no_escape_codes_and_no_bar():
    text = printed(*records())
    assert "\x1b" not in text
    assert "left" not in text
    assert text.count("\nstep ") == 6


def test_a_long_notice_stays_on_one_line_of_a_file_and_is_not_taken_for_markup():
    message = "[bold]" + "a long story " * 20 + "[/nothing]"
    assert printed(Notice(7, "error", "code", message)) == f"error at step 7: {message}\n"


def test_the_peak_and_its_convention_are_told_once():
    text = printed(START, ORIGIN)
    assert "FLOPs of model(batch) by trace, attention full" in text
    assert "8 x 989.4 TFLOP/s bf16 of NVIDIA H100 80GB HBM3" in text
    assert "no peak known" in printed(START, replace(ORIGIN, peak=None))


def test_the_summary_is_a_table_that_tells_what_failed():
    values = {
        "total/steps": 12_000,
        "time/train_seconds": 2556.1,
        "perf/mfu_percent": 41.9,
        "total/model_flops": 3.3e21,
    }
    text = printed(
        Summary(12_000, 0.0, values, {"mfu_above_peak": 2}, {"mlflow": "refused"}, {"wandb": 12, "jsonl": 0})
    )
    table = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines()[2:])
    assert table == {
        "steps": "12,000",
        "time in steps": "42 min 36 s",
        "MFU": "41.9 %",
        "model FLOPs": "3.3 ZFLOP",
        "notices": "mfu_above_peak (2 times)",
        "wandb lost": "12 rows",
        "mlflow failed": "refused",
    }


def on_terminal(columns, code):
    """What a terminal of this width gets from the code, byte by byte."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    settings = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR")}
    settings["TERM"] = "xterm-256color"
    prepared = "from dataclasses import replace\nfrom flopwatch.sinks.console import ConsoleSink\n"
    prepared += "from flopwatch.records.run import *\nfrom support.sinks.sample_run import *\n"
    prepared += "from sinks.test_console import FULL\n"
    command = [sys.executable, "-c", prepared + "sink = ConsoleSink()\n" + code]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=settings)
    os.close(terminal)
    seen = b""
    try:
        while piece := os.read(main, 65536):
            seen += piece
    except OSError:
        pass
    os.close(main)
    assert process.wait() == 0, seen.decode()
    return seen.decode().replace("\r\n", "\n")


def screen(seen):
    """The lines that stand on the screen in the end: an erased line is gone, colours are not looked at."""
    lines = [line.rpartition("\r\x1b[2K")[2] for line in seen.split("\n")]
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines]


HALFWAY = """
for record in (START, *(Row(step, STARTED_AT + 2 * step, FULL) for step in (10, 20, 30))):
    sink.write(record)
"""


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_terminal_has_one_bar_below_the_lines_and_nothing_is_wider_than_it(columns):
    lines = screen(on_terminal(columns, HALFWAY))
    assert [line.split("  ")[0] for line in lines[1:-1]] == ["step 10", "step 20", "step 30"]
    assert re.search(r"━+.* 50 %  30 of 60  60 s left$", lines[-1])
    assert max(map(len, lines)) <= columns


def test_the_bar_is_gone_when_the_summary_stands_there():
    lines = screen(on_terminal(80, HALFWAY + "sink.write(summary())\nsink.close()"))
    assert not any("━" in line for line in lines)
    assert "The run ended at step 60." in lines


def test_an_interrupted_run_leaves_a_visible_cursor_on_a_line_of_its_own():
    seen = on_terminal(80, HALFWAY + "sink.close()")
    assert "\x1b[?25l" not in seen
    assert seen.endswith("\n")


@pytest.mark.parametrize(("waiting", "is_shown"), [(34.4, True), (9.9, False)])
def test_a_long_wait_for_input_is_shown_in_the_line_and_at_the_end(waiting, is_shown):
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    sink.write(Row(20, 0.0, {"training/loss": 2.5, "perf/input_wait_percent": waiting}))
    assert ("input wait 34.4 %" in stream.getvalue()) is is_shown
    sink.write(Summary(20, 0.0, {"perf/input_wait_percent": waiting}))
    end = stream.getvalue().rpartition("The run ended")[2]
    assert ("input wait  34.4 % of the time in steps" in end) is is_shown


def test_the_end_of_a_run_names_the_command_that_explains_it():
    stream = io.StringIO()
    sink = ConsoleSink(stream)
    sink.write(replace(START, output_dir="/runs/of me/" + 80 * "a"))
    sink.write(Summary(20, 0.0, {"total/steps": 20}))
    assert stream.getvalue().splitlines()[-1] == f"Next: flopwatch why '/runs/of me/{80 * 'a'}'"
