"""Runs one trial of a sweep: `python -m flopwatch.sweep.supervisor SWEEP_FOLDER [NAME [ATTEMPT]]`.

Without NAME, the process waits for it on its standard input (see `spare.py`).
"""

import sys

from flopwatch.sweep.supervisor.spare import wait_for_trial
from flopwatch.sweep.supervisor.supervise import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(arguments if len(arguments) > 1 else [*arguments, *wait_for_trial()]))
