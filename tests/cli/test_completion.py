"""A real bash completes the command line with click's own script, and no completion loads torch."""

import os
import shutil
import subprocess
import sys

import pytest

PROGRAM = f"""#!{sys.executable}
import atexit, sys
from flopwatch.cli import main

@atexit.register
def note_heavy_modules():
    with open({{notes!r}}, "a") as file:
        file.writelines(f"{{{{name}}}}\\n" for name in ("torch", "pydantic", "rich.console") if name in sys.modules)

main()
"""

# What bash does when the user presses Tab after the words of a line.
TAB = """
eval "$(_FLOPWATCH_COMPLETE=bash_source flopwatch)"
tab() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    "$(complete -p flopwatch | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" flopwatch
    echo "$*: ${COMPREPLY[*]}"
}
tab flopwatch ''
tab flopwatch sweep --bat
tab flopwatch sweep matrix
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="this machine has no bash")
def test_bash_completes_commands_and_options_without_torch(tmp_path):
    program, notes = tmp_path / "flopwatch", tmp_path / "heavy_modules"
    program.write_text(PROGRAM.format(notes=str(notes)))
    program.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", TAB], capture_output=True, text=True, env={**os.environ, "PATH": path})
    commands, options, file_name = done.stdout.splitlines()
    assert {"peak", "flops", "watch", "sweep", "report"} < set(commands.partition(": ")[2].split())
    assert options == "flopwatch sweep --bat: --batch-size"
    assert file_name == "flopwatch sweep matrix: ", "bash completes the names of files if flopwatch offers nothing"
    assert notes.read_text() == ""


def test_the_program_has_one_name_however_it_is_started(flopwatch):
    """The name is part of the completion script; `python -m flopwatch` would complete `python` with it."""
    assert flopwatch("--help")[1].startswith("Usage: flopwatch ")
