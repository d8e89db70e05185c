"""A training that went well ends well, also while a thread of ours waits for a store that does not answer."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "ends_in_the_store.py"


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["forgotten", pytest.param("finished", marks=pytest.mark.campaign)])
def test_a_store_that_breaks_off_while_the_process_ends_does_not_abort_it(ending):
    done = subprocess.run([sys.executable, str(SCRIPT), ending], capture_output=True, text=True, timeout=300)
    # torch 2.9 prints a line of its own before.
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["the end"]), done.stderr
