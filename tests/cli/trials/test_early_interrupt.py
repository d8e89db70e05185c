"""Ctrl-C before the first trial: the command ends at once with status 130, without a traceback, and nothing runs on."""

import os
import signal
import subprocess
import sys

import pytest

from support.sweeping import left_behind

# Ctrl-C comes when the command begins to import a module, so the moment does not depend on the machine's speed.
PROGRAM = """
import os, signal, sys, time
import flopwatch.__main__ as command

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == MOMENT:
            sys.meta_path.remove(self)
            HOW(os.getpid(), signal.SIGINT)

def kill_in_a_destructor(pid, number):
    class Dying:
        def __del__(self):
            os.kill(pid, number)
            time.sleep(0.01)
    Dying()

MOMENT, HOW = sys.argv.pop(1), (kill_in_a_destructor if sys.argv.pop(1) == "destructor" else os.kill)
sys.meta_path.insert(0, Interrupt())
command.main()
"""
MOMENTS = ["click", "flopwatch.cli.app", "yaml", "flopwatch.sweep.folder", "flopwatch.sweep.start"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "destructor"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_early_interrupt_ends_the_sweep_quietly(tmp_path, moment, how):
    words = ["sweep", "--command", "touch $LEDGER", "--batch-size=1,2", "--seq-len=8", "-o", "s"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, moment, how, *words],
        cwd=tmp_path,
        env={**os.environ, "LEDGER": str(tmp_path / "ledger"), "FLOPWATCH_SLOT_DIR": str(tmp_path / "slots")},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stderr) == (130, "flopwatch: stopped by Ctrl-C\n"), done.stdout
    assert not (tmp_path / "ledger").exists()
    assert left_behind(tmp_path / "s") == []


@pytest.mark.parametrize("words", [["report", "s"], ["watch", "s"], ["run", "train.py"]], ids=lambda words: words[0])
def test_an_early_interrupt_ends_every_other_command_quietly_too(tmp_path, words):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "click", "plain", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stderr) == (130, "flopwatch: stopped by Ctrl-C\n"), done.stdout


def test_the_script_that_flopwatch_run_runs_keeps_pythons_own_interrupt(tmp_path):
    (tmp_path / "train.py").write_text(
        "import signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\nprint('kept')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "flopwatch", "run", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "kept" in done.stdout, done.stderr
